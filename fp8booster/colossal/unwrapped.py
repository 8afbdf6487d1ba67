"""The module inside of what a `ModelWrapper` unwraps."""

from __future__ import annotations

from typing import Any

from torch import nn


def module_of(unwrapped: Any) -> nn.Module:
    """Return the module of what `ModelWrapper.unwrap` gives, which has few of its methods where peft adapts it."""
    from colossalai.interface.model import PeftUnwrapMixin

    return unwrapped.base_model if isinstance(unwrapped, PeftUnwrapMixin) else unwrapped
