"""The figures of one tensor's cast in one step: sums over ranks and micro-batches, and the line that they become."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

Key = tuple[str, str, str]
"""(layer, role, format)"""

MOMENTS = ("first moment", "second moment")
SAVED = "saved activation"
SUM = "gradient sum"
"""Roles of tensors that are kept in 8-bit codes other than FP8."""

FORMAT_NAMES = {"torch.float8_e4m3fn": "e4m3", "torch.float8_e5m2": "e5m2"}


class Totals(NamedTuple):
    """Sums over all parts of a tensor: those of ranks, of micro-batches, of rows."""

    amax: float
    """Of the finite values."""
    inverse_scale: float
    """The largest, that of the tensor's amax; NaN where one is."""
    values: int
    nonzero: float
    """Finite values that are not zero."""
    flushed: float
    """Of these, those that became zero."""
    saturated: float
    """Finite values beyond the format's largest one at their scale."""
    non_finite: float
    signal: float
    """Sum of squares of the finite values."""
    noise: float
    """Sum of squares of what the cast changed them by."""
    fourth: float
    """Sum of fourth powers of the finite values."""
    ranks: int = 1

    def merged(self, other: Totals, of_other_rank: bool = False) -> Totals:
        """Return the totals of two parts."""
        inverse_scales = self.inverse_scale, other.inverse_scale
        return Totals._make(
            (
                max(self.amax, other.amax),
                # `max` of a NaN depends on the order of its arguments
                math.nan if any(map(math.isnan, inverse_scales)) else max(inverse_scales),
                *(one + another for one, another in zip(self[2:-1], other[2:-1], strict=True)),
                self.ranks + other.ranks if of_other_rank else max(self.ranks, other.ranks),
            )
        )


@dataclass(frozen=True, kw_only=True)
class ScaleRow:
    """One tensor in one sampled step, of all ranks and micro-batches together."""

    step: int
    layer: str
    """Path in the model, as `named_modules` has it; of layers that share a cast, the last parts joined by "+"."""
    role: str
    """"weight", "input", "output gradient" or "message"; or one of `MOMENTS`, `SAVED` or `SUM`."""
    format: str
    """"e4m3" or "e5m2"; of what is kept in codes "int8" or "uint8"."""
    amax: float
    """Of the finite values."""
    scale: float | None
    """What values were multiplied by, the smallest of several; None: no number, as for a tensor that is not finite, and
    for codes."""
    flushed: float
    """Share of the nonzero values that became zero."""
    saturated: float
    """Share of the values beyond the largest that the format holds at this scale, which were clipped."""
    snr_db: float | None
    """10 log10 (sum of squares of values / sum of squares of the cast's errors); None: no number, as without errors."""
    non_finite: int
    """Values that are NaN or infinite."""
    outlier: float | None
    """amax / root mean square of the values; None: no number, as where all are zero."""
    kurtosis: float | None
    """Mean of the fourth powers / square of the mean square: 3 of a normal distribution, more with heavier tails; None
    as for `outlier`."""
    ranks: int
    """Ranks that hold a part of the tensor, or a copy."""


def row_of(step: int, key: Key, totals: Totals) -> ScaleRow:
    """Return the line of a tensor."""
    layer, role, format = key
    # one NaN would else make every figure of the tensor NaN
    finite = totals.values - totals.non_finite
    measured = totals.signal > 0 and totals.noise > 0
    # JSON has no NaN and no infinity
    scale = 1 / totals.inverse_scale if totals.inverse_scale > 0 else math.nan
    return ScaleRow(
        step=step,
        layer=layer,
        role=role,
        format=format,
        amax=totals.amax,
        scale=scale if math.isfinite(scale) else None,
        flushed=totals.flushed / max(1, totals.nonzero),
        saturated=totals.saturated / max(1, totals.values),
        snr_db=10 * math.log10(totals.signal / totals.noise) if measured else None,
        non_finite=int(totals.non_finite),
        outlier=totals.amax / math.sqrt(totals.signal / finite) if totals.signal > 0 else None,
        kurtosis=finite * totals.fourth / totals.signal**2 if totals.signal**2 > 0 else None,
        ranks=totals.ranks,
    )


def merged(parts: Iterable[Mapping[Key, Totals]]) -> dict[Key, Totals]:
    """Return the totals of several ranks as one."""
    whole: dict[Key, Totals] = {}
    for part in parts:
        for key, totals in part.items():
            whole[key] = whole[key].merged(totals, of_other_rank=True) if key in whole else totals
    return whole
