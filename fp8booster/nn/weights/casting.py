"""The casts of a layer's operands, with the scales that `FP8Config` asks for: they pass through one `Casts`.

Not the transpose of an input that backward makes again by the scale of forward, in one pass (`linear.recompute`).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8booster.config import FP8Config
from fp8booster.nn.weights.history import AmaxHistory
from fp8booster.tensor import QuantizedMatrix, quantize

WEIGHT = "weight"
INPUT = "input"
OUTPUT_GRADIENT = "output gradient"
"""Roles of operands in a layer's products."""


class Casts:
    """Casts the operands of one layer, or of several that are multiplied as one.

    Each of them holds one, as `fp8_casts`, which is asked in training; who wants to see its operands, or to scale them
    otherwise, puts another in its place. A copy or a pickle is a new one.

    Args:
        remembers: it may keep amaxes, as `FP8Config.scaling` asks; otherwise all scales are real-time.
    """

    by_channel: bool = False
    """Whether input and weight have factors for each channel of the input, found at the weight's casts: then the weight
    of a call is cast first, and no one else casts either."""

    sees_weights: bool = False
    """Whether `note_weight` looks at what it is given."""

    def __init__(self, remembers: bool = True) -> None:
        self._histories: dict[str, AmaxHistory] | None = {} if remembers else None
        self._loaded: dict[str, torch.Tensor] = {}

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
        """Cast a tensor, [..., C], as a matrix of C columns.

        Args:
            role: what the tensor is to the layer: `WEIGHT`, `INPUT` or `OUTPUT_GRADIENT`.
            config: the scaling.
            tensor, dtype, plain, transposed, amax: as in `tensor.quantize`; no gradient flows to the tensor.
        """
        values = tensor.detach() if tensor.requires_grad else tensor
        values = values.reshape(-1, tensor.shape[-1])
        if config.remembers_amaxes and self._histories is not None:
            history = self._histories.get(role)
            if history is None or history.made_for != (config, dtype, values.device):
                loaded = self._loaded.pop(role, None)
                history = AmaxHistory(config, dtype, role == OUTPUT_GRADIENT, values.device, loaded)
                self._histories[role] = history
            return history.cast(values, dtype, plain=plain, transposed=transposed, amax=amax)
        return quantize(
            values,
            dtype,
            plain=plain,
            transposed=transposed,
            scale_for=config.weight_scale_for if role == WEIGHT else config.scale_for,
            power_of_two=config.power_of_two,
            amax=amax,
        )

    def scales_inputs_by_their_amax(self, config: FP8Config) -> bool:
        """Whether `quantize` gives an input one scale, by its amax as it is, and nothing else enters."""
        remembers = config.remembers_amaxes and self._histories is not None
        return config.scale_for == "tensor" and not remembers and not self.by_channel

    @property
    def remembered(self) -> dict[str, torch.Tensor]:
        """The amaxes of earlier steps that scales come from, by role; ask between two steps."""
        histories = {} if self._histories is None else self._histories
        delayed = {role: each.amaxes for role, each in histories.items() if each.is_delayed}
        return self._loaded | delayed

    def remember(self, amaxes: Mapping[str, torch.Tensor]) -> None:
        """Begin with what `remembered` gave, before anything was cast; a history of another length begins anew."""
        self._loaded = dict(amaxes)

    def forget_step(self) -> None:
        """Forget the amaxes noted since the last optimizer step: this step, whose gradients are dropped, is skipped."""
        for role, history in (self._histories or {}).items():
            if role != WEIGHT:  # it is as it was, and so is its cast
                history.forget_step()

    def note_weight(self, values: torch.Tensor, data: torch.Tensor, inverse_scale: torch.Tensor) -> None:
        """An engine has cast a part of the layer's weight, which does not pass through `quantize`.

        Args:
            values: [n], high precision.
            data: [n] FP8, what was made of them.
            inverse_scale: float32 [].
        """

    def __reduce__(self) -> tuple:
        return type(self), ()


REAL_TIME = Casts(remembers=False)
"""For operands of no layer, and in evaluation."""


def quantize_weight(
    weight: torch.Tensor, config: FP8Config, *, transposed: bool, plain: bool = True, casts: Casts = REAL_TIME
) -> QuantizedMatrix:
    """Cast a layer's weight, [N, K]."""
    return casts.quantize(WEIGHT, config, weight, config.weight_format, plain=plain, transposed=transposed)


def quantize_input(
    input: torch.Tensor,
    config: FP8Config,
    *,
    transposed: bool,
    amax: torch.Tensor | None = None,
    casts: Casts = REAL_TIME,
) -> QuantizedMatrix:
    """Cast a layer's input, [..., K], as a matrix of K columns; what made it may know its amax."""
    return casts.quantize(INPUT, config, input, config.input_format, transposed=transposed, amax=amax)
