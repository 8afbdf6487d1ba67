"""FP8 products on a device: whether they run, and how fast compared with BF16 ones."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch.utils.benchmark import Timer

from fp8booster import formats
from fp8booster.kernels.device import why_no_fp8
from fp8booster.kernels.product import product
from fp8booster.scaling import INPUT, RealTime

FPROP = (formats.E4M3, formats.E4M3)
BACKWARD = (formats.E5M2, formats.E4M3)
"""Formats of the two operands: of the forward product, and of the two backward ones."""
_NAMES = {formats.E4M3: "E4M3", formats.E5M2: "E5M2"}

TOLERANCE = 0.01
"""Largest relative error compared with the FP32 product of the same FP8 values.

Rounding the result to BF16 leaves 0.0017 of it; a wrong scale, layout or format leaves 0.1 and more.
"""

LLAMA_7B = ((4096, 4096), (4096, 11008), (11008, 4096))
"""Input and output features of its attention projections, of gate and up, and of down."""
GPU_TOKENS = 8192

CPU_SHAPES = ((512, 512), (512, 1376))
CPU_TOKENS = 256
"""Small, because a CPU without FP8 units converts each value; its times say nothing about training on a GPU."""


@dataclass(frozen=True)
class Check:
    """One kind of FP8 product, tried on one device."""

    device: str
    formats: str
    error: float | None  # relative, in the Frobenius norm; None where the product did not run
    reason: str | None  # the reason against FP8 on the device; None where it can be used


@dataclass(frozen=True)
class Speed:
    """Median milliseconds of one product, its operands already cast."""

    device: str
    tokens: int
    features_in: int
    features_out: int
    bf16: float
    fp8: float
    fp8_fast: float  # with fast accumulation

    def teraflops(self, milliseconds: float) -> float:
        return 2 * self.tokens * self.features_in * self.features_out / milliseconds / 1e9


def devices() -> list[torch.device]:
    """The CPU and the first GPU of each kind."""
    # from the last, so that the first of each kind is what stays
    kinds = {torch.cuda.get_device_name(index): index for index in reversed(range(torch.cuda.device_count()))}
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in sorted(kinds.values()))]


def check(device: torch.device, operands: tuple[torch.dtype, torch.dtype]) -> Check:
    """Multiply two random matrices in FP8 and compare with the FP32 product of the same FP8 values."""
    names = " x ".join(_NAMES[dtype] for dtype in operands)
    reason = why_no_fp8(device)
    if reason is not None:
        return Check(str(device), names, None, reason)
    rows, depth, columns = 256, 512, 384
    try:
        a = RealTime().cast(INPUT, torch.randn(rows, depth, dtype=torch.float32, device=device), operands[0])
        b = RealTime().cast(INPUT, torch.randn(columns, depth, dtype=torch.float32, device=device), operands[1])
        result = product(a.data, b.data, a.inverse_scale, b.inverse_scale, out_dtype=torch.bfloat16).double()
    except RuntimeError as failure:
        return Check(str(device), names, None, f"the product failed: {str(failure).partition(chr(10))[0]}")
    # in double precision, for TF32 may be on
    exact = a.dequantize(rows, depth).double() @ b.dequantize(columns, depth).double().t()
    error = ((result - exact).norm() / exact.norm()).item()
    wrong = f"its result is {error:.1%} off the FP32 product" if not error <= TOLERANCE else None
    return Check(str(device), names, error, wrong)


def speeds(device: torch.device) -> list[Speed]:
    """Time BF16 and FP8 forward products on shapes of LLaMA-7B, or on small ones on the CPU."""
    shapes, tokens = (LLAMA_7B, GPU_TOKENS) if device.type == "cuda" else (CPU_SHAPES, CPU_TOKENS)
    return [_speed(device, tokens, *shape) for shape in shapes]


def _speed(device: torch.device, tokens: int, features_in: int, features_out: int) -> Speed:
    x = torch.randn(tokens, features_in, device=device, dtype=torch.bfloat16)
    w = torch.randn(features_out, features_in, device=device, dtype=torch.bfloat16)
    a, b = RealTime().cast(INPUT, x, FPROP[0]), RealTime().cast(INPUT, w, FPROP[1])
    fp8 = partial(product, a.data, b.data, a.inverse_scale, b.inverse_scale, out_dtype=torch.bfloat16)
    runs = {"bf16": lambda: x @ w.t(), "fp8": fp8, "fp8_fast": partial(fp8, fast_accumulation=True)}
    timers = {name: Timer("run()", globals={"run": run}) for name, run in runs.items()}
    times = {name: 1e3 * timer.blocked_autorange(min_run_time=0.1).median for name, timer in timers.items()}
    return Speed(str(device), tokens, features_in, features_out, **times)
