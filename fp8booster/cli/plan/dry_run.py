"""A training step of one rank without its GPU and the other ranks: how much memory it takes, part by part.

The model, the plugin and the optimizer are those that would train; `stand_ins` has what takes the place of the rest. So
nothing is estimated but the number of layers: two models with few layers are run. CUDA graphs are captured by the code
that captures them on a GPU, into a stand-in (`counted_graphs`).
"""

from __future__ import annotations

import fp8booster.colossal  # noqa: F401  isort: skip  (patches colossalai before it is imported)
import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from fp8booster.cli.train.key_values import build_plugin, fp8_config, parse_pairs
from fp8booster.cli.train.options import TrainOptions
from fp8booster.monitor.memory import MemoryTracker
from fp8booster.nn.graphs import captured_layers
from fp8booster.nn.graphs.layer import WARM_UP
from fp8booster.nn.weights.freshness import fresh_tensors
from fp8booster.optim.states_8bit import State
from fp8booster.training.boosted import BoostedModel, causal
from fp8booster.training.models import build
from fp8booster.training.optimizers import make_optimizer
from fp8booster.training.plugins import FP32_WEIGHTS

from .configurations import KEPT, MASTERS, MOMENTS, WEIGHTS, Footprint, extended, planned_config
from .counted_graphs import CountedGraphs
from .stand_ins import instead_of_gpus

if TYPE_CHECKING:
    from transformers import PretrainedConfig

MOST_STEPS = 16
"""Steps until which layers are captured anew, as where gradients add up: each time is seen in the step after."""


class NotCaptured(Exception):
    """No layer was captured into CUDA graphs; the message tells why."""


def has_graphs(options: TrainOptions, precision: str) -> bool:
    """Tell whether layers are captured in a plan; left open it is a matter of speed, which a plan does not know."""
    return precision == "fp8" and fp8_config(options.fp8_options, options.level).cuda_graphs is True


def footprint(options: TrainOptions, precision: str, gpu_memory: int) -> Footprint:
    """Count the memory that rank 0 of `options.nproc` needs in a step, as torch's allocator does.

    In a pipeline, rank 0 keeps the most micro-batches. What the second of the two models needs more than the first is
    counted for each further layer. A model whose layers have not all as many parameters is run whole. Where the first
    layers alone are computed again, it is between that where none are and all. With `cuda_graphs=true` in the options
    for FP8 layers are captured as on a GPU with room for all, and their graphs' memory is counted; else there are none.

    Args:
        options: `nproc`, `batch` and `sequence` set.
        precision: "bf16" or "fp8".
        gpu_memory: bytes of a GPU, by which some defaults are chosen.

    Raises:
        NotCaptured: graphs are asked for, and no layer can be captured.
    """
    config = planned_config(options)
    layers = config.num_hidden_layers
    if options.checkpointed_layers is not None:
        none, every = (
            footprint(replace(options, checkpointing=checkpointing, checkpointed_layers=None), precision, gpu_memory)
            for checkpointing in (False, True)
        )
        return extended(none, every, options.checkpointed_layers / layers)
    given = parse_pairs(options.plugin_options, "--plugin-option")
    # each piece that a pipeline's stages hold has a layer
    least = options.pp * given.get("num_model_chunks", 1 if given.get("pp_style", "1f1b") == "1f1b" else 2)
    # two models, so that what is there once is told from what each layer adds; a lone layer is not captured
    smallest = 2 if has_graphs(options, precision) else 1
    few, more = min(smallest * least, layers), min((smallest + 1) * least, layers)
    times = (layers - few) / max(more - few, 1)
    values, of_few, of_more = (_values(shortened(config, each)) for each in (layers, few, more))
    if round(of_few + times * (of_more - of_few)) != values:  # as where some layers alone have experts
        return dry_steps(options, precision, config, gpu_memory / values)
    first, second = (
        dry_steps(options, precision, shortened(config, each), gpu_memory / values) for each in (few, more)
    )
    return extended(first, second, times)


def shortened(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """Return a config with so many layers; its lists with an entry for each layer are cut too."""
    short = copy.deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(short, name, value[:layers])
    short.num_hidden_layers = layers
    return short


def _values(config: PretrainedConfig) -> int:
    return sum(parameter.numel() for parameter in build(config, device=torch.device("meta")).parameters())


def dry_steps(options: TrainOptions, precision: str, config: PretrainedConfig, memory_a_value: float) -> Footprint:
    """Count the memory of steps on tensors without values.

    Args:
        memory_a_value: bytes of a GPU for each parameter of the whole model, of which `config` may have few layers.
    """
    tracker = MemoryTracker()
    with instead_of_gpus(tracker, options.nproc, int(memory_a_value * _values(config))):
        if not has_graphs(options, precision):
            return take_steps(tracker, options, precision, config)
        graphs = CountedGraphs(tracker)
        with graphs.captured_into():
            return take_steps(tracker, options, precision, config, graphs)


def take_steps(
    tracker: MemoryTracker,
    options: TrainOptions,
    precision: str,
    config: PretrainedConfig,
    graphs: CountedGraphs | None = None,
) -> Footprint:
    """Take steps on this rank; return the memory of the last, in which all states are there, and all graphs.

    Args:
        graphs: what layers are captured into.
    """
    # as the training loop builds it, or the memory of weights would be another
    dtype = torch.float32 if options.plugin in FP32_WEIGHTS else torch.bfloat16
    network = build(config, device=torch.device("cpu"), dtype=dtype, checkpointing=options.recomputed)
    network.to = lambda *_, **__: network  # torch cannot exchange the values of tensors without any
    plugin = build_plugin(options, precision == "fp8", network)
    optimizer = make_optimizer(options.optimizer_of(precision), network.parameters(), lr=1e-4)
    boosted = BoostedModel(options.plugin, plugin, network, optimizer)
    boosted.booster.backward = tracker.backward()(boosted.booster.backward)
    tokens = torch.zeros(options.batch, options.sequence, dtype=torch.int64, device="cpu")
    for step in range(MOST_STEPS):
        captured = 0 if graphs is None else graphs.captured
        tracker.begin_step()
        boosted.forward_backward([causal(tokens)] * options.accumulate)
        tracker.begin_update()
        tracker.name(KEPT, fresh_tensors())  # the step frees them
        boosted.update(options.max_norm)
        tracker.name(WEIGHTS, boosted.model.parameters())
        inside = boosted.optimizer.unwrap()
        # after the weights: where these are their own masters, the first name stays
        tracker.name(MASTERS, (each for group in inside.param_groups for each in group["params"]))
        kept = (each.codes if isinstance(each, State) else each for each in inside.state.values())
        tracker.name(MOMENTS, (value for each in kept for value in each.values() if isinstance(value, torch.Tensor)))
        tracker.name_rest(KEPT)
        # the first makes the optimizer's states; layers are captured when they have run a few times
        if step > 0 and (graphs is None or (step > WARM_UP and graphs.captured == captured)):
            break
    if graphs is not None and None not in (found := captured_layers(boosted.model)):
        reasons = [plugin.engine.cuda_graphs, *found]
        raise NotCaptured("; ".join(filter(None, reasons)) or "the model has no list of layers that are alike")
    return tracker.peaks()
