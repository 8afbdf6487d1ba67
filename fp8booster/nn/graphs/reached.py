"""Finds what a forward can read of modules besides parameters and buffers: attributes, and what these hold in turn.

A graph has all of it for good: numbers, modes, names, functions, and where tensors lie.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from types import BuiltinMethodType, MappingProxyType, MemberDescriptorType, MethodType
from typing import Any

from torch import Tensor, nn

from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.graphs.call_state import is_generator
from fp8booster.nn.graphs.values import CONSTANTS, is_plain
from fp8booster.nn.modules import cached_by_class
from fp8booster.nn.weights.casting import Casts

MOST_HELD = 256
"""Items of a container or an object that is looked into: longer ones, as labels of a classifier, are no settings."""

MOST_DEEP = 4
"""How far a look goes from an attribute into containers and objects."""

_OF_MODULES = frozenset(vars(nn.Module()))
"""Attributes that every module has: what they hold is looked at by itself."""

_BOOKKEEPING = {
    *("fp8_graphs", "in_fp8", "unfused_calls"),
    *("weight_read_in_training", "weight_read_in_evaluation", "ran_in_evaluation"),
}
"""Attributes of a module by which classes of this package note how it is used, of which no forward is made."""

_OF_OURS = "config", "fp8_weight", "fp8_casts"
"""Attributes of `Casts` and `MergedLayers` that a forward follows from, and that may be changed in place."""

_OPAQUE_PACKAGES = (sys.stdlib_module_names | {"torch", "triton", "numpy", "fp8booster"}) - {"argparse", "types"}
"""Objects of these are told apart, and not looked into: they hold processes, streams, loggers and bookkeeping."""

_PACKAGES_OF_CLASSES = _OPAQUE_PACKAGES | {"argparse", "types", "transformers"}
"""Classes of these are no program's own, and stay as they are."""


class Reached:
    """All that modules hold in attributes, directly or in containers, objects and classes, as configurations are.

    Args:
        modules: of a layer.
        inside: all of its modules, also others than these.
    """

    def __init__(self, modules: Sequence[nn.Module], inside: Iterable[nn.Module]) -> None:
        self.holders: list[Any] = []
        """Dictionaries, lists and sets that may change in place."""

        self.views: list[Iterable[Any]] = []
        """Views of what those hold, which show what they hold later."""

        self.tensors: list[Tensor] = []
        self.settings: list[tuple[str, Any]] = []
        """Names and values of what is no tensor: equal where a forward finds the same."""

        self.generators: list[Any] = []
        """Generators of random numbers, which change unseen."""

        self._seen: dict[int, Any] = {}
        self._inside = set(map(id, inside))
        for module in modules:
            self._look_into("", vars(module), MOST_DEEP + 1, of_layer=True)
            for cls in _own_classes(type(module)):
                if id(cls) not in self._seen:
                    self._seen[id(cls)] = cls
                    self._look_into(cls.__name__, vars(cls), MOST_DEEP)

    def _note(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, CONSTANTS):
            self.settings.append((name, (type(value), value)))
            return
        if isinstance(value, Tensor):
            if is_plain(value):
                self.tensors.append(value)
            self.settings.append((name, id(value)))
            return
        if isinstance(value, (Casts, MergedLayers)):
            self.settings.append((name, id(value)))
            self.views.append(vars(value).values())
            for each in filter(vars(value).__contains__, _OF_OURS):
                self._note(f"{name}.{each}", vars(value)[each], depth)
            return
        if isinstance(value, (MethodType, BuiltinMethodType)):  # another object is made each time
            self.settings.append((name, value))
            if depth:
                self._note(name, value.__self__, depth - 1)
            return
        if is_generator(value):
            self.generators.append(value)
        is_looked_into = depth and id(value) not in self._inside
        parts = [each for each in _parts_of(value) if len(each) <= MOST_HELD] if is_looked_into else []
        if not parts:
            self.settings.append((name, id(value)))
            return
        self.settings.append((name, id(value) if isinstance(value, (type, nn.Module)) else type(value)))
        if id(value) not in self._seen:
            self._seen[id(value)] = value
            for part in parts:
                self._look_into(name, part, depth, keys_count=part is value)

    def _look_into(self, name: str, part: Any, depth: int, *, of_layer: bool = False, keys_count: bool = False) -> None:
        if isinstance(part, (dict, list, set, frozenset, deque)):
            self.holders.append(part)
        if not isinstance(part, (dict, MappingProxyType, _Slots)):
            if not isinstance(part, tuple):
                self.views.append(part)
            for each in part:
                self._note(name, each, depth - 1)
            return
        self.views.append(part if isinstance(part, _Slots) else part.values())
        if keys_count and isinstance(part, dict):  # which may change alone
            self.views.append(part.keys())
        for key, each in part.items():
            if keys_count or not _is_left_out(key, each, of_layer):
                self._note(f"{name}.{key}" if name else key, each, depth - 1)


class _Slots:
    """A view of what an object holds in slots, which shows what they hold later."""

    def __init__(self, held: object, names: tuple[str, ...]) -> None:
        self._held, self._names = held, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Any]:
        return map(getattr, repeat(self._held), self._names, repeat(None))

    def items(self) -> Iterable[tuple[str, Any]]:
        return zip(self._names, self, strict=True)


def _parts_of(value: Any) -> tuple[Any, ...]:
    """Return the containers that a value consists of, attributes of objects and classes included.

    Empty: it is not looked into.
    """
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return (value,)
    if isinstance(value, partial):  # transformers makes another one each time that checkpointing is enabled
        return ((value.func, value.args, value.keywords),)
    if isinstance(value, type):
        return tuple(map(vars, _own_classes(value)))
    cls = type(value)
    held = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):  # which another module has, or none
        return (held, *map(vars, _own_classes(cls)))
    if _package(cls) in _OPAQUE_PACKAGES:
        return ()
    slots = _slots_of(cls)
    held_in = [*([held] if isinstance(held, dict) else ()), *([_Slots(value, slots)] if slots else ())]
    return (*held_in, *map(vars, _own_classes(cls))) if held_in else ()


def _is_left_out(name: str, value: Any, of_layer: bool) -> bool:
    """Tell whether no forward is made of an attribute, or what it holds is looked at by itself."""
    if name in _BOOKKEEPING or name.startswith("__annot"):  # classes get theirs when somebody reads them
        return True
    return of_layer and name in _OF_MODULES and not isinstance(value, CONSTANTS)


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


@cached_by_class
def _own_classes(cls: type) -> tuple[type, ...]:
    """Return what of a class and its bases the program has, whose attributes may be settings."""
    return tuple(each for each in cls.__mro__ if _package(each) not in _PACKAGES_OF_CLASSES)


@cached_by_class
def _slots_of(cls: type) -> tuple[str, ...]:
    """Return the names of a class's slots: Python makes a descriptor of each."""
    return tuple(
        name
        for each in cls.__mro__
        for name, value in vars(each).items()
        if isinstance(value, MemberDescriptorType) and value.__objclass__ is each
    )
