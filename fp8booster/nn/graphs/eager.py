"""Finds what of a layer must run eagerly, so that its graphs break there.

A module tells by an attribute `why_eager` that no graph can hold it, or None. It tells so of itself, or of what it
holds as `experts`. Experts of which nobody tells are taken for a loop that asks which tokens each expert gets. A module
whose own code breaks the graph where it must (`breaks.run_eagerly`) has `breaks_itself` true; others run eagerly whole,
with their hooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

COUNTED = "the host must know how many tokens an expert gets"
"""The reason why experts run eagerly whose products need sizes that a router decides."""


class EagerPart(NamedTuple):
    """Something in a layer that may have to run eagerly."""

    tells: Any
    """Module that tells why; None: nobody does."""

    apart: nn.Module
    """Holds what graphs do not, where it runs eagerly."""

    called: nn.Module
    """Its call has `apart` run."""

    @property
    def why(self) -> str | None:
        """The reason why it must run eagerly now; None: it need not."""
        return COUNTED if self.tells is None else self.tells.why_eager

    @property
    def breaks_itself(self) -> bool:
        """Tell whether its own code breaks the graph, or its call is to be made to."""
        return getattr(self.tells, "breaks_itself", False)


def eager_parts(modules: Iterable[nn.Module]) -> list[EagerPart]:
    """Find what may have to run eagerly.

    Args:
        modules: all inside a layer, each before those inside it, as `nn.Module.modules` gives them.
    """
    found: dict[nn.Module, EagerPart] = {}
    for module in modules:
        experts = module._modules.get("experts")
        if experts is not None:
            tells = next((each for each in (experts, module) if _tells(each)), None)
            # a list is not called: who holds it runs its modules
            called = module if isinstance(experts, nn.ModuleList) else experts
            apart = experts if getattr(tells, "breaks_itself", False) else called
            found[experts] = EagerPart(tells, apart, called)
        elif _tells(module):
            found.setdefault(module, EagerPart(module, module, module))
    return list(found.values())


def _tells(module: nn.Module) -> bool:
    return hasattr(type(module), "why_eager")


def modules_apart(parts: Iterable[EagerPart]) -> set[nn.Module]:
    """Return all modules that graphs do not hold, of parts that run eagerly now."""
    return {module for part in parts if part.why is not None for module in part.apart.modules()}
