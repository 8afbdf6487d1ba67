"""Launch a Triton kernel with little work on the host.

Triton looks at every argument of every call to find the compiled variant: 20 to 30 us a launch on a slow host, more
than many kernels take. Here the variant is found by a key of plain numbers and called with raw pointers. Sizes that
were not seen before, as those of tokens sent to experts, find what others of their kind had compiled.

How Triton calls what it compiled is not part of its public interface. With versions other than `TESTED` every launch
goes through Triton.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
import triton
from packaging.version import Version
from torch import Tensor

Size = TypeVar("Size", int, np.ndarray)

TESTED = ((3, 6), (3, 7))
"""Versions of Triton that were tested on a GPU with what is called here by raw pointers."""


def ceil_div(size: Size, part: int) -> Size:
    """Count the parts that cover a size, or each of an array. (Triton's own costs 10 us a call outside kernels.)"""
    return -(-size // part)


def block_over(size: int) -> int:
    """Return the power of two from `size` on: Triton's ranges have no other lengths."""
    return 1 << (size - 1).bit_length()


@functools.cache
def processors(device: torch.device) -> int:
    """Count the streaming multiprocessors of a GPU; 1 for the CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def new_partials(programs: int, like: Tensor) -> Tensor:
    """Return memory for the partial maxima of so many programs, float32 [programs]; each must store its own.

    So a kernel that makes a tensor delivers its amax: the largest of them, which `kernels.cast.cast` takes as its
    `amax`. A few hundred programs walk over the rows, and every program of the cast reads these few numbers itself: no
    launch between, no atomics, no memory to zero first.
    """
    return torch.empty(programs, dtype=torch.float32, device=like.device)


_dtype = attrgetter("dtype")
_beyond_16_bytes = (15).__and__  # by how many bytes a pointer misses the alignment that Triton tells pointers apart by


def _kind(number: int | float) -> object:
    """Return what Triton specializes a number by: a one becomes a constant, a multiple of 16 moves whole vectors."""
    if isinstance(number, float):  # Triton compiles no variants by the values of floats
        return float
    return number == 1, number % 16 == 0, -(2**31) <= number < 2**31


def calls_compiled(version: str) -> bool:
    """Tell whether kernels are called past Triton, which is of this version."""
    return Version(version).release[:2] in TESTED


_CALLS_COMPILED = calls_compiled(triton.__version__)

# by all that tells variants of a kernel apart but its pointers, and then by these: the compiled kernel, its launcher,
# and the launcher's arguments of that kernel
_variants: dict[tuple, dict[tuple, tuple[triton.compiler.CompiledKernel, Callable[..., None], tuple]]] = {}


class Launch:
    """A launch of a kernel of which all but the tensors and the grid is known.

    Args:
        kernel: its parameters are pointers, then numbers, then compile-time constants.
        numbers: the integers, and floats.
        num_warps: warps a program.
        enable_fp_fusion: whether the compiler may fuse a product and a sum into one rounding.
        constants: the compile-time constants, in the order of the kernel's parameters.
    """

    def __init__(
        self,
        kernel: triton.JITFunction,
        numbers: tuple[int | float, ...],
        *,
        num_warps: int = 4,
        enable_fp_fusion: bool = True,
        **constants: Any,
    ) -> None:
        self._kernel, self._numbers = kernel, numbers
        self._options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion, **constants}
        self._behind_pointers = (*numbers, *constants.values())
        key = (kernel.fn, num_warps, enable_fp_fusion, *constants.values(), *map(_kind, numbers))
        self._compiled = _variants.setdefault(key, {})

    def __call__(self, programs: int | tuple[int, int], *tensors: Tensor) -> None:
        """Run the kernel on tensors of one device, on that device's current stream.

        Args:
            programs: size of the grid, of one dimension or of two.
            tensors: for the pointers.
        """
        device = tensors[0].get_device()
        if device >= 0 and device != torch._C._cuda_getDevice():  # a kernel runs on the current device's stream
            with torch.cuda.device(device):
                self(programs, *tensors)
            return
        grid = (programs, 1, 1) if isinstance(programs, int) else (*programs, 1)
        if not _CALLS_COMPILED:
            self._kernel[grid](*tensors, *self._numbers, **self._options)
            return
        pointers = tuple(map(Tensor.data_ptr, tensors))
        # what Triton makes variants by, beside the numbers: types and alignment of pointers
        key = (device, *map(_dtype, tensors), *map(_beyond_16_bytes, pointers))
        found = self._compiled.get(key)
        if found is None:
            compiled = self._kernel[grid](*tensors, *self._numbers, **self._options)
            if compiled is not None:  # Triton's interpreter compiles nothing
                of_kernel = (compiled.function, compiled.packed_metadata, None, None, None)
                self._compiled[key] = compiled, compiled.run, of_kernel
            return
        compiled, run, of_kernel = found
        stream = torch._C._cuda_getCurrentRawStream(device)
        hooks = triton.knobs.runtime
        # a profiler's hooks are called by Triton's own call, with metadata that costs what is saved here
        if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:
            compiled[grid](*pointers, *self._behind_pointers, stream=stream)
            return
        run(*grid, stream, *of_kernel, *pointers, *self._behind_pointers)


# where sizes never repeat, as with tokens sent to experts, launches are forgotten from here on; variants are not
MOST_LAUNCHES = 2**14

_launches: dict[tuple, Launch] = {}


def launch(
    kernel: triton.JITFunction,
    programs: int | tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int | float, ...],
    *,
    num_warps: int = 4,
    enable_fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Find the `Launch` of these arguments, or make it, and call it with the tensors.

    A number is always an integer or always a float.
    """
    # by its function, for a kernel's own hash takes a lock
    key = (kernel.fn, num_warps, enable_fp_fusion, numbers, *constants.values())
    found = _launches.get(key)
    if found is None:
        if len(_launches) >= MOST_LAUNCHES:
            _launches.clear()
        found = _launches[key] = Launch(
            kernel, numbers, num_warps=num_warps, enable_fp_fusion=enable_fp_fusion, **constants
        )
    found(programs, *tensors)
