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


MOST_KEYS = 2**16
"""Where sizes never repeat, as with tokens sent to experts, keys are forgotten from here on; Triton keeps the code."""

_compiled: dict[tuple, triton.compiler.CompiledKernel] = {}


def launch(
    kernel: triton.JITFunction,
    programs: int | tuple[int, int],
    tensors: tuple[torch.Tensor, ...],
    numbers: tuple[int | float, ...],
    *,
    num_warps: int = 4,
    enable_fp_fusion: bool = True,
    **constants: Any,
) -> None:
    """Run a kernel whose parameters are pointers, then numbers, then compile-time constants.

    Args:
        kernel: the kernel.
        programs: size of the grid, of one dimension or of two.
        tensors: what the pointers point to; all on one device, on whose current stream the kernel runs.
        numbers: the integers, and floats, each parameter always one or the other.
        num_warps: warps a program.
        enable_fp_fusion: whether the compiler may fuse a product and a sum into one rounding.
        constants: the compile-time constants, in the order of the kernel's parameters.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            options = {"num_warps": num_warps, "enable_fp_fusion": enable_fp_fusion}
            launch(kernel, programs, tensors, numbers, **options, **constants)
        return
    x, y = (programs, 1) if isinstance(programs, int) else programs
    pointers = tuple([tensor.data_ptr() for tensor in tensors])
    # what Triton makes variants by: types, alignment of pointers, and (here all of) the numbers
    key = (
        kernel.fn,  # a kernel's own hash takes a lock
        device,
        num_warps,
        enable_fp_fusion,
        numbers,
        tuple(constants.values()),
        tuple([tensor.dtype for tensor in tensors]),
        tuple([pointer % 16 for pointer in pointers]),
    )
    compiled = _compiled.get(key)
    if compiled is None:
        if len(_compiled) >= MOST_KEYS:
            _compiled.clear()
        _compiled[key] = kernel[(x, y)](
            *tensors, *numbers, **constants, num_warps=num_warps, enable_fp_fusion=enable_fp_fusion
        )
        return
    stream, arguments = torch._C._cuda_getCurrentRawStream(device), (*pointers, *numbers, *constants.values())
    hooks = triton.knobs.runtime
    if hooks.launch_enter_hook.calls or hooks.launch_exit_hook.calls:  # a profiler's
        compiled[(x, y, 1)](*arguments, stream=stream)
        return
    compiled.run(x, y, 1, stream, compiled.function, compiled.packed_metadata, None, None, None, *arguments)
