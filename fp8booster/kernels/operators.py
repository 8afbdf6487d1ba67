"""Operators: torch code that defines what is computed, and Triton kernels that compute it on a GPU."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from fp8booster.kernels.device import known_why_no_fp8

P = ParamSpec("P")
R = TypeVar("R")


class Operator(Generic[P, R]):
    """A function of tensors, which runs in Triton where its first tensor is on a GPU; see `operator`."""

    reference: Callable[P, R]
    """The definition, in torch. It runs on every device, and is what tests compare with."""

    def __init__(
        self, reference: Callable[P, R], rounds_to_fp8: bool, writes: tuple[str, ...], fake: Callable[..., Any] | None
    ) -> None:
        functools.update_wrapper(self, reference)
        self.reference, self._rounds_to_fp8 = reference, rounds_to_fp8
        self._names = list(inspect.signature(reference).parameters)
        self._writes = [(self._names.index(name), name) for name in writes]
        self._as_whole = None if fake is None else self._register(fake)

    def _register(self, fake: Callable[..., Any]) -> Callable[..., Any]:
        """Make the operator one of torch's: its compiler then looks no further."""
        # a compiler that saw the definition would round otherwise: it fuses a product and a sum, and divides faster
        kinds = [parameter.kind for parameter in inspect.signature(self.reference).parameters.values()]
        positional = len(kinds) - kinds.count(inspect.Parameter.KEYWORD_ONLY)

        def call(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
            return function(*args[:positional], **dict(zip(self._names[positional:], args[positional:], strict=False)))

        # torch takes no tensors by keyword alone
        schema = torch.library.infer_schema(self.reference, mutates_args=()).replace("*, ", "")
        name = f"fp8booster::{self.reference.__name__}"
        made = torch.library.custom_op(name, lambda *args: call(self.run, args), mutates_args=(), schema=schema)
        made.register_fake(lambda *args: call(fake, args))
        return getattr(torch.ops.fp8booster, self.reference.__name__)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            if self._as_whole is not None:
                return self._as_whole(*args, **kwargs)
            if not self._rounds_to_fp8:
                return self.reference(*args, **kwargs)  # whose code the compiler fuses with what is around it
        return self.run(*args, **kwargs)

    def run(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the kernels or the definition; compiled code meets this inside the operator."""
        first = args[0] if args and isinstance(args[0], Tensor) else _first_tensor(args)
        if not self.uses_triton(first):
            return self.reference(*args, **kwargs)
        result = self.triton(*args, **kwargs)
        if self._writes:  # autograd and caches of FP8 weights tell by a version what was written since
            written = [args[place] if place < len(args) else kwargs.get(name) for place, name in self._writes]
            torch.autograd.graph.increment_version(_tensors(written))
        return result

    def uses_triton(self, tensor: Tensor | None) -> bool:
        """Tell whether the kernels run for arguments of which this is the first tensor."""
        if tensor is None or not tensor.is_cuda:
            return False
        return not self._rounds_to_fp8 or known_why_no_fp8(tensor.device) is None

    @functools.cached_property
    def triton(self) -> Callable[P, R]:
        """Return the function that launches the kernels; Triton is imported here, and nowhere else."""
        function = self.reference
        return getattr(import_module(f"{function.__module__}_triton"), f"{function.__name__.rstrip('_')}_triton")


def operator(
    *, rounds_to_fp8: bool = False, writes: tuple[str, ...] = (), fake: Callable[..., Any] | None = None
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Make an `Operator` of the torch function that defines it.

    Its Triton twin `f_triton` takes the same arguments and stands in `<module>_triton.py`.

    Args:
        rounds_to_fp8: the kernels need a GPU that has instructions for FP8. If not, they run on any GPU, and code that
            is being compiled is given the definition.
        writes: the parameters that are written to, tensors or lists of them: their versions are raised, which Triton
            does not do.
        fake: takes the arguments and gives tensors of the results' shapes and dtypes. Compiled code then sees the
            operator whole, as `torch.ops.fp8booster.f`, and computes the bits of eager code.
    """
    return lambda reference: Operator(reference, rounds_to_fp8, writes, fake)


def _first_tensor(arguments: tuple[Any, ...] | list[Any]) -> Tensor | None:
    """Return the first tensor among arguments, or in those that are lists and tuples of tensors."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            return argument
        if isinstance(argument, (tuple, list)):
            found = _first_tensor(argument)
            if found is not None:
                return found
    return None


def _tensors(arguments: list[Any]) -> list[Tensor]:
    """Return the tensors that arguments are, or hold in lists."""
    found = []
    for argument in arguments:
        found += argument if isinstance(argument, (tuple, list)) else [argument]
    return [tensor for tensor in found if tensor is not None]


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Let operators keep their dtypes: autocast turns FP32 sums to 16 bits, and joins no tensors of the other 16."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()
