"""Takes apart what a call is given and returns: tensors, which have places, and constants, which a graph keeps."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
"""Values that a graph has for good."""


class Unsupported(Exception):
    """A graph cannot be given a value; the message is its class."""


class Refused(Exception):
    """No graph can be of a layer as it is called; the message tells why."""


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is no more than its values in its memory, so that another may stand in its place."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors in a value of tuples, lists and dicts, and tell the rest: equal for values of one kind.

    One that is there several times is appended once, so that it has one place and one gradient.

    Raises:
        Unsupported: it holds something else than tensors and constants.
    """
    key: list[Any] = []
    before = len(tensors)
    left, numbers = [value], dict[int, int]()
    while left:  # a loop, for layers are given some ten values at each call
        each = left.pop()
        if isinstance(each, Tensor):
            if not is_plain(each):
                is_other = type(each) not in (Tensor, nn.Parameter)
                raise Unsupported(type(each).__name__ if is_other else f"tensor of {each.layout}")
            number = numbers.setdefault(id(each), len(numbers))
            if number == len(tensors) - before:
                tensors.append(each)
            trained = each.requires_grad and torch.is_grad_enabled()
            key += (Tensor, number, each.shape, each.dtype, each.device, trained)
        elif isinstance(each, CONSTANTS):
            key += (type(each), each)
        elif type(each) in (tuple, list):
            key += (type(each), len(each))
            left += each[::-1]
        elif type(each) is dict:
            key += (dict, len(each), *each)
            left += reversed(each.values())
        else:
            raise Unsupported(type(each).__name__)
    return tuple(key)


def rebuild(value: Any, tensors: Iterator[Tensor], others: dict[int, Tensor] | None = None) -> Any:
    """Return a value as `flatten` took it apart, with other tensors in their places.

    Args:
        value, tensors: what was taken apart, and what takes the places.
        others: those that have taken places, by the identity of what was there.
    """
    # no function inside this one calls itself: it would hold the tensors until the next collection
    others = {} if others is None else others
    if isinstance(value, Tensor):
        if id(value) not in others:
            others[id(value)] = next(tensors)
        return others[id(value)]
    if type(value) in (tuple, list):
        return type(value)(rebuild(each, tensors, others) for each in value)
    if type(value) is dict:
        return {name: rebuild(each, tensors, others) for name, each in value.items()}
    return value


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return numbers that change where a tensor is changed in place."""
    return [each._version for each in tensors if not each.is_inference()]


def lay(places: Sequence[Tensor], words: Sequence[Tensor | None], given: Sequence[Tensor]) -> None:
    """Copy tensors to places, in one launch: of different types torch makes one for each.

    Args:
        places: where they go.
        words: `words_of` each place.
        given: what is copied.
    """
    in_words: list[list[Tensor]] = [[], []]
    others: list[list[Tensor]] = [[], []]
    for place, words_there, each in zip(places, words, given, strict=True):
        words_here = None if words_there is None else words_of(each)
        if words_there is None or words_here is None:
            others[0].append(place)
            others[1].append(each)
        else:
            in_words[0].append(words_there)
            in_words[1].append(words_here)
    for there, here in (in_words, others):
        if there:
            torch._foreach_copy_(there, here)


def words_of(tensor: Tensor) -> Tensor | None:
    """Return the memory of a tensor as words of eight bytes; None where it has gaps, or is no whole number of them.

    Nor is there one where values are not what lies there, but conjugates.
    """
    if tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.is_contiguous() or tensor.nbytes % 8 or tensor.storage_offset() * tensor.itemsize % 8:
        return None
    return tensor.view(-1).view(torch.int64)
