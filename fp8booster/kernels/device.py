"""Devices that run FP8 products, and reasons of those that do not."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

MINIMUM_CAPABILITY = (8, 9)
"""Compute capability of the first GPUs with FP8 products (Ada)."""


def why_no_fp8(device: torch.device) -> str | None:
    """Return why a device cannot run FP8 products, or None where it can. The CPU always can."""
    # a compiler traces through the examination, and would warn of the cache
    return _examine(device) if torch.compiler.is_compiling() else known_why_no_fp8(device)


def _examine(device: torch.device) -> str | None:
    if device.type == "cpu":
        return None
    if device.type != "cuda":
        return f"torch has no FP8 products for {device.type} devices; train on CUDA or on the CPU"
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < MINIMUM_CAPABILITY:
        have = ".".join(map(str, torch.cuda.get_device_capability(device)))
        need = ".".join(map(str, MINIMUM_CAPABILITY))
        return (
            f"{torch.cuda.get_device_name(device)} has compute capability {have} and FP8 products need {need}; train "
            "in BF16, or set FP8Config(emulate=True) to have FP8's rounding without its speed"
        )
    return None


known_why_no_fp8 = functools.cache(_examine)
"""`why_no_fp8` for eager code."""


def runs_triton(tensor: Tensor) -> bool:
    """Tell whether an elementwise kernel runs in Triton here; the compiler makes its own of code that it compiles."""
    return tensor.is_cuda and not torch.compiler.is_compiling()


def is_captured(tensor: Tensor) -> bool:
    """Tell whether work on a tensor goes into a CUDA graph: nothing has values yet, and new memory is the graph's."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def current_stream(tensor: Tensor) -> int | None:
    """Return the handle of the stream on which work on a tensor is being queued; None for the CPU."""
    # not torch.cuda.current_stream, which makes an object at each call
    return torch._C._cuda_getCurrentRawStream(tensor.device.index) if tensor.is_cuda else None


def why_no_blockwise(device: torch.device) -> str | None:
    """Return why a device has FP8 products, but none of blockwise scales; None where it has them."""
    if device.type == "cpu":
        return None
    instead = 'use FP8Config(scaling="rowwise"), or emulate=True to have the rounding without the speed'
    if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        return f"products with blockwise scales need a Hopper GPU; {instead}"
    if not hasattr(torch.nn.functional, "scaled_mm"):
        return f"torch {torch.__version__} has no products with blockwise scales; install 2.11 or newer, or {instead}"
    if tuple(map(int, torch.version.cuda.split("."))) < (12, 9):
        return f"products with blockwise scales need CUDA 12.9 and this torch has {torch.version.cuda}; {instead}"
    return None


def require_fp8(device: torch.device, emulate: bool, granularity: str = "tensorwise") -> None:
    """Check that FP8 products can run on a device.

    Args:
        device: on which they are to run.
        emulate, granularity: those of `FP8Config`.

    Raises:
        ValueError: they cannot, and `emulate` is off.
    """
    reason = None if emulate else why_no_fp8(device)
    if reason is None and not emulate and granularity == "blockwise":
        reason = why_no_blockwise(device)
    if reason is not None:
        raise ValueError(reason)
