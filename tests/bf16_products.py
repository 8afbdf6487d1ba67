"""BF16 products on a CPU without instructions for them, where PyTorch takes 40 times as long as in FP32."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("aten", "IMPL")


@functools.cache
def multiply_in_fp32() -> None:
    """Let BF16 products of this process be FP32 products, rounded once, as on CPUs that have instructions for them."""
    if torch.ops.mkldnn._is_mkldnn_bf16_supported() or not hasattr(torch.library, "get_kernel"):
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            for overload in (name, f"{name}.out"):
                kernel = torch.library.get_kernel(f"aten::{overload}", "CPU")
                _library.impl(overload, _in_fp32(getattr(torch, name), kernel), "CPU", with_keyset=True)


def _in_fp32(function: Callable[..., torch.Tensor], kernel: Any) -> Callable[..., torch.Tensor]:
    def multiply(keys: Any, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if args[0].dtype is not torch.bfloat16:
            return kernel.call_boxed(keys, *args, **kwargs, **({} if out is None else {"out": out}))
        product = function(*(each.float() if isinstance(each, torch.Tensor) else each for each in args), **kwargs)
        return product.bfloat16() if out is None else out.resize_(product.shape).copy_(product)

    return multiply
