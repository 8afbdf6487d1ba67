"""The tensors that a run recorded, those that lose most in FP8, and the recipe that keeps more of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fp8booster.monitor.scales import SAVED, SUM, ScaleRow
from fp8booster.monitor.sinks import read_scales

NUMBERS = ("scale", "flushed", "saturated", "snr_db", "non_finite", "outlier")
"""Fields of `ScaleRow` that a page shows."""

SATURATED = 1e-3
"""Share of values at the format's maximum from which a tensor is above its limit."""

FLUSHED = 1e-2
"""Share of nonzero values rounded to zero from which it is."""

LARGER = 4.0
"""Most that an input's amax over root mean square may be, relative to the same part of other layers: outliers of some
layers are what SwiGLU's product shows before runs diverge (arXiv 2409.12517), and those of all layers grow as a model
learns.

One channel of K that is f times as large as the others makes it f / sqrt(1 + (f^2 - 1) / K) times as large. So more
than 4 takes a channel that is more than 4 times as large, and K above 16.
"""

CLOSE = 0.1
"""Part of its limit that the flushed share must have reached then. Amax over root mean square tells that a channel sets
the scale, and not what the others pay, for beyond sqrt(K) it stays; the share grows about as the channel does, and one
ten times as large would pass the limit."""

_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
_EDGE = 4.0  # how many times more often the first and last layers must be above a limit than those between
_OPERANDS = ("weight", "input", "output gradient")
_AFTER_SWIGLU = ("down_proj", "w2")
_ABOVE = "above the limits"
_REAL_TIME = "scaling=tensorwise"
_FINER = "scaling=blockwise"
_SMOOTH = "scaling=smooth-swiglu"
_LAYER = re.compile(r"\.(\d+)\.")


@dataclass(frozen=True, eq=False)
class Tensor:
    """One tensor of one layer, at each step that was sampled."""

    layer: str
    role: str
    format: str
    steps: np.ndarray
    values: dict[str, np.ndarray]  # by the names in `NUMBERS`, one for each step; NaN for None


@dataclass(frozen=True, eq=False)
class Scales:
    """Content of a `scales.jsonl`."""

    about: dict[str, Any]  # the first line: "every", the steps between samples; "config"; "layers"
    tensors: tuple[Tensor, ...]  # in the file's order

    @property
    def samples(self) -> int:
        """Count the steps that were sampled."""
        return len({int(step) for tensor in self.tensors for step in tensor.steps})


def scales_of(path: Path) -> Scales:
    """Read a `scales.jsonl`.

    Raises:
        ValueError: it is none, or a line is damaged; the sentence names the line and what to do.
    """
    about, rows = read_scales(path)
    found: dict[tuple[str, str, str], dict[int, ScaleRow]] = {}
    for row in rows:
        found.setdefault((row.layer, row.role, row.format), {})[row.step] = row
    tensors = []
    for key, samples in found.items():
        steps = sorted(samples)
        values = {name: np.array([getattr(samples[step], name) for step in steps], float) for name in NUMBERS}
        tensors.append(Tensor(*key, np.array(steps), values))  # None becomes NaN
    return Scales(about, tuple(tensors))


def least_snr(format: str) -> float:
    """Return the signal to noise in dB below which a tensor is above its limit: a bit less than rounding leaves.

    With m bits of mantissa, uniformly spread, rounding errs by 2^-m / sqrt(12) of a power of two, and the values have
    7/3 of its square as power. Other formats than E4M3 and E5M2 have no limit.
    """
    bits = next((bits for name, bits in _MANTISSA_BITS.items() if name in format.lower()), None)
    return -np.inf if bits is None else 10 * np.log10(12 * 7 / 3 * 4.0 ** (bits - 1))


@dataclass(frozen=True)
class Worst:
    """A tensor at the sampled step at which it loses most."""

    layer: str
    role: str
    format: str
    step: int
    times: float  # multiple of the limit: of the share saturated, of that flushed, or of the noise's power
    non_finite: int
    saturated: float
    flushed: float
    snr_db: float
    outlier: float


def worst_first(scales: Scales) -> list[Worst]:
    """Return every tensor at its worst step; those with values that are not finite come first, by step."""
    found = [_worst(tensor) for tensor in scales.tensors]
    return sorted(found, key=lambda each: (each.step, -each.times) if each.non_finite else (np.inf, -each.times))


def _worst(tensor: Tensor) -> Worst:
    values = tensor.values
    noise = 10 ** ((least_snr(tensor.format) - values["snr_db"]) / 10)
    times = np.fmax.reduce([values["saturated"] / SATURATED, values["flushed"] / FLUSHED, noise, 0 * tensor.steps])
    # the first step that is not finite has the cause; the later ones follow from it
    bad = np.nan_to_num(values["non_finite"]) > 0
    at = int(np.argmax(bad)) if bad.any() else int(np.argmax(times))
    shown = {name: float(values[name][at]) for name in ("saturated", "flushed", "snr_db", "outlier")}
    return Worst(
        layer=tensor.layer,
        role=tensor.role,
        format=tensor.format,
        step=int(tensor.steps[at]),
        times=float(times[at]),
        non_finite=int(np.nan_to_num(values["non_finite"][at])),
        **shown,
    )


@dataclass(frozen=True)
class Advice:
    """An option that would keep more of the values, and the reason."""

    option: str | None  # as `--fp8-option` takes it; None where no field of `FP8Config` helps
    reason: str

    @property
    def line(self) -> str:
        return f"--fp8-option {self.option}: {self.reason}" if self.option else self.reason


def advise(scales: Scales, worst: Sequence[Worst]) -> list[Advice]:
    """Advise options that the run was not trained with; none where all tensors are within their limits."""
    clipped = [each for each in worst if each.saturated > SATURATED]
    lossy = [each for each in worst if each.times > 1 and not each.non_finite and each.saturated <= SATURATED]
    above = [each for each in lossy if each.role in _OPERANDS]
    larger = _larger_than_peers(scales)
    outliers = [each for each in worst if each.role == "input" and each.layer in larger]
    why_larger = f"with outliers more than {LARGER:g} times those of other layers, and they set the scale of all values"
    config = scales.about["config"]
    scaling = config.get("scaling", "tensorwise")
    may_smooth = scaling not in ("rowwise", "blockwise") and config.get("fused", True) and not config.get("cuda_graphs")
    of_swiglu = [each for each in outliers if may_smooth and _part(each.layer) in _AFTER_SWIGLU]
    at_ends = _more_often_at_ends(worst, above)
    inner = [each for each in above if each not in at_ends]
    gradients = [each for each in inner if each.role == "output gradient"]
    narrow = [each for each in gradients if "e5m2" not in each.format.lower() and scaling != "blockwise"]
    of_experts: list[Worst] = []
    if "e5m2" in str(config.get("formats", {}).get("gradient")).lower():
        narrow, of_experts = [], narrow
        gradients = [each for each in gradients if each not in of_experts]
    rules = (
        (_REAL_TIME, clipped, "with clipped values, of which scales from their own amax have none"),
        (_SMOOTH, of_swiglu, why_larger),
        (_FINER, [each for each in outliers if each not in of_swiglu], why_larger),
        ("high_precision_ends=1", at_ends, f"of the first and last layers {_ABOVE}"),
        ("formats.gradient=e5m2", narrow, f"{_ABOVE}, and E5M2 has a wider range"),
        (_FINER, [] if narrow else gradients, f"{_ABOVE} in the format with the widest range"),
        (_FINER, [each for each in inner if each.role in ("weight", "input") and each not in of_swiglu], _ABOVE),
        ("activations.saved=16-bit", [each for each in lossy if each.role == SAVED], f"{_ABOVE} in codes"),
        ("gradient_accumulation=16-bit", [each for each in lossy if each.role == SUM], f"{_ABOVE} in codes"),
    )
    advice = []
    if bad := [each for each in worst if each.non_finite]:
        first = f"first in the {bad[0].role} of {bad[0].layer} at step {bad[0].step}"
        reason = (
            f"{_counted(bad)} with values that are not finite, {first}: they were so before the cast, and no scale "
            "helps. Look at the data and the learning rate before that step."
        )
        advice.append(Advice(None, reason))
    if of_experts:
        reason = (
            f"{_counted(of_experts)} {_ABOVE} in grouped products of experts, which multiply E4M3 alone; if the loss "
            "suffers, leave these experts in 16 bits by FP8Config(layers=...)."
        )
        advice.append(Advice(None, reason))
    for option, found, why in rules:
        if option in (_FINER, _SMOOTH) and scaling in ("delayed", "constant"):
            option, why = _REAL_TIME, f"{why}, and {option} goes with real-time scales alone"
        name, _, value = option.partition("=")
        held: Any = config
        for part in name.split("."):
            held = held.get(part) if isinstance(held, dict) else None
        new = str(held).lower() != value and not (option == _REAL_TIME and scaling == "amax")
        if found and new and all(option != each.option for each in advice):
            most = max(found, key=lambda each: each.times)
            where = f"most in the {most.role} of {most.layer}, at step {most.step}"
            shares = f"{most.flushed:.2%} flushed to zero, {most.saturated:.2%} clipped"
            figures = f"{shares}, {most.snr_db:.1f} dB and amax / root mean square {most.outlier:.0f}"
            advice.append(Advice(option, f"{_counted(found)} {why}: {where} with {figures}."))
    return advice


def _more_often_at_ends(worst: Sequence[Worst], above: Sequence[Worst]) -> list[Worst]:
    """Return tensors above their limits of the first and the last decoder layer, where these have most of them."""
    ends = {0, max((depth for each in worst if (depth := depth_of(each.layer)) is not None), default=0)}
    at_ends = [each for each in above if depth_of(each.layer) in ends]
    count = sum(depth_of(each.layer) in ends for each in worst)
    often = len(at_ends) * (len(worst) - count) > _EDGE * (len(above) - len(at_ends)) * count
    return at_ends if often else []


def _counted(found: Sequence[Worst]) -> str:
    return "1 tensor" if len(found) == 1 else f"{len(found)} tensors"


def _larger_than_peers(scales: Scales) -> set[str]:
    """Return layers whose input has larger outliers, in a sample, than the same part of others, and loses values."""
    parts: dict[tuple[str, int], dict[str, float]] = {}
    lossy = set()
    for tensor in scales.tensors:
        if tensor.role == "input":
            for step, outlier in zip(tensor.steps, tensor.values["outlier"], strict=True):
                if np.isfinite(outlier):
                    parts.setdefault((_part(tensor.layer), int(step)), {})[tensor.layer] = float(outlier)
            if (tensor.values["flushed"] > CLOSE * FLUSHED).any():
                lossy.add(tensor.layer)
    larger = set()
    for of_part in parts.values():
        for layer, outlier in of_part.items():
            peers = [other for name, other in of_part.items() if name != layer]
            # the median: one layer with outliers must not hide another
            if layer in lossy and peers and outlier > LARGER * np.median(peers):
                larger.add(layer)
    return larger


def _part(layer: str) -> str:
    return layer.rpartition(".")[2]


def depth_of(layer: str) -> int | None:
    """Return the number of the decoder layer that a layer's path names; None where it names none."""
    found = _LAYER.search(layer)
    return int(found[1]) if found else None
