"""Boost and train tiny models with `HybridParallelPlugin`, ours or Colossal-AI's one, in each of its modes."""

from __future__ import annotations

import functools
import sysconfig
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import convert_to_fp8
from fp8booster.training.batches import Batches, GlobalBatch
from fp8booster.training.optimizers import WarmupCosine
from tests.colossal.models import tiny_llama
from tests.plugins.gradients import Losses, first_moments
from tests.plugins.training import Boosted, boost

# colossalai, which takes seconds to import, is imported on the ranks alone
if TYPE_CHECKING:
    from colossalai.booster.plugin import HybridParallelPlugin as NativePlugin

    from fp8booster.plugins.hybrid_parallel import HybridParallelPlugin

SEQUENCES = 8
"""Of all ranks in a step."""

LENGTH = 32
MICRO_BATCHES = 4
"""Of a pipeline."""

LOSS_SCALING = {
    "precision": "fp16",
    "initial_scale": 2.0**26,
    "min_scale": 2.0,
    "growth_factor": 4.0,
    "backoff_factor": 2.0**-9,
    "growth_interval": 1,
    "hysteresis": 1,
    "max_scale": 2.0**27,
}
"""Every argument of dynamic loss scaling, with a scale that overflows."""

MODES: dict[str, dict[str, Any]] = {
    "DP2": {},
    "DP2 ZeRO 1": {"zero_stage": 1},
    "DP2 ZeRO 2": {"zero_stage": 2},
    "TP2": {"tp_size": 2},
    "TP2 ZeRO 1": {"tp_size": 2, "zero_stage": 1},
    "TP2 split_gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "TP2 ring": {"tp_size": 2, "sequence_parallelism_mode": "ring"},
    "SP2 all_to_all": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "SP2 all_to_all ZeRO 1": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all", "zero_stage": 1},
    "SP2 ring_attn": {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"},
    "PP2 1f1b": {"pp_size": 2, "pp_style": "1f1b"},
    "PP2 1f1b ZeRO 1": {"pp_size": 2, "pp_style": "1f1b", "zero_stage": 1},
    "PP2 interleaved": {"pp_size": 2, "pp_style": "interleaved", "num_model_chunks": 2},
    "PP2 zbv": {"pp_size": 2, "pp_style": "zbv", "num_model_chunks": 2},
}
"""On two ranks."""


def arguments_of(mode: str | dict[str, Any]) -> dict[str, Any]:
    """What a plugin takes for a mode, in BF16."""
    mode = MODES[mode] if isinstance(mode, str) else mode
    arguments = {"tp_size": 1, "pp_size": 1, "precision": "bf16"} | mode
    if "sequence_parallelism_mode" in arguments:
        arguments["enable_sequence_parallelism"] = True
    if arguments["pp_size"] > 1:
        arguments.setdefault("num_microbatches", MICRO_BATCHES)
    if arguments.get("pp_style") == "zbv":
        arguments["scheduler_nodes"] = _zero_bubble(arguments["pp_size"], arguments["num_microbatches"])
    return arguments


def _zero_bubble(stages: int, micro_batches: int) -> list:
    from colossalai.pipeline.schedule.v_schedule import PipelineGraph

    costs = {"f_cost": 1000, "b_cost": 1000, "w_cost": 1000, "c_cost": 1, "f_mem": 1, "b_mem": 0, "w_mem": -1}
    return PipelineGraph(n_stage=stages, n_micro=micro_batches, **costs).get_v_schedule()


def native(mode: str | dict[str, Any], **arguments: Any) -> NativePlugin:
    """Colossal-AI's plugin."""
    from colossalai.booster.plugin import HybridParallelPlugin

    return HybridParallelPlugin(**arguments_of(mode) | arguments)


def ours(mode: str | dict[str, Any], **arguments: Any) -> HybridParallelPlugin:
    """This project's plugin, without FP8 unless `arguments` say otherwise."""
    from fp8booster.plugins.hybrid_parallel import HybridParallelPlugin

    return HybridParallelPlugin(**arguments_of(mode) | arguments)


def fp8(mode: str | dict[str, Any], **arguments: Any) -> HybridParallelPlugin:
    """This project's plugin with FP8 products and FP8 on the wire."""
    return ours(mode, **{"use_fp8": True} | arguments)


MAKERS = {"native": native, "ours": ours, "fp8": fp8}


@dataclass
class HybridRun(Boosted):
    """A boosted model, in a pipeline or not."""

    def step(self, *batches: torch.Tensor, no_sync: bool = False) -> list[float]:
        """One optimizer step over micro-batches, with `no_sync` for all but the last; returns their global losses."""
        losses = []
        for number, tokens in enumerate(batches, 1):
            unsynchronized = no_sync and number < len(batches)
            with self.booster.no_sync(self.model, self.optimizer) if unsynchronized else nullcontext():
                losses.append(self.backward(tokens, len(batches)))
        self.optimizer.step()
        self.optimizer.zero_grad()
        return losses

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Of sequences without padding, which a mask of ones says."""
        return self.model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss

    def backward(self, tokens: torch.Tensor, micro_batches: int = 1) -> float:
        """Forward and backward of one batch; returns the loss, the mean over ranks."""
        plugin = self.booster.plugin
        if plugin.pp_size > 1:
            batch = iter([{"input_ids": tokens, "labels": tokens}])
            found = self.booster.execute_pipeline(
                batch, self.model, lambda output, _: output.loss / micro_batches, self.optimizer, return_loss=True
            )["loss"]
            loss = torch.zeros(()) if found is None else found.detach().float() * micro_batches
        else:
            loss = self.loss(tokens)
            self.booster.backward(loss / micro_batches, self.optimizer)
            loss = loss.detach().float()
        loss = loss.reshape(()).clone()
        dist.all_reduce(loss, group=plugin.pp_group)  # a stage without the loss has 0
        dist.all_reduce(loss, group=plugin.dp_group)
        return loss.item() / dist.get_world_size(plugin.dp_group)


def parts(plugin: NativePlugin) -> int:
    """How many parts a pipeline cuts a model into: its stages, or their chunks."""
    return plugin.pp_size * plugin.stage_manager.num_model_chunks if plugin.stage_manager else 1


def sizes(**options: Any) -> dict[str, Any]:
    """Those of a LLaMA of 2 layers that reads bytes."""
    return {"vocab_size": 256, "num_hidden_layers": 2} | options


def start(plugin: NativePlugin, model: nn.Module | None = None, lr: float = 1e-3, **options: Any) -> HybridRun:
    """Boost a model, by default a LLaMA with `sizes`, or with a layer for each part of a pipeline of more parts;
    `options` as in `training.boost`.
    """
    if model is None:
        model = tiny_llama(**sizes(num_hidden_layers=max(2, parts(plugin))))
    run = boost(plugin, model, lr=lr, **options)
    return HybridRun(run.booster, run.model, run.optimizer)


@functools.cache
def text() -> np.ndarray:
    """Python's sources as bytes."""
    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:20]
    return np.frombuffer(b"".join(source.read_bytes() for source in sources), dtype=np.uint8)


def batches(first: int, last: int, ranks: int = 1, rank: int = 0, accumulate: int = 1) -> list[list[torch.Tensor]]:
    """The micro-batches of one data parallel rank in the steps `first` to `last` - 1; all ranks' are the same text."""
    layout = GlobalBatch(sequence=LENGTH, batch=SEQUENCES // ranks // accumulate, accumulate=accumulate, replicas=ranks)
    source = Batches(text(), layout, rank, seed=0)
    return [list(source.micro_batches(step * SEQUENCES)) for step in range(first, last)]


def learn(
    run: HybridRun,
    first: int = 0,
    last: int = 3,
    accumulate: int = 1,
    no_sync: bool = False,
    schedule: WarmupCosine | None = None,
) -> list[float]:
    """Take the steps `first` to `last` - 1; returns each one's loss over all ranks."""
    group = run.booster.plugin.dp_group
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    losses = Losses()
    for number, micro_batches in enumerate(batches(first, last, ranks, rank, accumulate), first):
        if schedule is not None:
            for parameters in run.optimizer.param_groups:
                parameters["lr"] = schedule.rate(number + 1)
        losses.append(sum(run.step(*micro_batches, no_sync=no_sync)) / accumulate)
        losses.gradients = losses.gradients or first_moments(run)
    return losses


@functools.cache
def losses_of(which: str, mode: str) -> list[float]:
    """Those of the first steps with one of `MAKERS` in one of `MODES`, trained once for all tests of these ranks."""
    return learn(start(MAKERS[which](mode)))


def learn_alone(steps: int, schedule: WarmupCosine, model: nn.Module | None = None) -> list[float]:
    """The losses of one process that computes in FP8 and sends nothing: BF16 weights under FP32 masters."""
    model = (tiny_llama(**sizes()) if model is None else model).bfloat16().train()
    convert_to_fp8(model)
    working = list(model.parameters())
    masters = [parameter.detach().float() for parameter in working]
    optimizer = torch.optim.AdamW(masters)
    losses = []
    for number, (tokens,) in enumerate(batches(0, steps)):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        for master, parameter in zip(masters, working, strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.param_groups[0]["lr"] = schedule.rate(number + 1)
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(working, masters)
    return losses


def norm_gradients(run: HybridRun, no_sync: bool) -> dict[str, torch.Tensor]:
    """Gradients of the normalization weights from two micro-batches."""
    first, second = (step[0] for step in batches(0, 2))
    if no_sync:
        with run.booster.no_sync(run.model, run.optimizer):
            run.backward(first)
    else:
        run.backward(first)
    run.backward(second)
    names = {id(value): name for name, value in run.model.unwrap().named_parameters() if "norm" in name}
    if run.booster.plugin.zero_stage == 0:
        found = {names[id(value)]: value.grad for value in run.model.parameters() if id(value) in names}
    else:
        found = {name: run.optimizer.get_working_grad_by_param_id(key) for key, name in names.items()}
    return {name: gradient.detach().float().flatten().clone() for name, gradient in found.items()}
