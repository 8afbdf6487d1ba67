"""Smooth SwiGLU: each channel of a layer's input is divided by a power of two, and the weight's column multiplied.

SwiGLU multiplies gate and up, and training aligns some of their channels until their product is far larger than all
others (Fishman et al., arXiv 2409.12517), so that one scale leaves the others few bits. The product is the
same whatever powers are taken, but for the rounding of the operands: y wT = (y s) (w / s)T.

The powers must be the same in both operands. The weight is cast once a step, so they are found then: from the amaxes
that the channels had since the last cast, which cost no pass over the tensor besides the one that the input's amax
needs. The first step has none. Half of what a channel is larger than the median, in the logarithm and compared with
the weight's own column, goes to the weight (as in SmoothQuant, arXiv 2211.10438): all of it would only move the outlier
to the other operand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.rowwise_cast import channel_cast, column_amax
from fp8booster.scaling.checks import require_switch
from fp8booster.scaling.contract import INPUT, OUTPUT_GRADIENT, WEIGHT, State
from fp8booster.scaling.real_time import RealTimeElsewhere
from fp8booster.scaling.steps import optimizer_steps
from fp8booster.tensor import QuantizedMatrix

LARGEST_POWER = 32
"""Channels are multiplied by 2**-LARGEST_POWER to 2**LARGEST_POWER."""


@dataclass(frozen=True)
class SmoothSwiGLU(RealTimeElsewhere):
    """Real-time scales, one a tensor, and powers of two for the channels that down projections read.

    For fused feed-forward blocks, which give their down projection a `ChannelFactors`. Such a weight is communicated in
    high precision; all other layers are scaled as by `RealTime`.

    Raises:
        ValueError: an argument has a value that is not allowed.
    """

    power_of_two: bool = False
    """As in `Scaling`."""

    name = "smooth-swiglu"

    def __post_init__(self) -> None:
        require_switch(self, "power_of_two")

    def cast(
        self,
        role: str,
        matrix: Tensor,
        dtype: torch.dtype,
        *,
        plain: bool = True,
        amax: Tensor | None = None,
        state: Any = None,
        **layouts: bool,
    ) -> QuantizedMatrix:
        """As `Scaling.cast`; by channel, transposes have a scale for each."""
        layouts["plain"] = plain
        if role == OUTPUT_GRADIENT:
            return self.without_state.cast(role, matrix, dtype, amax=amax, **layouts)
        # by channel from the matrix itself: a delivered amax is of all channels
        amaxes = column_amax(matrix)
        if plain:  # without it backward asks, for which either operand will do by itself
            state.note(role, amaxes)
        if state.factors is None or state.factors.device != matrix.device:
            return self.without_state.cast(role, matrix, dtype, amax=amaxes, **layouts)
        # powers of two, so input times weight is exactly what it was without them
        factors = 1 / state.factors if role == WEIGHT else state.factors
        data, transpose, inverse_scale = channel_cast(
            matrix, factors, (amaxes * factors).amax(), dtype, **layouts, power_of_two=self.power_of_two
        )
        rows = (data.shape[1] if plain else transpose.shape[0]) - len(factors)
        return QuantizedMatrix(data, transpose, inverse_scale, inverse_scale / F.pad(factors, (0, rows), value=1.0))

    @property
    def for_inference(self) -> None:
        """As `Scaling.for_inference`: factors are found in training."""
        return None

    @property
    def is_captured(self) -> bool:
        """As `Scaling.is_captured`: the host sets the factors once a step."""
        return False

    def check(self, config: Any) -> None:
        """As `Scaling.check`."""
        if not config.fused:
            raise ValueError(
                'FP8Config.scaling is "smooth-swiglu", which fused feed-forward blocks do, and fused is False; leave '
                "one of them out"
            )


class ChannelFactors(State):
    """The powers of two of a layer's input channels, until the next cast of its weight, and what they come from."""

    by_channel = True

    def __init__(self) -> None:
        self.factors: torch.Tensor | None = None
        """float32 [K]: multiply channels of the input."""

        self._seen: torch.Tensor | None = None  # float32 [K], amaxes of the channels since the last cast of the weight
        self._step: int | None = None  # the one in which the last of them was noted
        self._found_from: torch.Tensor | None = None  # float32 [K], those that `factors` came from

    def note(self, role: str, amaxes: torch.Tensor) -> None:
        """Take the channels' amaxes of an input, or those of a weight that is cast now and finds the factors."""
        if role == WEIGHT:
            # a weight is cast once a step, and its cast and those of inputs must have the same factors until the next
            if self._seen is not None and self._seen.shape == amaxes.shape:
                self.factors, self._found_from = factors_of(self._seen.to(amaxes.device), amaxes), self._seen
            self._seen = None
        else:
            self._step = optimizer_steps()
            self._seen = amaxes if self._seen is None else torch.maximum(self._seen.to(amaxes.device), amaxes)

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """Return, as `State.saved`, the amaxes that the next cast of the weight finds its powers from, [K].

        In a step that no optimizer has ended they are those of its own cast, which a resumed run does again.
        """
        found = self._found_from if self._seen is None or self._step == optimizer_steps() else self._seen
        return {} if found is None else {INPUT: found}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """As `State.load`; amaxes of another number of channels are left out at the next cast."""
        self._seen, self._step = saved.get(INPUT), None

    def forget_step(self) -> None:
        """As `State.forget_step`; the factors stay, for so does the weight's cast."""
        if self._step == optimizer_steps():
            self._seen = None


def factors_of(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The powers of two for channels of an input, of which the weight's columns take the inverse.

    Args:
        inputs: float32 [K], amaxes of the channels.
        weights: float32 [K], amaxes of the weight's columns.

    Returns:
        float32 [K]; 1 where an amax is zero or no finite number.
    """
    excess = _above_median(inputs) - _above_median(weights)
    # half of the excess goes to each operand, so neither gets outliers that the other had
    powers = (-0.5 * excess).round()
    powers = powers.where(powers.isfinite(), 0.0)
    return torch.exp2(powers.clamp(-LARGEST_POWER, LARGEST_POWER))


def _above_median(amaxes: torch.Tensor) -> torch.Tensor:
    """The binary logarithm of each over their median's; not finite where one is zero or not finite."""
    octaves = amaxes.log2()
    finite = octaves.isfinite()
    ordered = octaves.where(finite, torch.nan).sort().values  # NaN last
    # torch's own nanmedian makes the host wait for the number of NaN
    return octaves - ordered.gather(0, (finite.sum(0, keepdim=True) - 1).clamp(min=0) // 2)
