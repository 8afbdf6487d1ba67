"""Merging of peft's adapters into FP8 layers.

peft adds an adapter's product to the base weight through `.data`, which torch does not count as a change, and reads the
adapter's weights itself, which may have no values in 16 bits between two steps (`FP8Config.weights_in_16_bits`).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from fp8booster.nn.experts.held_as_one import FP8Experts
from fp8booster.nn.linear.layer import FP8Layer, forget_weight, restore_weight

_CHANGES = ("merge", "unmerge")
_FOLLOWED = "_fp8booster_followed"


def follow_merges() -> None:
    """Let FP8 layers know of merges and unmerges by every class of adapters that peft has now; none without peft."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    if tuners is None:
        return
    for adapters in set(_subclasses(tuners.BaseTunerLayer)):
        for name in _CHANGES:
            change = vars(adapters).get(name)
            if change is not None and not hasattr(change, _FOLLOWED):
                setattr(adapters, name, _followed(change))


def _subclasses(base: type[Any]) -> Iterator[type]:
    for each in base.__subclasses__():
        yield each
        yield from _subclasses(each)


def _followed(change: Callable[..., None]) -> Callable[..., None]:
    """A method of adapters that changes the base weight, before which weights get values, and after it a new cast."""

    @functools.wraps(change)
    def followed(self: Any, *args: Any, **kwargs: Any) -> None:
        for module in self.modules():
            if isinstance(module, FP8Layer):
                restore_weight(module)
        try:
            change(self, *args, **kwargs)
        finally:
            base = self.get_base_layer()
            if isinstance(base, FP8Layer):
                forget_weight(base)
            elif isinstance(base, FP8Experts):
                base.forget()

    setattr(followed, _FOLLOWED, True)
    return followed
