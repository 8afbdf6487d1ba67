"""ZeRO's store of this rank's parts of reduced gradients, which add up over micro-batches in 32, 16 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from colossalai.accelerator import get_accelerator
from colossalai.zero.low_level.bookkeeping import GradientStore

from fp8booster.kernels.group_codes import GroupCodes
from fp8booster.nn.modules import change_class
from fp8booster.optim.gradient_sums import GradientSum, added, value_of

Place = tuple[int, int]
"""The number of a parameter group, and the id of one of its parameters."""


class AccumulatedGradients(GradientStore):
    """Colossal-AI's store, in which a rank has its own part of each gradient.

    Sums of 8 bits lie here between micro-batches alone. Whoever asks for a gradient has it decoded, to the dtype of one
    micro-batch's, and may change it in place: it stays so until the next is added.
    """

    kind: str
    """`FP8Config.gradient_accumulation`."""

    _widens: bool
    """Sums of "32-bit" become FP32; else they keep their dtype."""

    adds_up: bool
    """Whether a gradient has been added to one before it: then gradients outlive the backward that made them."""

    _dtype: torch.dtype
    """Of a gradient of one micro-batch."""

    @classmethod
    def convert_in_place(cls, store: GradientStore, kind: str, *, widens: bool) -> None:
        """Turn an empty store into this class in place."""
        change_class(store, cls)
        store.kind, store._widens, store.adds_up = kind, widens, False
        store._working_index = 0  # in stage 1 too, a rank keeps the gradients of its own part alone

    def holds(self, group_id: int, param_id: int) -> bool:
        """Tell whether there is a gradient of this parameter."""
        return bool(self._grads_of_params.get(group_id, {}).get(param_id))

    def add(self, gradients: Sequence[torch.Tensor], places: Sequence[Place]) -> list[GradientSum]:
        """Add gradients of a micro-batch, on the current stream, to those before them; the sums, as they are kept."""
        sums: list[GradientSum] = []
        adds = self.kind != "32-bit"  # where one alone does not stay as it is
        for gradient, (group_id, param_id) in zip(gradients, places, strict=True):
            of_group = self._grads_of_params.setdefault(group_id, {})
            held = of_group.get(param_id)
            total = self._sum(held or [], gradient, param_id) if held or adds else gradient
            of_group[param_id] = [total]
            self.grad_to_param_mapping[id(total)] = param_id
            sums.append(total)
        self._dtype = gradients[0].dtype
        return sums

    def _sum(self, held: list[GradientSum], gradient: torch.Tensor, param_id: int) -> GradientSum:
        """Return the sum of a gradient and of what is held, which no longer is."""
        before = held.pop() if held else None
        if before is not None:
            self.adds_up = True
            # Colossal-AI maps gradients by `id`, which a new tensor may get once the old one is freed
            self.grad_to_param_mapping.pop(id(before), None)
        if isinstance(before, torch.Tensor):
            # without masters the gradient is of the weight's dtype, in which Colossal-AI adds too
            if self.kind == "32-bit" and not self._widens:
                return before.add_(gradient)
            if before.is_cuda:
                before.record_stream(get_accelerator().current_stream())  # it may have been decoded on another
        return added(before, gradient, self.kind, param_id)

    def _decode(self, group_id: int, param_id: int) -> list[torch.Tensor]:
        """Decode a parameter's gradient; the list holds it, or is empty."""
        held = self._grads_of_params.get(group_id, {}).get(param_id, [])
        if held and isinstance(held[0], GroupCodes):
            self.grad_to_param_mapping.pop(id(held[0]), None)
            held[0] = value_of(held[0], dtype=self._dtype)
            self.grad_to_param_mapping[id(held[0])] = param_id
        return held

    def gradients(self, group_id: int) -> Mapping[int, Sequence[torch.Tensor]]:
        """Return this rank's parts of the gradients of a group's parameters, decoded, by the ids of these: one or none.

        Where there is no gradient, a parameter has an empty sequence, or no entry.
        """
        of_group = self._grads_of_params.get(group_id, {})
        if self.kind == "8-bit":
            for param_id in of_group:
                self._decode(group_id, param_id)
        return of_group

    def get_partitioned_gradients_by_param_id(self, group_id: int, param_id: int) -> list[torch.Tensor]:
        """As it is, decoded."""
        self._decode(group_id, param_id)
        return super().get_partitioned_gradients_by_param_id(group_id, param_id)

    def get_working_grads_by_group_id(self, group_id: int) -> list[torch.Tensor]:
        """As it is, decoded."""
        self.gradients(group_id)
        return super().get_working_grads_by_group_id(group_id)

    def get_working_grad_by_param_id(self, param_id: int) -> torch.Tensor | None:
        """As it is, decoded."""
        for group_id in self._grads_of_params:
            self._decode(group_id, param_id)
        return super().get_working_grad_by_param_id(param_id)
