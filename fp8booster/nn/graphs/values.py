"""Takes apart what a call is given and returns: tensors, which have places, and constants, which a graph keeps."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from fp8booster.nn.fused.packing import PackedEmbeddings

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
"""Values that a graph has for good."""


TENSORS = (Tensor, nn.Parameter)
"""Classes of tensors that are no more than their values."""


class Unsupported(Exception):
    """A graph cannot be given a value; the message is its class."""


class Refused(Exception):
    """No graph can be of a layer as it is called; the message tells why."""


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is no more than its values in its memory, so that another may stand in its place."""
    return type(tensor) in TENSORS and tensor.layout is torch.strided


def flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors in a value of tuples, lists and dicts, and tell the rest: equal for values of one kind.

    One that is there several times is appended once, so that it has one place and one gradient.

    Raises:
        Unsupported: it holds something else than tensors and constants.
    """
    key: list[Any] = []
    before = len(tensors)
    left: list[Any] = [value]
    numbers: dict[int, int] = {}
    while left:  # a loop, for layers are given some ten values at each call
        each = left.pop()
        cls = type(each)
        if cls in TENSORS:
            if each.layout is not torch.strided:
                raise Unsupported(f"tensor of {each.layout}")
            number = numbers.setdefault(id(each), len(numbers))
            if number == len(tensors) - before:
                tensors.append(each)
            trained = each.requires_grad and torch.is_grad_enabled()
            key += (Tensor, number, each.shape, each.dtype, each.device, trained)
        elif cls is tuple or cls is list:
            key += (cls, len(each))
            left += each[::-1]
        elif cls is dict:
            key += (dict, len(each), *each)
            left += reversed(each.values())
        elif isinstance(each, CONSTANTS):
            key += (cls, each)
        elif cls is PackedEmbeddings and each.sequences is not None and each.sequences.are_rows:
            key += (cls, each.sequences, len(each))
            left += each[::-1]
        else:
            raise Unsupported(cls.__name__)
    return tuple(key)


def maker_of(value: Any, numbers: dict[int, int] | None = None) -> Callable[[Sequence[Tensor]], Any]:
    """Return what makes a value as `flatten` took it apart, with other tensors in their places.

    Args:
        value: what was taken apart; its tensors are not held.
        numbers: of tensors that have places, by their identity.
    """
    numbers = {} if numbers is None else numbers
    if isinstance(value, Tensor):
        return itemgetter(numbers.setdefault(id(value), len(numbers)))
    cls = type(value)
    if cls is tuple or cls is list:
        inside = [maker_of(each, numbers) for each in value]
        return lambda tensors: cls([make(tensors) for make in inside])
    if cls is dict:
        named = {name: maker_of(each, numbers) for name, each in value.items()}
        return lambda tensors: {name: make(tensors) for name, make in named.items()}
    if cls is PackedEmbeddings:
        inside, sequences = [maker_of(each, numbers) for each in value], value.sequences
        return lambda tensors: PackedEmbeddings.of([make(tensors) for make in inside], sequences)
    return lambda tensors: value


def versions_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return numbers that change where a tensor is changed in place."""
    return [each._version for each in tensors if not each.is_inference()]


def marks_of(value: Any) -> tuple[Any, ...]:
    """Return what changes where a call changes what it is given: tensors, containers of them, hooks of gradients.

    Who compares two of these holds the tensors meanwhile.
    """
    tensors: list[Tensor] = []
    try:
        key = flatten(value, tensors)
    except Unsupported as error:
        key = str(error)
    hooks = [len(each._backward_hooks or ()) for each in tensors]
    return key, list(map(id, tensors)), versions_of(tensors), hooks


class Places:
    """Tensors that stay where they are, to which those of each call are copied.

    Args:
        tensors: the places.
        given: of a call.
    """

    def __init__(self, tensors: Sequence[Tensor], given: Sequence[Tensor]) -> None:
        self.tensors = tensors
        # as words of eight bytes all go in one launch: of different types torch makes one for each
        several = len({each.dtype for each in tensors}) > 1
        in_words = [several and _has_words(each) and each.is_contiguous() for each in given]
        self._in_words = [number for number, each in enumerate(in_words) if each]
        self._others = [number for number, each in enumerate(in_words) if not each]
        with torch.no_grad():
            self._words = [tensors[number].view(torch.int64) for number in self._in_words]

    def lay(self, given: Sequence[Tensor]) -> None:
        """Copy tensors to the places, in one launch where they are words."""
        try:
            words = [given[number].view(torch.int64) for number in self._in_words]
        except RuntimeError:  # they have other strides than those of the first call
            torch._foreach_copy_(list(self.tensors), list(given))
            return
        if words:
            torch._foreach_copy_(self._words, words)
        if self._others:
            others = self._others
            torch._foreach_copy_([self.tensors[each] for each in others], [given[each] for each in others])


def _has_words(tensor: Tensor) -> bool:
    """Tell whether torch gives the values of a tensor as words of eight bytes."""
    try:
        return tensor.detach().view(torch.int64) is not None
    except RuntimeError:  # they have gaps, are no whole number of words, or are not what lies there, but conjugates
        return False
