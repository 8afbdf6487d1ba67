"""What PyTorch's products need of a CPU: instructions that it has, and FP32 where it has none for BF16.

Virtual machines whose host does not switch Intel AMX on advertise it and trap on it. PyTorch multiplies in BF16 by AMX
where it is advertised, through oneDNN, and there dies of an illegal instruction. A variable, which oneDNN reads
at its first product, limits it to the instructions before AMX.

With AVX2 alone, as most laptops and many servers have it, PyTorch multiplies BF16 in loops of its own, which take 5 to
15 times as long as FP32's library, and more on several cores.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VARIABLE = "ONEDNN_MAX_CPU_ISA"
BEFORE_AMX = "AVX512_CORE_FP16"
"""The newest without AMX."""

_PRODUCT = "import torch; torch.ones(32, 32).bfloat16() @ torch.ones(32, 32).bfloat16()"

_FEW_ROWS = 4
"""Rows of a product up to which reading the other matrix is what takes time: twice the bytes would be slower."""

_library = torch.library.Library("aten", "IMPL")


def fit_products_to_cpu() -> list[str]:
    """Let products of this process run, and run fast, on this CPU; processes that it starts need their own call.

    Call it before the first product.

    Returns:
        What was found and done, a sentence each; none where nothing had to be.
    """
    found = [avoid_trapping_instructions(), multiply_bf16_in_fp32()]
    return [sentence for sentence in found if sentence is not None]


@functools.cache
def avoid_trapping_instructions() -> str | None:
    """Limit the products of this process, and of those that it starts, to instructions that this CPU has.

    Call it before the first product. Where AMX is advertised it costs a short process that tries it.

    Returns:
        What was found and done, in a sentence; None where nothing had to be.
    """
    if VARIABLE in os.environ or not _advertises_amx():
        return None
    # in another process: a product that traps ends it
    tried = subprocess.run([sys.executable, "-W", "ignore", "-c", _PRODUCT], capture_output=True, check=False)
    if tried.returncode != -signal.SIGILL:
        return None
    os.environ[VARIABLE] = BEFORE_AMX
    return (
        "This CPU advertises Intel AMX and traps on it, so products take the instructions before it "
        f"({VARIABLE}={BEFORE_AMX})."
    )


def _advertises_amx() -> bool:
    processors = Path("/proc/cpuinfo")
    return processors.exists() and "amx_bf16" in processors.read_text()


@functools.cache
def multiply_bf16_in_fp32() -> str | None:
    """Let BF16 products on a CPU without instructions for them be FP32 products, in this process.

    They are rounded once, as those of CPUs that have the instructions. Products of few rows, as a model's that
    generates, stay as PyTorch computes them. `import fp8booster.plugins` calls this where there is no GPU; programs
    without plugins call it themselves.

    Returns:
        What was found and done, in a sentence; None where the CPU has the instructions.
    """
    if _multiplies_bf16():
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for name in ("mm", "addmm", "bmm", "baddbmm"):
            for overload in (name, f"{name}.out"):
                kernel = torch.library.get_kernel(f"aten::{overload}", "CPU")
                _library.impl(overload, _in_fp32(getattr(torch, name), kernel), "CPU", with_keyset=True)
    return "This CPU has no instructions for BF16, so BF16 products are computed in FP32, and rounded once."


def _multiplies_bf16() -> bool:
    # who has AMX has BF16, and oneDNN, once asked, no longer heeds the variable
    if VARIABLE not in os.environ and _advertises_amx():
        return True
    # PyTorch without oneDNN has neither the operator nor a faster product
    return not torch.backends.mkldnn.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def _in_fp32(function: Callable[..., torch.Tensor], kernel: Any) -> Callable[..., torch.Tensor]:
    left = 1 if "add" in function.__name__ else 0  # the position of the left matrix

    def multiply(keys: Any, *args: Any, out: torch.Tensor | None = None, **kwargs: Any) -> torch.Tensor:
        if args[left].dtype is not torch.bfloat16 or args[left].shape[-2] <= _FEW_ROWS:
            return kernel.call_boxed(keys, *args, **kwargs, **({} if out is None else {"out": out}))
        product = function(*(each.float() if isinstance(each, torch.Tensor) else each for each in args), **kwargs)
        return product.bfloat16() if out is None else out.resize_(product.shape).copy_(product)

    return multiply
