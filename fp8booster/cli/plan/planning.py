"""From options to a plan."""

from __future__ import annotations

import dataclasses
import warnings

from rich.console import Console

from fp8booster.cli.train.defaults import gpu_recipe
from fp8booster.cli.train.events import OutOfMemory
from fp8booster.cli.train.key_values import check_plugin, fp8_config
from fp8booster.cli.train.launch import ranks
from fp8booster.cli.train.model_folder import is_folder, require_buildable, require_layers, require_shareable
from fp8booster.cli.train.options import TrainOptions

from .configurations import GIB, GPUS, Configuration, Gpu, configurations, counted
from .models import planned_config
from .parts import extended
from .table import show

NEEDS_VALUES = {
    "gemini": "its chunks are not kept for tensors without values; docs/guide.md has its bytes for each parameter",
    "ring_attn": "it reads the lengths of sequences; plan --sp-mode all_to_all, which holds as many tokens",
}
"""What a step on tensors without values cannot run, and what to do instead."""


def make_plan(options: TrainOptions, tokens: int | None, gpu: Gpu) -> list[Configuration]:
    """Count what `options` and what is smaller take.

    Args:
        options: `nproc` set; what is open is set as on a machine with GPUs.
        tokens: that a replica takes at once; None: by model.
        gpu: by whose memory some defaults are chosen.

    Raises:
        ValueError, TypeError: options that `fp8booster train` would refuse.
    """
    folder = is_folder(options.model)
    if folder:
        require_buildable(options.model)
    recipe = gpu_recipe(options.model)
    sequence = options.sequence or recipe.sequence
    tokens = tokens or recipe.batch * sequence
    if tokens % sequence:
        raise ValueError(f"--tokens is {tokens}; it must be a multiple of --sequence, which is {sequence}")
    options = dataclasses.replace(options, sequence=sequence, batch=tokens // sequence)
    check_plugin(options)
    options.global_batch(options.nproc)
    config = planned_config(options)
    require_shareable(config, options.parallel)
    require_layers(config, options.checkpointed_layers)
    if not gpu.blockwise and fp8_config(options.fp8_options, options.level).granularity == "blockwise":
        able = ", ".join(name for name, each in GPUS.items() if each.blockwise)
        raise ValueError(
            f"--fp8-option granularity=blockwise needs a Hopper GPU, which {gpu.name} is not; give --gpu {able}, or "
            "granularity=rowwise."
        )
    for name, value in (("plugin", options.plugin), ("sp-mode", options.sp_mode)):
        if value in NEEDS_VALUES:
            raise ValueError(f"--{name} {value} cannot be planned: {NEEDS_VALUES[value]}")
    with warnings.catch_warnings():
        # colossalai, which is imported in here, advertises tensornvme and apex, which training does not need
        warnings.filterwarnings("ignore", message="Please install")
        return _with_fewest_checkpointed(list(counted(configurations(options), gpu)), gpu)


def _with_fewest_checkpointed(plan: list[Configuration], gpu: Gpu) -> list[Configuration]:
    """The plan; where its last, which checkpoints all layers, is the first that fits, with what checkpoints few."""
    kept, every = plan[-2:]
    options = every.options
    if kept.peaks is None or every.peaks is None or gpu.takes(kept.parts.total()):
        return plan
    if options.pp > 1 or options != dataclasses.replace(kept.options, checkpointing=True):
        return plan
    layers = planned_config(options).num_hidden_layers
    for count in range(1, layers):
        few = dataclasses.replace(
            every,
            name=f"+ checkpointing {count} of {layers}",
            options=dataclasses.replace(options, checkpointed_layers=count),
            peaks=extended(kept.peaks, every.peaks, count / layers),
        )
        if gpu.takes(few.parts.total()):
            return [*plan[:-1], few, every]
    return plan


def explain(error: OutOfMemory) -> None:
    """Show on standard error what takes the memory of a run that ran out of it, and what takes less."""
    console = Console(stderr=True)
    options = dataclasses.replace(error.task.options, nproc=ranks(error.task.options))  # not what this machine has
    if options.lora is not None:
        console.print("A run with --lora cannot be planned: most of its weights are frozen.")
        return
    gpu = Gpu("this GPU", error.gpu_memory / GIB)
    try:
        with console.status("Counting what takes the memory"):
            found = make_plan(options, options.batch * options.sequence, gpu)
    except (ValueError, TypeError, RuntimeError) as reason:
        console.print(f"What takes the memory could not be counted: {reason}", soft_wrap=True)
    else:
        show([each for each in found if each.precision == error.task.precision], gpu, console)
