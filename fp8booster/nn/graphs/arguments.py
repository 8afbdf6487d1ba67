"""The arguments and outputs of a layer: which of them are tensors, and what else tells kinds of calls apart."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from enum import Enum
from typing import Any

import torch

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
"""Values that a graph has for good."""


class Unsupported(Exception):
    """A value that a graph cannot be given; the message is its class."""


def flatten(value: Any, tensors: list[torch.Tensor]) -> Hashable:
    """Append the tensors in a value of tuples, lists and dicts, and tell the rest: equal for values of one kind.

    Raises:
        Unsupported: it holds something else than tensors and constants.
    """
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return torch.Tensor, value.shape, value.dtype, value.device, value.requires_grad and torch.is_grad_enabled()
    if isinstance(value, CONSTANTS):
        return type(value), value
    if type(value) in (tuple, list):
        return (type(value), *[flatten(each, tensors) for each in value])
    if type(value) is dict:
        return (dict, *[(name, flatten(each, tensors)) for name, each in value.items()])
    raise Unsupported(type(value).__name__)


def rebuild(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """A value as `flatten` took it apart, with other tensors in their places."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if type(value) in (tuple, list):
        return type(value)(rebuild(each, tensors) for each in value)
    if type(value) is dict:
        return {name: rebuild(each, tensors) for name, each in value.items()}
    return value
