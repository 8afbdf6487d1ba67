"""What a plan compares: the run in BF16 and in FP8 as asked for, and with more and more of what makes it smaller."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process

from fp8booster.cli.train.key_values import fp8_config, parse_pairs
from fp8booster.cli.train.options import TrainOptions, flag_of
from fp8booster.config import FP8Config
from fp8booster.training.parallel import ZERO_STAGES

from .parts import Footprint

GIB = 2**30

RESERVED = 4
"""GiB of a GPU that are left out: CUDA's context, NCCL's buffers, gaps between tensors."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU with FP8 products."""

    name: str
    memory: float
    """In GiB, as torch reports it."""
    blockwise: bool = True
    """Tell whether the GPU has products with blockwise scales."""

    def takes(self, size: int) -> bool:
        """Whether a step fits whose tensors take so many bytes."""
        return size <= (self.memory - RESERVED) * GIB


GPUS = {
    name: Gpu(name, memory, blockwise=name.startswith("H"))
    for name, memory in {"L40S": 44, "H100": 79, "H100-NVL": 93, "H200": 139, "B200": 178}.items()
}
"""The smallest first; their memory rounded down."""

WITHOUT_FP8 = ("V100", "T4", "A10", "A30", "A40", "A100")
"""Older GPUs that somebody may ask for."""


_NOT_SAID = {"precision", "lr", "warmup", "decay", "min_lr", "steps", "vocabulary", "cache", "out"}
"""Of `fp8booster train`, what a plan's commands leave to its defaults."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to train a model, and the memory that it takes."""

    name: str
    precision: str
    """"bf16" or "fp8"."""
    options: TrainOptions
    peaks: Footprint | None = None
    why_not: str | None = None
    """Why there are no `peaks`."""

    @property
    def parts(self) -> Counter[str]:
        """Bytes of each part when most memory is held."""
        assert self.peaks is not None  # asked of what was counted alone
        return max(self.peaks.values(), key=Counter.total)

    @property
    def fits_on(self) -> str | None:
        """The smallest GPU that it fits on, or None."""
        blockwise = self.precision == "fp8" and self.fp8_config.granularity == "blockwise"
        able = (gpu for gpu in GPUS.values() if gpu.blockwise or not blockwise)
        return next((gpu.name for gpu in able if gpu.takes(self.parts.total())), None)

    @property
    def fp8_config(self) -> FP8Config:
        """Of the run in FP8."""
        return fp8_config(self.options.fp8_options, self.options.level)

    @property
    def command(self) -> list[str]:
        """The words of the command that trains so."""
        defaults = {field.name: field.default for field in dataclasses.fields(TrainOptions)}
        words = ["fp8booster", "train", "--precision", self.precision]
        for field in dataclasses.fields(TrainOptions):
            value = getattr(self.options, field.name)
            flag = flag_of(field.name)
            if field.name in _NOT_SAID or value in (None, defaults[field.name]):
                continue
            if isinstance(value, tuple):
                words += [word for each in value for word in (flag, each)]
            else:
                words += [flag] if value is True else [flag, str(value)]
        return words


def configurations(options: TrainOptions) -> list[Configuration]:
    """What is compared, each in FP8 with all that those before it have.

    Args:
        options: as given.
    """
    found = [
        Configuration(name="BF16", precision="bf16", options=options.of_precision("bf16")),
        Configuration(name=f"FP8, {options.level}" if options.level else "FP8", precision="fp8", options=options),
    ]
    for name, change in _SMALLER.items():
        changed = change(options)
        if changed != options:
            options = changed
            found.append(Configuration(name=f"+ {name}", precision="fp8", options=options))
    return found


def _with_fp8(options: TrainOptions, *pairs: str) -> TrainOptions:
    """The options with fields of FP8Config that they do not set yet, have another value, and go with the others."""
    config = fp8_config(options.fp8_options, options.level)
    new = tuple(
        pair
        for pair in pairs
        if any(getattr(config, name) != value for name, value in parse_pairs([pair], "--fp8-option").items())
        and _is_accepted(options, pair)
    )
    return dataclasses.replace(options, fp8_options=(*options.fp8_options, *new))


def _is_accepted(options: TrainOptions, pair: str) -> bool:
    """Tell whether a pair may be added: its field is not set yet, and goes with those that are."""
    try:
        fp8_config((*options.fp8_options, pair), options.level)
    except ValueError:
        return False
    return True


def _no_copies(options: TrainOptions) -> TrainOptions:
    shared = options.plugin in ZERO_STAGES and options.parallel.zero_stage
    return _with_fp8(options, "keep_weight_transposes=false", *(["weights_in_16_bits=false"] if shared else []))


def _small_moments(options: TrainOptions) -> TrainOptions:
    if options.optimizer is not None or options.optimizer_of("fp8") == "adamw-8bit":
        return options
    return dataclasses.replace(options, optimizer="adamw-8bit")


def _small_sums(options: TrainOptions) -> TrainOptions:
    """Where each micro-batch's gradients are reduced, and wait for the next."""
    reduced = options.plugin in ZERO_STAGES and options.parallel.zero_stage == 2
    return _with_fp8(options, "gradient_accumulation=8-bit") if reduced and options.accumulate > 1 else options


_SMALLER: dict[str, Callable[[TrainOptions], TrainOptions]] = {
    "no copies": _no_copies,
    "8-bit moments": _small_moments,
    "8-bit gradient sums": _small_sums,
    "recomputed inputs": lambda options: _with_fp8(options, "recompute=all"),
    "8-bit activations": lambda options: _with_fp8(options, "saved_activations=8-bit"),
    "checkpointing": lambda options: dataclasses.replace(options, checkpointing=True),
}
"""In the order of what they cost in speed, the cheapest first."""


def counted(plan: list[Configuration], gpu: Gpu) -> Iterator[Configuration]:
    """The configurations with their memory, each counted by a process of its own, without those that change nothing.

    Args:
        plan: what to count, its options resolved.
        gpu: by whose memory some defaults are chosen.
    """
    workers = min(len(plan), os.cpu_count() or 1)
    context = get_context("forkserver")
    context.set_forkserver_preload([f"{__package__}.dry_run"])  # its imports take longer than a small model's steps
    with ProcessPoolExecutor(workers, context, initializer=_end_with_the_command) as pool:
        tasks = [pool.submit(_count, each, int(gpu.memory * GIB)) for each in plan]
        before = None
        for task in tasks:
            found = task.result()
            if found.peaks is None or found.peaks != before:  # else the default was that already
                yield found
            before = found.peaks


def _end_with_the_command() -> None:
    """Let this process end when the one that started it is gone, killed in the midst of a count."""

    def wait() -> None:
        command = parent_process()
        assert command is not None  # this is a process of a pool
        command.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _count(configuration: Configuration, gpu_memory: int) -> Configuration:
    # here: Colossal-AI need not be imported to say what is wrong with options
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    from .dry_run import footprint

    try:
        peaks = footprint(configuration.options, configuration.precision, gpu_memory)
    except (ValueError, TypeError) as error:
        return dataclasses.replace(configuration, why_not=str(error))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        return dataclasses.replace(
            configuration,
            why_not=f"the model reads values ({error}), and a plan's tensors have none. Models with experts are "
            "planned with transformers 5.",
        )
    return dataclasses.replace(configuration, peaks=peaks)
