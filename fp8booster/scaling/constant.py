"""Constant scaling: one power of two for weights and inputs, and one for gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8booster import formats
from fp8booster.kernels.cast import cast, cast_by, note_amax
from fp8booster.scaling.checks import require_whole
from fp8booster.scaling.contract import OUTPUT_GRADIENT, State
from fp8booster.scaling.real_time import RealTimeElsewhere
from fp8booster.tensor import QuantizedMatrix


@dataclass(frozen=True)
class Constant(RealTimeElsewhere):
    """The FP8-CSCALE of Perez et al. (arXiv 2309.17224): scales that no tensor is asked for; larger values saturate.

    Evaluation, and weights that an engine casts, stay real-time.

    Raises:
        ValueError: an argument has a value that is not allowed.
    """

    forward_bias: int = 3
    """The scale of weights and inputs is two to this power: with E4M3 what is above 56 saturates."""

    gradient_bias: int = 16
    """The same of gradients: with E5M2 what is above 0.9 saturates, and below 2e-10 becomes zero. For a mean over
    tokens; a loss scale that multiplies the loss multiplies these too."""

    name = "constant"
    power_of_two = True

    def __post_init__(self) -> None:
        require_whole(self, "forward_bias", -64, 64)
        require_whole(self, "gradient_bias", -64, 64)

    def new_state(self) -> _Amaxes:
        """As `Scaling.new_state`: the constants, on the device."""
        return _Amaxes()

    def cast(
        self,
        role: str,
        matrix: Tensor,
        dtype: torch.dtype,
        *,
        amax: Tensor | None = None,
        state: Any = None,
        **layouts: bool,
    ) -> QuantizedMatrix:
        """As `Scaling.cast`. An infinity or a NaN makes the inverse scale NaN, as real-time scales would be."""
        layouts["power_of_two"] = True
        amaxes = state.of(self.fixed_amax(role, dtype), matrix.device)
        if amax is None:
            data, transpose, inverse_scale, amax = cast_by(matrix, dtype, amaxes[1:], **layouts)
        else:
            data, transpose, inverse_scale = cast(matrix, dtype, amax=amaxes[1:], **layouts)
        # the amax is noted for the NaN that an infinity makes of the inverse scale; no scale comes from it
        note_amax(amaxes, amax, inverse_scale, new_step=False, factor=1.0)
        return QuantizedMatrix(data, transpose, inverse_scale, None)

    def fixed_amax(self, role: str, dtype: torch.dtype) -> float:
        """As `Scaling.fixed_amax`."""
        return formats.MAX[dtype] * 2.0 ** -(self.gradient_bias if role == OUTPUT_GRADIENT else self.forward_bias)


class _Amaxes(State):
    """Constants where casts read them: float32 [2], of which `note_amax` writes the first."""

    def __init__(self) -> None:
        self._made: dict[tuple[float, torch.device], torch.Tensor] = {}

    def of(self, amax: float, device: torch.device) -> torch.Tensor:
        # on the device, since kernels read amaxes from there; a number from the host would be copied at each cast
        if (amax, device) not in self._made:
            with torch.inference_mode(False):  # so that training may write to it after a forward in that mode
                self._made[amax, device] = torch.full((2,), amax, dtype=torch.float32, device=device)
        return self._made[amax, device]
