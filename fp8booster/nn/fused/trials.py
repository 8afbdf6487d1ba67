"""Trials of what parts of transformers' models compute, before they are fused.

Families and versions say the same by other names, and something else by the same. So the forward of a class is tried
out, in FP32 on the CPU, on numbers of all sizes, on a module that has small parts: here only what comes out counts.
Numbers cannot tell what hangs on an attribute, a mode or a parameter. So a trial watches what the forward reads of its
module, and of a norm or a feed-forward block it must be nothing but the parts that the fused form reads at each call.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from fp8booster.nn.fused.families import Part
from fp8booster.nn.modules import cached_by_class, change_class, mixed_class

Trial = TypeVar("Trial", bound=Callable[..., Any])


def on_numbers(trial: Trial) -> Trial:
    """Let a trial compute also where a caller's tensors have shapes alone, as those of a plan have.

    A forward may draw random numbers: those that a caller draws afterwards stay as they are.
    """

    @functools.wraps(trial)
    def with_numbers(*args: Any) -> Any:
        with _disable_current_modes(), torch.random.fork_rng(devices=[]):
            return trial(*args)

    return cast(Trial, with_numbers)


def numbers(*shape: int) -> Tensor:
    """Return random FP32 numbers on the CPU, always the same."""
    generator = torch.Generator().manual_seed(0)  # of its own: a caller's random numbers stay as they are
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def tried(compute: Callable[..., Any], *args: Any) -> Any:
    """Return what is computed; None: it failed."""
    try:
        # autocast would round what a trial compares to four digits
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return compute(*args)
    except Exception:  # whatever the forward of a class that does something else raises on a trial's numbers
        return None


def are_alike(found: Any, right: Any) -> bool:
    """Tell whether two results are tensors of one shape and of the same numbers, but for rounding."""
    if not (isinstance(found, Tensor) and isinstance(right, Tensor)) or found.shape != right.shape:
        return False
    # sums cancel: what is small beside the largest value may err by a rounding of that
    largest = right.abs().max().item() if right.numel() else 0.0
    return torch.allclose(found, right, rtol=1e-4, atol=1e-6 * largest)


class _Watched:
    """Mixin of a module that notes the names of the attributes that are read of it."""

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "__dict__")[_READ].add(name)
        return object.__getattribute__(self, name)


_READ = "_fp8booster_read"


def watch(module: nn.Module, read: set[str]) -> None:
    """Let a module note the names of its attributes that are read from now on."""
    vars(module)[_READ] = read
    change_class(module, mixed_class(_Watched, type(module)))


def computes(cls: type[nn.Module], forward: Callable, held: dict[str, Any], right: Tensor, *args: Tensor) -> bool:
    """Tell whether a forward gives this of a module that holds certain attributes, and reads no others of it.

    Args:
        cls: the module's.
        forward: a function that takes the module first.
        held: by name.
        right: what it must give.
        args: of the forward.
    """
    read: set[str] = set()
    # without `__init__`, whose arguments differ from version to version
    probe = object.__new__(cls)
    vars(probe).update(held)
    watch(probe, read)
    found = tried(forward, probe, *args)
    return are_alike(found, right) and all(name in held or _is_code(cls, name) for name in read)


def _is_code(cls: type[nn.Module], name: str) -> bool:
    """Tell whether a class gives its modules a method of that name, whose reads are watched too."""
    member = inspect.getattr_static(cls, name, None)
    return name.startswith("__") or isinstance(member, (types.FunctionType, staticmethod, classmethod, property))


class Norm(NamedTuple):
    """The computation of a norm."""

    centered: bool  # layer norm; RMS norm else
    unit_offset: bool  # it multiplies by 1 + weight
    epsilon: str  # the attribute with what is added to the mean square
    weighted: bool = True  # it multiplies by its weight, of one dimension, or of one for each head
    biased: bool = False  # it adds its bias, if it has one


_NORMS = (
    Norm(False, False, ""),
    Norm(False, True, ""),
    Norm(False, False, "", weighted=False),
    Norm(True, False, ""),
    Norm(True, False, "", biased=True),
)
_NORM_SIZES = ((1.0, 0.25), (1e-3, 1e-6), (1e-3, 0.25), (300.0, 0.25), (300.0, 1e-6), (0.0, 1e-6))
"""How large numbers are, and what is added to their mean square."""


def norm_of(cls: type[nn.Module], *heads: int) -> Norm | None:
    """Return what a class of norms of the last dimension computes; None: something else.

    Args:
        cls: of norms.
        heads: how many rows its weight has, one for each head; left out, it has one dimension.
    """
    return _norm_of(cls, cls.forward, *heads)  # a forward may be replaced for all modules of a class


@cached_by_class
@on_numbers
def _norm_of(cls: type[nn.Module], forward: Callable, *heads: int) -> Norm | None:
    weight, bias = numbers(*heads, 8), numbers(*heads, 8).flip(0)
    for name, kind in product(("variance_epsilon", "eps"), _NORMS):
        norm = kind._replace(epsilon=name)
        if all(_is_norm(cls, forward, norm, *each, weight, bias) for each in product(_NORM_SIZES, (4, 70))):
            return norm
    return None


def _is_norm(
    cls: type[nn.Module],
    forward: Callable,
    norm: Norm,
    size: tuple[float, float],
    length: int,
    weight: Tensor,
    bias: Tensor,
) -> bool:
    largest, epsilon = size
    held: dict[str, Any] = {norm.epsilon: epsilon, "normalized_shape": weight.shape}
    x = largest * numbers(2, length, *weight.shape)
    right = x - x.mean(-1, keepdim=True) if norm.centered else x
    right = right * (right.square().mean(-1, keepdim=True) + epsilon).rsqrt()
    if norm.weighted:
        held["weight"], right = weight, right * (norm.unit_offset + weight)
    if norm.biased:
        held["bias"], right = bias, right + bias
    return computes(cls, forward, held, right, x)


STAND_INS: tuple[Callable[[Tensor], Tensor], ...] = (F.silu, lambda x: 0.5 - x.abs())
"""Two activations, so that a block with one of its own is seen."""

_GATED_SIZES = (1.0, 0.0, 1e-3, 30.0, 1e4)
"""How large numbers are: what is large may be clamped."""


def gates_by_activation(cls: type[nn.Module]) -> bool:
    """Tell whether a class's `_apply_gate` of gate and up, [M, 2 F], is `act_fn(gate) * up`, gate first.

    Not where its parts are interleaved, clamped or changed otherwise.

    Args:
        cls: of modules that hold experts.
    """
    return _gates_by_activation(cls, inspect.getattr_static(cls, "_apply_gate", None))


@cached_by_class
@on_numbers
def _gates_by_activation(cls: type[nn.Module], gate: Callable | None) -> bool:
    if not callable(gate):
        return False
    for activation, size in product(STAND_INS, _GATED_SIZES):
        x = size * numbers(70, 16)
        first, second = x.chunk(2, -1)
        if not computes(cls, gate, {"act_fn": activation}, activation(first) * second, x):
            return False
    return True


def is_gated(cls: type[nn.Module], part: Part, activation: str = "act_fn", unread: tuple[str, ...] = ()) -> bool:
    """Tell whether a class of feed-forward blocks computes `output(activation(gate) * up)`, gate first.

    Args:
        cls: of blocks.
        part: the layers that blocks have.
        activation: its name in a block.
        unread: fields of a block's configuration that may be read, where they are 1.
    """
    return _is_gated(cls, cls.forward, part, activation, unread)


@cached_by_class
@on_numbers
def _is_gated(cls: type[nn.Module], forward: Callable, part: Part, activation: str, unread: tuple[str, ...]) -> bool:
    layers: list[Callable] = [lambda x: 2 * x, lambda x: 3 * x]
    if len(part.merged) == 1:
        layers = [lambda x: torch.cat([2 * x, 3 * x], -1)]
    held = dict(zip(part.merged, layers, strict=True)) | {part.output: lambda x: 5 * x}
    if unread:
        held["config"] = types.SimpleNamespace(**dict.fromkeys(unread, 1))
    for compute, size, shape in product(STAND_INS, _GATED_SIZES, ((3, 8), (2, 70, 8))):
        x = size * numbers(*shape)
        if not computes(cls, forward, held | {activation: compute}, 5 * (compute(2 * x) * 3 * x), x):
            return False
    return True
