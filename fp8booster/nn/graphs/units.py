"""What of a layer is captured: the whole, or where a part of it must run eagerly, its other parts.

    attention -> norm -> router -> experts        a layer that one graph holds
    [attention] -> norm -> router -> experts      one whose experts the host must wait for: attention alone is a unit

A module tells by an attribute `why_eager` that no graph can hold it, or None. It tells so of itself, or of what it
holds as `experts`. Experts of which nobody tells are taken for a loop that asks which tokens each expert gets.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from torch import nn

COUNTED = "the host must know how many tokens an expert gets"
"""Why experts run eagerly whose products need sizes that a router decides."""

_TELLS = "why_eager"


def eager_parts(modules: Iterable[nn.Module]) -> dict[nn.Module, nn.Module | None]:
    """Return the modules that may have to run eagerly, each with the one that tells why; None: nobody does.

    Args:
        modules: all inside a layer, each before those inside it, as `nn.Module.modules` gives them.
    """
    found: dict[nn.Module, nn.Module | None] = {}
    for module in modules:
        experts = module._modules.get("experts")
        if experts is not None:
            found[experts] = next((each for each in (experts, module) if _tells(each)), None)
        elif _tells(module):
            found.setdefault(module, module)
    return found


def _tells(module: nn.Module) -> bool:
    return hasattr(type(module), _TELLS)


def why_eager(parts: dict[nn.Module, nn.Module | None]) -> str | None:
    """Return why one of `eager_parts` must run eagerly now; None: none must."""
    for tells in parts.values():
        reason = COUNTED if tells is None else getattr(tells, _TELLS)
        if reason is not None:
            return reason
    return None


class Unit(NamedTuple):
    """What is captured by itself."""

    module: nn.Module

    name: str | None = None
    """Of a part; None: it is a whole layer."""


def units_of(layer: nn.Module) -> tuple[list[Unit], str | None]:
    """Return the layer and None, or in its place the parts that are captured, and why it is not."""
    parts = eager_parts(layer.modules())
    reason = why_eager(parts)
    if reason is None:
        return [Unit(layer)], None
    found: list[Unit] = []
    for name, child in layer.named_children():
        if child in parts or not _has_several(child):
            continue
        units, why_not = units_of(child)
        found += [Unit(child, name)] if why_not is None else units
    return found, reason


def _has_several(part: nn.Module) -> bool:
    """Tell whether a part has products inside it: a lone norm or product launches no more than a replay copies."""
    return any(next(child.parameters(), None) is not None for child in part.children())
