"""Which tensors lose most in FP8, and which recipe keeps more of them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8booster.monitor.scales import SAVED, SUM

from .scales import Scales, Tensor

SATURATED = 1e-3
"""Share of values at the format's maximum from which a tensor is above its limit."""

FLUSHED = 1e-2
"""Share of nonzero values rounded to zero from which it is."""

LARGER = 4.0
"""How many times as large as in the same part of other layers an input's amax over root mean square may be: outliers of
some layers are what SwiGLU's product shows before runs diverge (arXiv 2409.12517), and those of all layers grow as a
model learns.

One channel of K that is f times as large as the others makes it f / sqrt(1 + (f^2 - 1) / K) times as large. So more
than 4 takes a channel that is more than 4 times as large, and K above 16.
"""

CLOSE = 0.1
"""How close to its limit the flushed share must have come then. Amax over root mean square tells that a channel sets
the scale, and not what the others pay, for beyond sqrt(K) it stays; the share grows about as the channel does, and one
ten times as large would pass the limit."""

_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}
_EDGE = 4.0  # how many times more often the first and last layers must be above a limit than those between
_OPERANDS = ("weight", "input", "output gradient")
_AFTER_SWIGLU = ("down_proj", "w2")
_ABOVE = "above the limits"
_REAL_TIME = "scaling=real-time"
_FINER = "granularity=blockwise"
_SMOOTH = "smooth_swiglu=true"
_LAYER = re.compile(r"\.(\d+)\.")


def least_snr(format: str) -> float:
    """Signal to noise in dB below which a tensor is above its limit: a bit less than rounding in the format gives.

    With m bits of mantissa, uniformly spread, rounding errs by 2^-m / sqrt(12) of a power of two, and the values have
    7/3 of its square as power. Other formats than E4M3 and E5M2 have no limit.
    """
    bits = next((bits for name, bits in _MANTISSA_BITS.items() if name in format.lower()), None)
    return -np.inf if bits is None else 10 * np.log10(12 * 7 / 3 * 4.0 ** (bits - 1))


@dataclass(frozen=True)
class Worst:
    """A tensor at the sampled step where it loses most."""

    layer: str
    role: str
    format: str
    step: int
    times: float
    """How many times the limit: of the share saturated, of that flushed, or of the noise's power."""
    non_finite: int
    saturated: float
    flushed: float
    snr_db: float
    outlier: float


def worst_first(scales: Scales) -> list[Worst]:
    """Every tensor where it is worst: those with values that are not finite first, the earliest of them first."""
    found = [_worst(tensor) for tensor in scales.tensors]
    return sorted(found, key=lambda each: (each.step, -each.times) if each.non_finite else (np.inf, -each.times))


def _worst(tensor: Tensor) -> Worst:
    values = tensor.values
    noise = 10 ** ((least_snr(tensor.format) - values["snr_db"]) / 10)
    times = np.fmax.reduce([values["saturated"] / SATURATED, values["flushed"] / FLUSHED, noise, 0 * tensor.steps])
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
    """What would keep more of the values, and why."""

    option: str | None
    """As `--fp8-option` takes it; None where no field of `FP8Config` helps."""
    reason: str

    @property
    def line(self) -> str:
        """For a terminal."""
        return f"--fp8-option {self.option}: {self.reason}" if self.option else self.reason


def advise(scales: Scales, worst: Sequence[Worst]) -> list[Advice]:
    """What the record asks for, but for what the run was trained with; nothing where all is within the limits."""
    clipped = [each for each in worst if each.saturated > SATURATED]
    lossy = [each for each in worst if each.times > 1 and not each.non_finite and each.saturated <= SATURATED]
    above = [each for each in lossy if each.role in _OPERANDS]
    larger = _larger_than_peers(scales)
    outliers = [each for each in worst if each.role == "input" and each.layer in larger]
    why_larger = f"with outliers more than {LARGER:g} times those of other layers, and they set the scale of all values"
    config = scales.about["config"]
    granularity = config.get("granularity", "tensorwise")
    may_smooth = granularity == "tensorwise" and config.get("fused", True) and config.get("cuda_graphs", False) is False
    of_swiglu = [each for each in outliers if may_smooth and _part(each.layer) in _AFTER_SWIGLU]
    at_ends = _more_often_at_ends(worst, above)
    inner = [each for each in above if each not in at_ends]
    gradients = [each for each in inner if each.role == "output gradient"]
    narrow = [each for each in gradients if "e5m2" not in each.format.lower() and granularity != "blockwise"]
    rules = (
        (_REAL_TIME, clipped, "with clipped values, of which scales from their own amax have none"),
        (_SMOOTH, of_swiglu, why_larger),
        (_FINER, [each for each in outliers if each not in of_swiglu], why_larger),
        ("first_last_layers_in_16_bits=1", at_ends, f"of the first and last layers {_ABOVE}"),
        ("gradient_format=e5m2", narrow, f"{_ABOVE}, and E5M2 has a wider range"),
        (_FINER, [] if narrow else gradients, f"{_ABOVE} in the format with the widest range"),
        (_FINER, [each for each in inner if each.role in ("weight", "input") and each not in of_swiglu], _ABOVE),
        ("saved_activations=16-bit", [each for each in lossy if each.role == SAVED], f"{_ABOVE} in codes"),
        ("gradient_accumulation=16-bit", [each for each in lossy if each.role == SUM], f"{_ABOVE} in codes"),
    )
    advice = _of_non_finite([each for each in worst if each.non_finite])
    for option, found, why in rules:
        if option in (_FINER, _SMOOTH) and config.get("scaling") in ("delayed", "constant"):
            option, why = _REAL_TIME, f"{why}, and {option} goes with real-time scales alone"
        name, _, value = option.partition("=")
        new = str(config.get(name)).lower() != value
        if found and new and all(option != each.option for each in advice):
            most = max(found, key=lambda each: each.times)
            where = f"most in the {most.role} of {most.layer}, {_figures(most)}"
            advice.append(Advice(option, f"{_counted(found)} {why}: {where}."))
    return advice


def _of_non_finite(found: Sequence[Worst]) -> list[Advice]:
    if not found:
        return []
    first = f"first in the {found[0].role} of {found[0].layer} at step {found[0].step}"
    return [
        Advice(
            None,
            f"{_counted(found)} with values that are not finite, {first}: they were so before the cast, and no scale "
            "helps. Look at the data and the learning rate before that step.",
        )
    ]


def _more_often_at_ends(worst: Sequence[Worst], above: Sequence[Worst]) -> list[Worst]:
    """Tensors above their limits of the first and the last decoder layer, where that is what they have in common."""
    ends = {0, max((number for each in worst if (number := _number(each)) is not None), default=0)}
    at_ends = [each for each in above if _number(each) in ends]
    count = sum(_number(each) in ends for each in worst)
    often = len(at_ends) * (len(worst) - count) > _EDGE * (len(above) - len(at_ends)) * count
    return at_ends if often else []


def _counted(found: Sequence[Worst]) -> str:
    return "1 tensor" if len(found) == 1 else f"{len(found)} tensors"


def _figures(each: Worst) -> str:
    """What a tensor lost at the step where it is worst."""
    shares = f"{each.flushed:.2%} flushed to zero, {each.saturated:.2%} clipped"
    return f"at step {each.step} with {shares}, {each.snr_db:.1f} dB and amax / root mean square {each.outlier:.0f}"


def _larger_than_peers(scales: Scales) -> set[str]:
    """Layers whose input has, in a sample, larger outliers than the same part of other layers, and loses values."""
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
            if layer in lossy and peers and outlier > LARGER * np.median(peers):
                larger.add(layer)
    return larger


def _part(layer: str) -> str:
    """What a layer is in its block."""
    return layer.rpartition(".")[2]


def _number(each: Worst) -> int | None:
    """Which decoder layer a tensor is of."""
    found = _LAYER.search(each.layer)
    return int(found[1]) if found else None
