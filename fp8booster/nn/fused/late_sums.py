"""A decoder layer as transformers wrote it, whose sums are made when they are read: a norm makes its own.

    h = x + attention(...)     a `LateSum`
    y = norm(h)                both in one kernel; h is made now
    return h + mlp(y)          made when the layer returns it

So nothing is written down of where a layer has its norms, whether its blocks are parallel, what it multiplies them by,
which masks it makes, what it takes and returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fp8booster.nn.fused.late_operators import with_operators
from fp8booster.nn.modules import may_be_bypassed


@with_operators
class LateSum:
    """A tensor, or the sum of two that is made when it is needed.

    It may be added to and multiplied; whatever else is done to it is done to the tensor that it is.
    """

    __slots__ = ("terms",)

    terms: tuple[torch.Tensor, ...]
    """What is to be added up, of one shape; one tensor where it was. Who makes the sum leaves it here."""

    def __init__(self, *terms: torch.Tensor) -> None:
        self.terms = terms

    def made(self) -> torch.Tensor:
        """The sum."""
        if len(self.terms) > 1:
            self.terms = (torch.add(*self.terms),)
        return self.terms[0]

    def __add__(self, other: Any) -> LateSum:
        return _sum(self.made(), made(other))

    def __radd__(self, other: Any) -> LateSum:
        return _sum(made(other), self.made())

    def __mul__(self, other: Any) -> LateSum:
        return LateSum(self.made() * made(other))

    __rmul__ = __mul__

    def __getattr__(self, name: str) -> Any:
        return getattr(self.made(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Iterable[type], args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if function in _ADDITIONS and len(args) == 2 and not kwargs:
            return _sum(*map(made, args))
        return function(*map(made, args), **{name: made(value) for name, value in (kwargs or {}).items()})


_ADDITIONS = (torch.add, torch.Tensor.add, torch.Tensor.__add__, torch.Tensor.__radd__)


def _sum(one: Any, other: Any) -> LateSum:
    late = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
    return LateSum(one, other) if late else LateSum(one + other)


def made(value: Any) -> Any:
    """A value, with what is late in it made: itself, or what is in a tuple or list."""
    if isinstance(value, LateSum):
        return value.made()
    if type(value) in (tuple, list):
        return type(value)(map(made, value))
    return value


def parts_with_late_sums(layer: nn.Module, norm: type[nn.Module], *, saving: Any) -> dict[str, Any]:
    """What stands in for the parts of a layer while its own forward runs: they take and give late sums.

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
    """A part of a layer."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for name, value in kwargs.items():
            if type(value) is LateSum:
                kwargs[name] = value.made()
        output = self._module(*[each.made() if type(each) is LateSum else each for each in args], **kwargs)
        # the tensor that it gave (the first, if it gave more) may be added to later
        if isinstance(output, torch.Tensor):
            return LateSum(output)
        if type(output) is tuple and output and isinstance(output[0], torch.Tensor):
            return (LateSum(output[0]), *output[1:])
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Norm(_Part):
    """A norm that makes the sum that it reads, and gives it to all who read it later."""

    def __init__(self, module: Any, saving: Any) -> None:
        self._module, self._saving = module, saving

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # hooks, and a forward of the norm's own or of a derived class, are given what transformers gives it
        is_late = len(args) == 1 and not kwargs and isinstance(args[0], LateSum)
        if not (is_late and self._module.takes_terms and may_be_bypassed(self._module)):
            return super().__call__(*args, **kwargs)
        *residual, x = args[0].terms
        y, total = self._module(x, *residual, both=True, saving=self._saving)
        args[0].terms = (total,)
        return LateSum(y)
