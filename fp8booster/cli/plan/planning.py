"""Plans: the memory of each configuration, counted by processes, as a table, as JSON, and for a run out of memory."""

from __future__ import annotations

import dataclasses
import os
import shlex
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context, parent_process
from typing import Any

from rich.console import Console
from rich.table import Table

from fp8booster.cli.train.defaults import recipe_of
from fp8booster.cli.train.errors import OutOfMemory
from fp8booster.cli.train.key_values import check_plugin, fp8_config
from fp8booster.cli.train.launch import ranks
from fp8booster.cli.train.model_folder import require_model, require_shareable
from fp8booster.cli.train.options import TrainOptions
from fp8booster.monitor.memory import ACTIVATIONS, GRADIENTS, TEMPORARY

from .configurations import (
    GIB,
    GPUS,
    KEPT,
    MASTERS,
    MOMENTS,
    RESERVED,
    WEIGHTS,
    Configuration,
    Gpu,
    configurations,
    extended,
    planned_config,
    with_graphs,
)

NEEDS_VALUES = {
    "moe": "how many rows a rank's experts get follows from values; plan --plugin hybrid, which holds all experts",
    "gemini": "its chunks are not kept for tensors without values; docs/guide.md has its bytes for each parameter",
    "ring_attn": "it reads the lengths of sequences; plan --sp-mode all_to_all, which holds as many tokens",
}
"""Values of options with which no step runs on tensors without values: the reason, and what to do instead."""

_HEADINGS = {
    WEIGHTS: "weight",
    KEPT: "FP8",
    MASTERS: "master",
    MOMENTS: "m, v",
    GRADIENTS: "grads",
    ACTIVATIONS: "activ.",
    TEMPORARY: "temp.",
}
_LEGEND = """weight: parameters as the model has them. FP8: FP8 weights, and buffers that stay.
m, v: moments. temp.: what a phase makes and frees."""


def make_plan(
    options: TrainOptions, tokens: int | None, gpu: Gpu, tell: Callable[[str], object] | None = None
) -> list[Configuration]:
    """Count the memory that `options` take, and those with less.

    Args:
        options: `nproc` set; what is open is set as on a machine with GPUs.
        tokens: of a replica at once; None: by model.
        gpu: by whose memory some defaults are chosen.
        tell: is given the progress, a line for each count; None: nothing is told.

    Raises:
        ValueError, TypeError: options that `fp8booster train` would refuse.
    """
    for name, value in (("plugin", options.plugin), ("sp-mode", options.sp_mode)):
        if value in NEEDS_VALUES:
            raise ValueError(f"--{name} {value} cannot be planned: {NEEDS_VALUES[value]}")
    require_model(options.model, options.checkpointed_layers)
    recipe = recipe_of(options.model, on_gpu=True)
    sequence = options.sequence or recipe.sequence
    tokens = tokens or recipe.batch * sequence
    if tokens % sequence:
        raise ValueError(f"--tokens is {tokens}; it must be a multiple of --sequence, which is {sequence}")
    options = dataclasses.replace(options, sequence=sequence, batch=tokens // sequence)
    check_plugin(options)
    options.global_batch(options.nproc)
    require_shareable(planned_config(options), options.parallel)
    if not gpu.blockwise and fp8_config(options.fp8_options, options.level).granularity == "blockwise":
        able = ", ".join(name for name, each in GPUS.items() if each.blockwise)
        raise ValueError(
            f"--fp8-option scaling=blockwise needs a Hopper GPU, which {gpu.name} is not; give --gpu {able}, or "
            "scaling=rowwise."
        )
    with warnings.catch_warnings():
        # colossalai, which is imported in here, advertises tensornvme and apex, which training does not need
        warnings.filterwarnings("ignore", message="Please install")
        return _with_fewest_checkpointed(list(counted(configurations(options), gpu, tell)), gpu)


def _with_fewest_checkpointed(plan: list[Configuration], gpu: Gpu) -> list[Configuration]:
    """Return the plan; where checkpointing all layers is the first that fits, with checkpointing as few as fit too."""
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
            peaks_with_graphs=kept.peaks_with_graphs
            and every.peaks_with_graphs
            and extended(kept.peaks_with_graphs, every.peaks_with_graphs, count / layers),
        )
        if gpu.takes(few.parts.total()):
            return [*plan[:-1], few, every]
    return plan


def counted(
    plan: list[Configuration], gpu: Gpu, tell: Callable[[str], object] | None = None
) -> Iterator[Configuration]:
    """Yield the configurations with their memory, without those that change nothing; `tell` as in `make_plan`."""
    workers = min(len(plan), os.cpu_count() or 1)
    # processes of their own: a count patches torch and Colossal-AI, and is a rank
    context = get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.dry_run"])  # its imports take longer than a small model's steps
    with ProcessPoolExecutor(workers, context, initializer=_end_with_the_command) as pool:
        tasks = [pool.submit(_count, each, int(gpu.memory * GIB)) for each in plan]
        before = None
        for number, task in enumerate(tasks, 1):
            found = task.result()
            if tell is not None:
                tell(f"{number} of {len(plan)} counted: {found.name}")
            if found.peaks is None or found.peaks != before:  # else the default was that already
                yield found
            before = found.peaks


def _end_with_the_command() -> None:
    """Let this process end with the one that started it, which may be killed in the midst of a count."""

    def wait() -> None:
        command = parent_process()
        assert command is not None  # this is a process of a pool
        command.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _count(configuration: Configuration, gpu_memory: int) -> Configuration:
    # here: Colossal-AI need not be imported to say what is wrong with options
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    from .dry_run import NotCaptured, footprint

    options = configuration.options
    try:
        if configuration.precision == "bf16":
            return dataclasses.replace(configuration, peaks=footprint(options, "bf16", gpu_memory))
        peaks = footprint(with_graphs(options, captured=False), "fp8", gpu_memory)
    except (ValueError, TypeError) as error:
        return dataclasses.replace(configuration, why_not=str(error))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return dataclasses.replace(
            configuration,
            why_not=f"the model reads values ({error}), and a plan's tensors have none. Models with experts are "
            "planned with transformers 5.",
        )
    found = dataclasses.replace(configuration, peaks=peaks)
    if configuration.fp8_config.cuda_graphs is False:
        return dataclasses.replace(found, why_no_graphs="cuda_graphs=false turns them off")
    try:
        with_all = footprint(with_graphs(options, captured=True), "fp8", gpu_memory)
    except (NotCaptured, ValueError) as error:  # as a plugin refuses them
        return dataclasses.replace(found, why_no_graphs=str(error))
    return dataclasses.replace(found, peaks_with_graphs=with_all)


def show(plan: Sequence[Configuration], gpu: Gpu, console: Console) -> None:
    """Print the memory of each configuration, what fits, and the command of the first that fits on `gpu`."""
    counted = [each for each in plan if each.peaks is not None]
    table = Table(
        box=None,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
        title="GiB of the fullest rank, at the peak of a step",
    )
    table.add_column("", no_wrap=True)
    for heading in (*_HEADINGS.values(), "peak", "fits on"):
        table.add_column(heading, justify="right", no_wrap=True)
    for each in counted:
        sizes = [each.parts[part] for part in _HEADINGS] + [each.parts.total()]
        table.add_row(each.name, *(f"{size / GIB:.1f}" for size in sizes), each.fits_on or "none")
    say = partial(console.print, soft_wrap=True, markup=False)  # names of files may have brackets
    console.print(table)
    console.print(_LEGEND, style="dim")
    for each in plan:
        if each.why_not is not None:
            say(f"{each.name} cannot be counted: {each.why_not}")
    if not counted:
        return
    fitting = next((each for each in counted if each.precision == "fp8" and gpu.takes(each.parts.total())), None)
    if fitting is None:
        say(
            f"Nothing of this fits on {gpu.name}, with {RESERVED} of its {gpu.memory:.0f} GiB left free. Take more "
            "GPUs, --tp or --pp, or fewer tokens."
        )
    else:
        say(f"The first in FP8 that fits on {gpu.name}, with {RESERVED} GiB left free:")
        say(f"  {shlex.join(fitting.command)}", highlight=False)
        say(_about_graphs(fitting, gpu))


def _about_graphs(fitting: Configuration, gpu: Gpu) -> str:
    """Return a sentence or two on whether layers are captured, and whether they fit."""
    total = fitting.total_with_graphs
    if total is None:
        return f"No layer is captured into CUDA graphs: {fitting.why_no_graphs}."
    more = (total - fitting.parts.total()) / GIB
    taken = f"CUDA graphs of its layers take {more:.1f} GiB more, {total / GIB:.1f} at the peak"
    if fitting.fp8_config.cuda_graphs is None:
        taken += ", if the host takes longer for a layer than the GPU, which a plan cannot tell"
    if not gpu.takes(total):
        taken += f". {gpu.name} has no room for those of all layers: the others run without"
    return f"{taken}."


def as_record(plan: Sequence[Configuration]) -> list[dict[str, Any]]:
    """Return for JSON the command of each configuration, its bytes by part and phase, and the GPU that it fits on.

    In FP8 with the bytes at the peak with CUDA graphs too, or the reason why it has none.
    """
    return [
        {
            "name": each.name,
            "precision": each.precision,
            "command": shlex.join(each.command),
            **(
                {"why_not": each.why_not}
                if each.peaks is None
                else {
                    "peak_bytes": each.parts.total(),
                    "fits_on": each.fits_on,
                    **_record_of_graphs(each),
                    "bytes_by_phase": {phase: dict(parts) for phase, parts in each.peaks.items()},
                }
            ),
        }
        for each in plan
    ]


def _record_of_graphs(configuration: Configuration) -> dict[str, Any]:
    if configuration.precision == "bf16":
        return {}
    if configuration.total_with_graphs is None:
        return {"why_no_graphs": configuration.why_no_graphs}
    asked = configuration.fp8_config.cuda_graphs
    return {
        "peak_bytes_with_graphs": configuration.total_with_graphs,
        "graphs_are_taken": "always" if asked else "where the host takes longer for a layer than the GPU",
    }


def explain(error: OutOfMemory) -> None:
    """Show on standard error the parts of the memory of a run that ran out of it, and what takes less."""
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
        console.print(f"What takes the memory could not be counted: {reason}", soft_wrap=True, markup=False)
    else:
        show([each for each in found if each.precision == error.task.precision], gpu, console)
