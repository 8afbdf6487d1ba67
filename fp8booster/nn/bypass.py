"""Whether a layer has to be called, or its product may be computed past its forward."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, forward or backward, which only a call runs."""
    return any(_hooks_of(module))


def is_looked_at(module: nn.Module) -> bool:
    """Whether a module has hooks that may read what it is given or gives: all but those marked to only wait."""
    return any(
        not getattr(hook, ONLY_WAITS, False) for of_kind in _hooks_of(module) for hook in of_kind.values()
    )


def _hooks_of(module: nn.Module) -> tuple[dict[int, Callable], ...]:
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


ONLY_WAITS = "fp8_only_waits"
"""Attribute of a hook that does nothing but wait for parameters."""


def must_be_called(module: nn.Module) -> bool:
    """Whether a module has hooks, or a forward of its own in place of its class's."""
    return "forward" in vars(module) or has_hooks(module)
