"""Tensors that are made when they are read, and a decoder layer as transformers wrote it whose norms make its sums.

    h = x + attention(...)     a `LazySum`
    y = norm(h)                both in one kernel, which makes h
    return h + mlp(y)          made when the layer returns it

So nothing is written down of where a layer has its norms, whether its blocks are parallel, what it multiplies them by,
which masks it makes, what it takes and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fp8booster.nn.modules import may_be_bypassed


class LazyTensor:
    """Stands for a tensor: what a class derived from it does not define is done to the tensor, which is made then."""

    __slots__ = ()

    def made(self) -> Tensor:
        """Make the tensor, once."""
        raise NotImplementedError

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        return function(*map(made, args), **{name: made(value) for name, value in (kwargs or {}).items()})


def made(value: Any) -> Any:
    """Return a value with every lazy tensor in it made: itself, or what is in a tuple or list."""
    if isinstance(value, LazyTensor):
        return value.made()
    if type(value) in (tuple, list):
        return type(value)(map(made, value))
    return value


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: getattr(self.made(), name)(*map(made, args))


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor")
_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_OTHERS = ("neg", "pos", "abs", "invert", "bool", "int", "float", "len", "iter", "getitem", "setitem")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), *_COMPARISONS, *_OTHERS):
    # Python looks operators up in the class, past `__getattr__` and `__torch_function__`
    setattr(LazyTensor, f"__{_name}__", _operator(f"__{_name}__"))


class LazySum(LazyTensor):
    """A tensor, or the sum of two. It may be added to and multiplied."""

    __slots__ = ("terms",)

    terms: tuple[Tensor, ...]
    """Of one shape, to be added up; one tensor where that was done. Who makes the sum leaves it here."""

    def __init__(self, *terms: Tensor) -> None:
        self.terms = terms

    def made(self) -> Tensor:
        """Add the terms up."""
        if len(self.terms) > 1:
            self.terms = (torch.add(*self.terms),)
        return self.terms[0]

    def __add__(self, other: Any) -> LazySum:
        return _sum(self.made(), made(other))

    def __radd__(self, other: Any) -> LazySum:
        return _sum(made(other), self.made())

    def __mul__(self, other: Any) -> LazySum:
        return LazySum(self.made() * made(other))

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _ADDITIONS and len(args) == 2 and not kwargs:
            return _sum(*map(made, args))
        return super().__torch_function__(function, types, args, kwargs)


_ADDITIONS = (torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__)


def _sum(one: Any, other: Any) -> LazySum:
    both = isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape
    # of different shapes or types torch broadcasts and promotes, which no kernel for norms does
    return LazySum(one, other) if both else LazySum(one + other)


def parts_with_lazy_sums(layer: nn.Module, norm: type[nn.Module], *, saving: Any) -> dict[str, Any]:
    """Return what stands in for the parts of a layer while its own forward runs: they take and give lazy sums.

    Args:
        layer: a decoder layer.
        norm: the class of norms that make the sums that they read.
        saving: given to these: how they save for backward.
    """
    return {
        name: _Norm(part, saving) if isinstance(part, norm) else _Part(part)
        for name, part in layer._modules.items()
        if part is not None
    }


class _Part:
    """A part of a layer: it is given tensors, and what it gives may be added to later."""

    def __init__(self, module: nn.Module, saving: Any = None) -> None:
        self._module, self._saving = module, saving

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if type(value) is LazySum:
                kwargs[name] = value.made()
        output = self._module(*map(made, args), **kwargs)
        if isinstance(output, Tensor):
            return LazySum(output)
        if type(output) is tuple and output and isinstance(output[0], Tensor):
            return (LazySum(output[0]), *output[1:])
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Norm(_Part):
    """A norm that makes the sum that it reads, and gives it to all who read it later."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module
        # hooks, and a forward of the norm's own or of a derived class, are given what transformers gives it
        is_lazy = len(args) == 1 and not kwargs and isinstance(args[0], LazySum)
        if not (is_lazy and module.takes_terms and may_be_bypassed(module)):
            return super().__call__(*args, **kwargs)
        *residual, x = args[0].terms  # the block's output last: the kernel adds it to the residual stream
        y, total = module(x, *residual, both=True, saving=self._saving)
        args[0].terms = (total,)  # who adds to the stream later adds to what the kernel wrote
        return LazySum(y)
