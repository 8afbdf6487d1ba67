"""What the optimizers that FP8 plugins make have in common."""

from __future__ import annotations

from typing import Any, NoReturn


class BoostedOptimizer:
    """A mixin before one of Colossal-AI's optimizers, whose norms stay on the device."""

    def add_param_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not after boost.

        Colossal-AI hands a group to the wrapped optimizer (interface/optimizer.py:37), which has masters of the others:
        ZeRO would step by gradients that no other rank has added to, or not at all, and Gemini would not find their
        chunk.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a boosted optimizer takes no further parameters, which it would neither shard nor reduce; give it all "
            "parameter groups before boost"
        )

    def get_grad_norm(self, norm_type: float = 2, **kwargs: object) -> float | None:
        """The norm of the last step's gradients, None where none was asked for; the host waits for the device."""
        return None if self._current_grad_norm is None else float(self._current_grad_norm)
