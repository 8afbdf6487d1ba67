"""What of a layer is captured: the whole, or where a part of it must run eagerly, its other parts.

    attention -> norm -> router -> experts        a layer that one graph holds
    [attention] -> norm -> router -> experts      one whose experts the host must wait for: attention alone is a unit

A module tells by an attribute `why_eager` that no graph can hold it, or None. It tells so of itself, or of what it
holds as `experts`. Experts of which nobody tells are taken for a loop that asks which tokens each expert gets.
"""

from __future__ import annotations

from collections.abc import Iterable

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


def units_of(layer: nn.Module, name: str | None = None) -> tuple[list[tuple[str | None, nn.Module]], str | None]:
    """Return the modules that are captured for a layer, each with its name in it, and why the whole is not.

    Args:
        layer: or a part of one.
        name: what it is called; None: it is a whole layer.

    Returns:
        The layer itself and None, or its parts and the reason.
    """
    parts = eager_parts(layer.modules())
    reason = why_eager(parts)
    if reason is None:
        return [(name, layer)], None
    others = [(each, child) for each, child in layer.named_children() if child not in parts and _has_several(child)]
    return [unit for each, child in others for unit in units_of(child, each)[0]], reason


def _has_several(part: nn.Module) -> bool:
    """Tell whether a part has products inside it: a lone norm or product launches no more than a replay copies."""
    return any(next(child.parameters(), None) is not None for child in part.children())
