"""Colossal-AI's model wrapper for ZeRO, whose checkpoints hold the masters' values."""

from __future__ import annotations

from types import MethodType
from typing import Any

from colossalai.booster.plugin.low_level_zero_plugin import LowLevelZeroModel

from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.nn.modules import change_class


class SavesMasters:
    """A mixin before a model wrapper: what checkpoints read are the masters' values."""

    zero_optimizer: FP8ZeroOptimizer | None
    """What trains the model, if it gathers weights in FP8."""

    def set_zero_optimizer(self, optimizer: FP8ZeroOptimizer | None) -> None:
        """Let checkpoints read and write the masters of an optimizer that gathers weights in FP8, if there is one."""
        self.zero_optimizer = optimizer
        if optimizer is not None:  # Colossal-AI bound what the class had that the optimizer was
            self.update_master_params = MethodType(optimizer.update_master_params, self)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of the parameters, and their sums, which ZeRO keeps apart."""
        super().zero_grad(set_to_none)
        if self.zero_optimizer is not None:
            self.zero_optimizer.zero_grad(set_to_none)

    def _force_wait_all_gather(self) -> None:
        """Make the working weights ready to be saved; checkpoint IO calls it on every rank before it reads them."""
        super()._force_wait_all_gather()
        if self.zero_optimizer is not None:
            # these weights have the values that FP8 bytes decode to, or none, and a checkpoint is to have those of the
            # masters
            self.zero_optimizer.gather_working_weights()


class FP8ZeroModel(SavesMasters, LowLevelZeroModel):
    """The model wrapper of a plugin that sends FP8."""

    @classmethod
    def convert_in_place(cls, model: LowLevelZeroModel, optimizer: FP8ZeroOptimizer) -> None:
        """Turn a model wrapper into this class in place."""
        change_class(model, cls)
        model.set_zero_optimizer(optimizer)

    def __getstate__(self) -> dict[str, Any]:
        # as Colossal-AI's wrapper, it is pickled without what trains it, and without its process groups
        return self.__dict__ | {"zero_optimizer": None}
