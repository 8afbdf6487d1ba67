"""The base of the optimizers that FP8 plugins make."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from colossalai.logging import get_dist_logger

from fp8booster.nn.held_casts import forget_step
from fp8booster.optim import one_pass
from fp8booster.scaling.steps import optimizer_steps


class BoostedOptimizer:
    """A mixin before one of Colossal-AI's optimizers, whose norms stay on the device.

    Backward runs in the thread that calls it. autograd would use another thread for a GPU, in which the host was seen
    to take a third longer for the same work.
    """

    trained: Any
    """The model, or its wrapper: a module."""

    optim: torch.optim.Optimizer
    """The optimizer inside."""

    _why_by_itself: str | None = None

    _unused_backward: int | None = None
    """The count of optimizer steps at the last backward; None where its gradients are gone."""

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run backward from a loss; errors and arguments as in Colossal-AI's."""
        self._unused_backward = optimizer_steps()
        with torch.autograd.set_multithreading_enabled(False):
            super().backward(*args, **kwargs)  # type: ignore[misc]

    def backward_by_grad(self, *args: Any, **kwargs: Any) -> None:
        """Run backward from a tensor's gradient, as pipelines do it."""
        self._unused_backward = optimizer_steps()
        with torch.autograd.set_multithreading_enabled(False):
            super().backward_by_grad(*args, **kwargs)  # type: ignore[misc]

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Forget the gradients, and where no step has used them, all that the skipped step noted."""
        super().zero_grad(*args, **kwargs)  # type: ignore[misc]
        # a step in between has used what scaling noted, and `zero_grad` after it is the ordinary one
        if self._unused_backward == optimizer_steps():
            self._unused_backward = None
            self.forget_step()

    def forget_step(self) -> None:
        """Let scaling forget what it noted since the last step, as if the skipped one had not been."""
        forget_step(self.trained)

    def why_by_itself(self) -> str | None:
        """Return why the optimizer inside steps by itself, in more passes over memory; a new reason is logged."""
        # asked at each step: hooks may come and go
        reason = one_pass.why_not(self.optim)
        if reason != self._why_by_itself:
            self._why_by_itself = reason
            if reason is not None:
                get_dist_logger().info(f"The optimizer steps by itself, in more passes: {reason}.", ranks=[0])
        return reason

    def add_param_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise ValueError: a boosted optimizer takes no further parameters."""
        # Colossal-AI hands a group to the wrapped optimizer (interface/optimizer.py:37), which has masters of the
        # others: ZeRO would step by gradients that no other rank has added to, and Gemini would not find their chunk
        raise ValueError(
            "a boosted optimizer takes no further parameters, which it would neither shard nor reduce; give it all "
            "parameter groups before boost"
        )

    def get_grad_norm(self, norm_type: float = 2, **kwargs: object) -> float | None:
        """Return the norm of the last step's gradients, None where none was asked for; the host waits for it."""
        return None if self._current_grad_norm is None else float(self._current_grad_norm)
