"""Delayed scaling: scales from the amaxes of earlier optimizer steps.

The amaxes of a step enter the history of the next. Within a step all casts of an operand have one scale, and the
largest amax counts: so micro-batches may be in flight, and checkpointing may compute them again, in any order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8booster.kernels.cast import cast, cast_by, note_amax
from fp8booster.kernels.scales import amax_of
from fp8booster.scaling.checks import require_one_of, require_switch, require_whole
from fp8booster.scaling.contract import WEIGHT, State
from fp8booster.scaling.real_time import RealTimeElsewhere
from fp8booster.scaling.steps import optimizer_steps
from fp8booster.tensor import QuantizedMatrix


@dataclass(frozen=True)
class Delayed(RealTimeElsewhere):
    """Scales from earlier steps, as in Transformer Engine; real-time in the first step. Larger values saturate.

    Evaluation, and weights that an engine casts, stay real-time.

    Raises:
        ValueError: an argument has a value that is not allowed.
    """

    history: int = 16
    """Steps of the optimizer whose amaxes are kept."""

    amax: str = "max"
    """The amax to take of them: "max", the largest, or "most recent", the last step's."""

    margin: int = 0
    """Powers of two to leave free above that amax."""

    power_of_two: bool = False
    """As in `Scaling`."""

    name = "delayed"

    def __post_init__(self) -> None:
        require_whole(self, "history", 1, 1024)
        require_one_of(self, "amax", ("max", "most recent"))
        require_whole(self, "margin", 0, 16)
        require_switch(self, "power_of_two")

    def new_state(self) -> _Histories:
        """As `Scaling.new_state`: a history for each operand."""
        return _Histories(self.history)

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
        history = state.of(role, matrix.device, dtype)
        new_step = history.begin_step()
        layouts["power_of_two"] = self.power_of_two
        if history.is_first_step:
            # all casts of the first step are in real time, since micro-batches share one history
            amax = amax_of(matrix) if amax is None else amax
            data, transpose, inverse_scale = cast(matrix, dtype, amax=amax, **layouts)
        else:
            # `note_amax` moves the history on after the cast, so in a new step the last step's amax is still the first
            past = history.amaxes[:-1] if new_step else history.amaxes[1:]
            past = past[:1] if self.amax == "most recent" else past
            if amax is None:
                # the cast finds the amax while it reads: no pass of its own, which is what delayed scales save
                data, transpose, inverse_scale, amax = cast_by(matrix, dtype, past, **layouts)
            else:
                data, transpose, inverse_scale = cast(matrix, dtype, amax=past, **layouts)
        note_amax(history.amaxes, amax, inverse_scale, new_step=new_step, factor=2.0**self.margin)
        return QuantizedMatrix(data, transpose, inverse_scale, None)

    @property
    def for_inference(self) -> None:
        """As `Scaling.for_inference`: inference has no steps."""
        return None


class _History:
    """The amaxes of one operand, on its device, which the host never reads."""

    def __init__(self, steps: int, device: torch.device, dtype: torch.dtype, past: torch.Tensor | None) -> None:
        self.made_for = device, dtype
        with torch.inference_mode(False):  # so that training may write to it after a forward in that mode
            self.amaxes = torch.zeros(1 + steps, dtype=torch.float32, device=device)
        self._step: int | None = None  # the one of the last cast, which the first amax is of
        self._first_step = optimizer_steps()
        if past is not None and past.shape == self.amaxes.shape:
            self.amaxes.copy_(past)
            self._first_step = -1  # of a step before all of this process

    @property
    def is_first_step(self) -> bool:
        """Tell whether there is no step before that of the last cast."""
        return self._step == self._first_step

    def begin_step(self) -> bool:
        """Tell whether the cast that comes is the first of its step."""
        before, self._step = self._step, optimizer_steps()
        return before != self._step

    @property
    def ended(self) -> torch.Tensor | None:
        """The amaxes without those of a step that no optimizer has ended; None: there are no others."""
        if self._step != optimizer_steps():
            return self.amaxes
        # the oldest went when this step began, and no later step reads it
        return None if self.is_first_step else torch.cat([self.amaxes[1:], self.amaxes.new_zeros(1)])

    def go_back(self, ended: torch.Tensor) -> None:
        """Go on from `ended`, as if the step that runs had not begun."""
        if ended is not self.amaxes:
            self.amaxes.copy_(ended)
            self._step = None


class _Histories(State):
    """The histories of a layer's operands."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.by_role: dict[str, _History] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def of(self, role: str, device: torch.device, dtype: torch.dtype) -> _History:
        """Return an operand's history; it begins anew where the device or the format is another."""
        history = self.by_role.get(role)
        if history is None or history.made_for != (device, dtype):
            # what was loaded is used once: after a move to another device it would be of steps long past
            history = self.by_role[role] = _History(self._steps, device, dtype, self._loaded.pop(role, None))
        return history

    @property
    def saved(self) -> dict[str, torch.Tensor]:
        """As `State.saved`: amaxes by role."""
        ended = {role: each.ended for role, each in self.by_role.items()}
        return self._loaded | {role: amaxes for role, amaxes in ended.items() if amaxes is not None}

    def load(self, saved: Mapping[str, torch.Tensor]) -> None:
        """As `State.load`; amaxes of another number of steps are left out."""
        self._loaded = dict(saved)

    def forget_step(self) -> None:
        """As `State.forget_step`."""
        for role, history in list(self.by_role.items()):
            if role == WEIGHT:  # it is as it was, and so is its cast
                continue
            if (ended := history.ended) is None:
                del self.by_role[role]
            else:
                history.go_back(ended)
