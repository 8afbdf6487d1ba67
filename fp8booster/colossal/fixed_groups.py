"""Boosted optimizers, which train what they were given before."""

from __future__ import annotations

from typing import Any, NoReturn


class FixedGroups:
    """Refuses parameter groups that come later.

    Native hands them to the wrapped optimizer (interface/optimizer.py:37), which has masters of the others: ZeRO
    would step by gradients that no other rank has added to, or not at all, and Gemini would not find their chunk.
    """

    def add_param_group(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not after boost.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            "a boosted optimizer takes no further parameters, which it would neither shard nor reduce; give it all "
            "parameter groups before boost"
        )
