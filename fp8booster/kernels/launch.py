"""Launch a Triton kernel with little work on the host.

Triton looks at every argument of every call to find the compiled variant: 20 to 30 us a launch on a slow host, more
than many kernels take. Here the variant is found by a key of plain numbers and called with raw pointers.
"""

from __future__ import annotations

from typing import Any

import torch
import triton


def ceil_div(size: int, part: int) -> int:
    """How many parts cover a size. (Triton's own costs 10 us a call outside kernels.)"""
    return -(-size // part)


_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}


def launch(
    kernel: triton.JITFunction,
    programs: int,
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int, ...],
    *,
    num_warps: int = 4,
    **constants: Any,
) -> None:
    """Run a kernel whose parameters are pointers, then numbers, then compile-time constants.

    Args:
        kernel: the kernel.
        programs: size of the grid.
        tensors: what the pointers point to; all on one device, on whose current stream the kernel runs.
        numbers: the integers.
        num_warps: warps a program.
        constants: the compile-time constants, in the order of the kernel's parameters.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(kernel, programs, tensors, numbers, num_warps=num_warps, **constants)
        return
    pointers = tuple([tensor.data_ptr() for tensor in tensors])
    # what Triton makes variants by: types, alignment of pointers, and (here all of) the numbers
    key = (
        kernel,
        device,
        num_warps,
        numbers,
        tuple(constants.values()),
        tuple([tensor.dtype for tensor in tensors]),
        tuple([pointer % 16 for pointer in pointers]),
    )
    compiled = _compiled.get(key)
    if compiled is None:
        _compiled[key] = kernel[(programs,)](*tensors, *numbers, **constants, num_warps=num_warps)
        return
    compiled[(programs, 1, 1)](
        *pointers, *numbers, *constants.values(), stream=torch._C._cuda_getCurrentRawStream(device)
    )
