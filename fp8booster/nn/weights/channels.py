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

import torch
import torch.nn.functional as F

from fp8booster.config import FP8Config
from fp8booster.kernels.rowwise_cast import channel_cast, column_amax
from fp8booster.nn.weights.casting import INPUT, OUTPUT_GRADIENT, WEIGHT, Casts
from fp8booster.nn.weights.freshness import is_captured
from fp8booster.tensor import QuantizedMatrix

LARGEST_POWER = 32
"""Channels are multiplied by 2**-LARGEST_POWER to 2**LARGEST_POWER."""


class ChannelCasts(Casts):
    """Casts the operands of a layer whose input's channels are brought closer to each other.

    The weight of a call is cast before its input.
    """

    by_channel = True

    def __init__(self) -> None:
        super().__init__(remembers=False)
        self.factors: torch.Tensor | None = None
        """float32 [K]: what channels of the input are multiplied by, until the next cast of the weight."""

        self._seen: torch.Tensor | None = None  # float32 [K], amaxes of the channels since the last cast of the weight

    def quantize(
        self,
        role: str,
        config: FP8Config,
        tensor: torch.Tensor,
        dtype: torch.dtype,
        *,
        plain: bool = True,
        transposed: bool = False,
        amax: torch.Tensor | None = None,
    ) -> QuantizedMatrix:
        """As `Casts.quantize`; transposes have a scale for each channel.

        Raises:
            RuntimeError: in the capture of a CUDA graph, in which weights are cast for one call alone.
        """
        if is_captured(tensor):
            raise RuntimeError(
                "FP8Config(smooth_swiglu=True) does not go into a CUDA graph, for the host sets its powers of two once "
                "a step; leave smooth_swiglu out"
            )
        layouts = {"plain": plain, "transposed": transposed}
        if role == OUTPUT_GRADIENT:
            return super().quantize(role, config, tensor, dtype, **layouts, amax=amax)
        matrix = tensor.detach().reshape(-1, tensor.shape[-1])
        amaxes = column_amax(matrix)
        if plain and role == WEIGHT:  # without it backward asks, for which either operand will do by itself
            if self._seen is not None and self._seen.shape == amaxes.shape:
                self.factors = factors_of(self._seen.to(matrix.device), amaxes)
            self._seen = None
        elif plain:
            self._seen = amaxes if self._seen is None else torch.maximum(self._seen.to(amaxes.device), amaxes)
        if self.factors is None or self.factors.device != matrix.device:
            return super().quantize(role, config, tensor, dtype, **layouts, amax=amaxes)
        factors = 1 / self.factors if role == WEIGHT else self.factors
        data, transpose, inverse_scale = channel_cast(
            matrix, factors, (amaxes * factors).amax(), dtype, **layouts, power_of_two=config.power_of_two
        )
        rows = (data.shape[1] if plain else transpose.shape[0]) - len(factors)
        return QuantizedMatrix(data, transpose, inverse_scale, inverse_scale / F.pad(factors, (0, rows), value=1.0))

    @property
    def remembered(self) -> dict[str, torch.Tensor]:
        """The amaxes that the next cast of the weight finds its powers from, [K]; ask between two steps."""
        return {} if self._seen is None else {INPUT: self._seen}

    def forget_step(self) -> None:
        """As `Casts.forget_step`; the factors stay, for so does the weight's cast."""
        super().forget_step()
        self._seen = None

    def remember(self, amaxes: Mapping[str, torch.Tensor]) -> None:
        """As `Casts.remember`; amaxes of another number of channels are left out."""
        self._seen = amaxes.get(INPUT)


def factors_of(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The powers of two for channels of an input, of which the weight's columns take the inverse.

    Args:
        inputs: float32 [K], amaxes of the channels.
        weights: float32 [K], amaxes of the weight's columns.

    Returns:
        float32 [K]; 1 where an amax is zero or no finite number.
    """
    excess = _above_median(inputs) - _above_median(weights)
    powers = (-0.5 * excess).round()
    powers = powers.where(powers.isfinite(), 0.0)
    return torch.exp2(powers.clamp(-LARGEST_POWER, LARGEST_POWER))


def _above_median(amaxes: torch.Tensor) -> torch.Tensor:
    """The binary logarithm of each over their median's; not finite where one is zero or not finite."""
    octaves = amaxes.log2()
    return octaves - octaves.where(octaves.isfinite(), torch.nan).nanmedian()
