"""Operators of an object that stands for a tensor which is made when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T", bound=type)

_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHERS = ("neg", "pos", "abs", "invert", "bool", "int", "float", "len", "iter", "getitem", "setitem")
_NAMES = [*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_OTHERS]


def with_operators(cls: T) -> T:
    """Give a class that has `made` the operators of a tensor, but those that it has itself: they make the tensor.

    Python looks them up in the class, past `__getattr__` and `__torch_function__`.
    """
    for name in (f"__{name}__" for name in _NAMES):
        if name not in vars(cls):
            setattr(cls, name, _of_tensor(name))
    cls.__hash__ = object.__hash__  # type: ignore[assignment] # as a tensor, of what it is and not of its values
    return cls


def _of_tensor(name: str) -> Callable[..., Any]:
    def operate(self: Any, *args: Any) -> Any:
        return getattr(self.made(), name)(*(each.made() if type(each) is type(self) else each for each in args))

    return operate
