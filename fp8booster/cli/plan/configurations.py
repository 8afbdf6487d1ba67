"""Ways to train a model that a plan compares: in BF16, in FP8, and with more and more of what makes it smaller."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fp8booster.cli.train.key_values import fp8_config
from fp8booster.cli.train.options import TrainOptions, flag_of
from fp8booster.config import FP8Config
from fp8booster.training.models import MODELS
from fp8booster.training.parallel import ZERO_STAGES

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS, MASTERS, MOMENTS, KEPT = "weights", "master weights", "moments", "FP8 weights and buffers"
"""Parts of memory that stay from step to step; `monitor.memory` has those by lifetime."""

Footprint = dict[str, Counter[str]]
"""By phase of a step, the bytes of each part when most memory is held."""

GIB = 2**30

RESERVED = 4
"""GiB of a GPU that are left out: CUDA's context, NCCL's buffers, gaps between tensors."""


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU with FP8 products."""

    name: str
    memory: float  # in GiB, as torch reports it
    blockwise: bool = True  # it has products with blockwise scales

    def takes(self, size: int) -> bool:
        """Tell whether a step fits whose tensors take so many bytes."""
        return size <= (self.memory - RESERVED) * GIB


GPUS = {
    # torch's products take blockwise scales on Hopper alone
    name: Gpu(name, memory, blockwise=name.startswith("H"))
    for name, memory in {"L40S": 44, "H100": 79, "H100-NVL": 93, "H200": 139, "B200": 178}.items()
}
"""The smallest first; their memory rounded down."""

WITHOUT_FP8 = ("V100", "T4", "A10", "A30", "A40", "A100")
"""Older GPUs that somebody may ask for."""

_NOT_SAID = {"precision", "lr", "warmup", "decay", "min_lr", "steps", "vocabulary", "cache", "out"}
"""Options of `fp8booster train` that a plan's commands leave at their defaults."""


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to train a model, and the memory that it takes."""

    name: str
    precision: str  # "bf16" or "fp8"
    options: TrainOptions
    peaks: Footprint | None = None  # without CUDA graphs, which take only what is left
    why_not: str | None = None  # the reason where there are no `peaks`
    peaks_with_graphs: Footprint | None = None
    why_no_graphs: str | None = None  # the reason where there are no `peaks_with_graphs`

    @property
    def parts(self) -> Counter[str]:
        """Return the bytes of each part when most memory is held."""
        assert self.peaks is not None  # read where memory was counted alone
        return max(self.peaks.values(), key=Counter.total)

    @property
    def total_with_graphs(self) -> int | None:
        """Return the bytes when most memory is held with CUDA graphs, what their pools have free included."""
        return None if self.peaks_with_graphs is None else max(map(Counter.total, self.peaks_with_graphs.values()))

    @property
    def fits_on(self) -> str | None:
        """Return the smallest GPU that it fits on, or None."""
        blockwise = self.precision == "fp8" and self.fp8_config.granularity == "blockwise"
        able = (gpu for gpu in GPUS.values() if gpu.blockwise or not blockwise)
        return next((gpu.name for gpu in able if gpu.takes(self.parts.total())), None)

    @property
    def fp8_config(self) -> FP8Config:
        return fp8_config(self.options.fp8_options, self.options.level)

    @property
    def command(self) -> list[str]:
        """Return the words of the command that trains so."""
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
    """Return what is compared: each configuration in FP8 has all that those before it have."""
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
    """Add those fields of FP8Config that are not set yet, go with the others, and change something."""
    for pair in pairs:
        more = dataclasses.replace(options, fp8_options=(*options.fp8_options, pair))
        try:
            changed = fp8_config(more.fp8_options, more.level) != fp8_config(options.fp8_options, options.level)
        except ValueError:
            continue
        options = more if changed else options
    return options


def _no_copies(options: TrainOptions) -> TrainOptions:
    if options.plugin == "fsdp":  # it keeps none
        return options
    shared = options.plugin in ZERO_STAGES and options.parallel.zero_stage
    return _with_fp8(
        options, "weight_copies.transposes=false", *(["weight_copies.high_precision=false"] if shared else [])
    )


def _small_moments(options: TrainOptions) -> TrainOptions:
    if options.optimizer is not None or options.optimizer_of("fp8") == "adamw-8bit":
        return options
    return dataclasses.replace(options, optimizer="adamw-8bit")


def _small_sums(options: TrainOptions) -> TrainOptions:
    # in stage 2 the gradients of each micro-batch are reduced, and the sums wait for the next
    reduced = options.plugin in ZERO_STAGES and options.parallel.zero_stage == 2
    return _with_fp8(options, "gradient_accumulation=8-bit") if reduced and options.accumulate > 1 else options


_SMALLER: dict[str, Callable[[TrainOptions], TrainOptions]] = {
    "no copies": _no_copies,
    "8-bit moments": _small_moments,
    "8-bit gradient sums": _small_sums,
    "recomputed inputs": lambda options: _with_fp8(options, "activations.recompute=all"),
    "8-bit activations": lambda options: _with_fp8(options, "activations.saved=8-bit"),
    "checkpointing": lambda options: dataclasses.replace(options, checkpointing=True),
}
"""Changes in the order of their cost in speed, the cheapest first."""


def with_graphs(options: TrainOptions, captured: bool) -> TrainOptions:
    """Return options of FP8 with all layers captured into CUDA graphs, or none; what they said of it is dropped."""
    others = (pair for pair in options.fp8_options if not pair.startswith("cuda_graphs="))
    return dataclasses.replace(options, fp8_options=(*others, f"cuda_graphs={str(captured).lower()}"))


def planned_config(options: TrainOptions) -> PretrainedConfig:
    """Return the config of the model that options name; errors as `load_config`."""
    from fp8booster.cli.train.model_folder import is_folder, load_config

    vocabulary = 1 if is_folder(options.model) else MODELS[options.model].vocabulary
    return load_config(options.model, vocabulary, options.sequence)


def extended(one: Footprint, other: Footprint, times: float) -> Footprint:
    """Extrapolate each size from `one` through `other`: its size in `one`, and so many times the difference."""
    return {
        phase: Counter(
            {part: round(sizes[part] + times * (other[phase][part] - sizes[part])) for part in {*sizes, *other[phase]}}
        )
        for phase, sizes in one.items()
    }
