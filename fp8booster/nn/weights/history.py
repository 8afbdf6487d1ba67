"""What scales an operand by other amaxes than its own: those of earlier steps, or one for all.

The amaxes of a step enter the history of the next. Within a step all casts of an operand have one scale, and the
largest amax counts: so micro-batches may be in flight, and checkpointing may compute them again, in any order.
"""

from __future__ import annotations

import torch

from fp8booster import formats
from fp8booster.config import FP8Config
from fp8booster.kernels.cast import cast, cast_by, note_amax
from fp8booster.kernels.scales import amax_of
from fp8booster.nn.weights.steps import optimizer_steps
from fp8booster.tensor import QuantizedMatrix


class AmaxHistory:
    """The amaxes of one operand, on its device, which the host never reads.

    Args:
        config: how it becomes a scale.
        dtype: of the casts.
        is_gradient: for a constant scale, of which kind.
        device: of the operand.
        past: `amaxes` of a history that this one goes on with, as after a resume; None: there is none.
    """

    def __init__(
        self,
        config: FP8Config,
        dtype: torch.dtype,
        is_gradient: bool,
        device: torch.device,
        past: torch.Tensor | None = None,
    ) -> None:
        self.made_for = config, dtype, device
        self._config = config
        with torch.inference_mode(False):  # so that training may write to it after a forward in that mode
            if config.scaling == "constant":
                amax = constant_amax(config, dtype, is_gradient)
                self.amaxes = torch.full((2,), amax, dtype=torch.float32, device=device)
            else:
                self.amaxes = torch.zeros(1 + config.delayed_history, dtype=torch.float32, device=device)
        self._first_step = self._step = optimizer_steps()
        if self.is_delayed and past is not None and past.shape == self.amaxes.shape:
            self.amaxes.copy_(past)
            self._first_step = self._step = -1  # of a step before all of this process

    @property
    def is_delayed(self) -> bool:
        """Whether scales come from earlier steps."""
        return self._config.scaling == "delayed"

    def cast(
        self, matrix: torch.Tensor, dtype: torch.dtype, *, plain: bool, transposed: bool, amax: torch.Tensor | None
    ) -> QuantizedMatrix:
        """`kernels.cast.cast`, and the matrix's own amax is noted; the first step's scales are real-time.

        What lies beyond the amax that it is scaled by saturates. An infinity or a NaN makes the inverse scale NaN.

        Raises:
            RuntimeError: in the capture of a CUDA graph, which would take one step for all.
        """
        if matrix.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f'FP8Config(scaling="{self._config.scaling}") does not go into a CUDA graph, which cannot tell when a '
                'step begins; use scaling="real-time"'
            )
        config, step = self._config, optimizer_steps()
        is_constant = config.scaling == "constant"
        new_step = step != self._step and not is_constant
        self._step = step
        layouts = {"plain": plain, "transposed": transposed, "power_of_two": config.power_of_two}
        if step == self._first_step and not is_constant:
            amax = amax_of(matrix) if amax is None else amax
            data, transpose, inverse_scale = cast(matrix, dtype, amax=amax, **layouts)
        else:
            past = self.amaxes[:-1] if new_step else self.amaxes[1:]
            past = past[:1] if config.delayed_amax == "most recent" else past
            if amax is None:
                data, transpose, inverse_scale, amax = cast_by(matrix, dtype, past, **layouts)
            else:
                data, transpose, inverse_scale = cast(matrix, dtype, amax=past, **layouts)
        note_amax(self.amaxes, amax, inverse_scale, new_step=new_step, factor=2.0**config.delayed_margin)
        return QuantizedMatrix(data, transpose, inverse_scale, None)

    def forget_step(self) -> None:
        """Forget the amaxes of the step that runs."""
        if self.is_delayed and self._step == optimizer_steps():
            self.amaxes[0] = 0.0


def constant_amax(config: FP8Config, dtype: torch.dtype, is_gradient: bool = False) -> float:
    """The amax that constant scaling takes for all tensors of a format."""
    return formats.MAX[dtype] * 2.0 ** -(config.gradient_bias if is_gradient else config.forward_bias)
