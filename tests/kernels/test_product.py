from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fp8booster import formats
from fp8booster.kernels.product import _cpu_multiplies_by_rows, product

E4M3, E5M2 = formats.E4M3, formats.E5M2


def whole_numbers(*shape: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Small whole numbers: every format and every accumulator holds them and their sums exactly."""
    return torch.randint(-3, 4, shape, device=device).float().to(dtype)


def scalar(value: float, device: torch.device) -> torch.Tensor:
    return torch.tensor(value, device=device)


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("fast_accumulation", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("out_dtype", formats.HIGH_PRECISION)
@pytest.mark.parametrize("pair", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["e4m3", "e5m2xe4m3", "e4m3xe5m2"])
def test_whole_numbers_multiply_exactly(pair, out_dtype, with_bias, fast_accumulation, emulate, device) -> None:
    a = whole_numbers(32, 64, dtype=pair[0], device=device)
    b = whole_numbers(48, 64, dtype=pair[1], device=device)
    bias = torch.arange(48, device=device).to(out_dtype) if with_bias else None
    result = product(
        a,
        b,
        scalar(0.5, device),
        scalar(0.25, device),
        out_dtype=out_dtype,
        bias=bias,
        fast_accumulation=fast_accumulation,
        emulate=emulate,
    )
    exact = a.double() @ b.double().t() / 8 + (0 if bias is None else bias.double())
    assert result.dtype is out_dtype
    assert torch.equal(result, exact.to(out_dtype))


@pytest.mark.parametrize("out_dtype", formats.HIGH_PRECISION)
def test_emulation_gives_what_the_product_gives(out_dtype, device) -> None:
    a = torch.randn(64, 256, device=device).mul(50).to(E4M3)
    b = torch.randn(32, 256, device=device).mul(50).to(E4M3)
    scales = scalar(0.013, device), scalar(0.0007, device)
    real = product(a, b, *scales, out_dtype=out_dtype)
    emulated = product(a, b, *scales, out_dtype=out_dtype, emulate=True)
    # beside the output's rounding, what a Hopper GPU drops in its accumulator of about 14 bits
    summands = (a.double().abs() @ b.double().abs().t()) * scales[0] * scales[1]
    lost = summands.max().item() * (2.0**-13 if device.type == "cuda" else 2.0**-22)
    torch.testing.assert_close(emulated, real, rtol=torch.finfo(out_dtype).eps, atol=lost)


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("autocast_dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_no_product(autocast_dtype, emulate, device) -> None:
    a = torch.randn(32, 512, device=device).mul(50).to(E4M3)
    scales = scalar(0.013, device), scalar(0.0007, device)
    for out_dtype in formats.HIGH_PRECISION:
        expected = product(a, a, *scales, out_dtype=out_dtype, emulate=emulate)
        with torch.autocast(device.type, autocast_dtype):
            result = product(a, a, *scales, out_dtype=out_dtype, emulate=emulate)
        assert torch.equal(result, expected)


@pytest.mark.parametrize("rowwise", [False, True])
def test_a_scale_may_lie_anywhere(rowwise, device) -> None:
    a = whole_numbers(32, 64, dtype=E4M3, device=device)
    b = whole_numbers(48, 64, dtype=E4M3, device=device)
    sizes = (32, 48) if rowwise else ((), ())
    exact = (a.float() @ b.float().t() / 8).bfloat16()
    for offset in range(1, 5):
        packed = torch.full((offset + 48,), torch.nan, device=device)
        scales = []
        for size, value in zip(sizes, (0.5, 0.25), strict=True):
            scales.append(packed.clone()[offset:][:size] if rowwise else packed.clone()[offset])
            scales[-1].fill_(value)
        assert torch.equal(product(a, b, *scales, out_dtype=torch.bfloat16), exact)


def test_a_nan_scale_makes_the_product_nan(device) -> None:
    ones = torch.ones(16, 16, device=device).to(E4M3)
    for emulate in (False, True):
        result = product(
            ones, ones, scalar(float("nan"), device), scalar(1.0, device), out_dtype=torch.bfloat16, emulate=emulate
        )
        assert result.isnan().all()


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("format", formats.FORMATS)
@pytest.mark.parametrize("rowwise", [False, True])
@pytest.mark.parametrize("huge", ["a", "b"])
def test_operands_next_to_the_largest_float32_give_a_finite_product(huge, rowwise, format, emulate) -> None:
    """2**127 * 1.99 rounds up to 2**128 in FP8 under a power of two; decoded by itself that is infinite."""
    top = 256.0 if format is E4M3 else 32768.0
    a = torch.full((16, 32), top).to(format)
    b = torch.full((48, 32), 1.0).to(E4M3)
    scales = torch.tensor(2.0**128 / top), torch.tensor(2.0**-100)
    if rowwise:
        scales = scales[0].expand(16).clone(), scales[1].expand(48).clone()
    if huge == "b":
        a, b, scales = b, a, scales[::-1]
    result = product(a, b, *scales, out_dtype=torch.bfloat16, emulate=emulate)
    assert (result == 32 * 2.0**28).all()


def test_two_large_operands_overflow_where_their_product_does() -> None:
    a, b = torch.ones(16, 16).to(E4M3), torch.ones(16, 16).to(E4M3)
    large = torch.tensor(2.0**119)
    assert product(a, b, large, large, out_dtype=torch.bfloat16).isinf().all()


def test_a_bias_brings_back_what_fp16_alone_would_not_hold(device) -> None:
    """Rowwise products of a GPU are BF16; rounded to FP16 before the bias they would be infinite."""
    a, b = torch.ones(16, 32, device=device).to(E4M3), torch.ones(16, 32, device=device).to(E4M3)
    scales = torch.full((16,), 2048.0, device=device), torch.full((16,), 1.0, device=device)
    bias = torch.full((16,), -32768.0, device=device, dtype=torch.float16)
    result = product(a, b, *scales, out_dtype=torch.float16, bias=bias)
    assert (result == 32768.0).all()


@pytest.mark.parametrize("by_rows", [False, True])
def test_onednn_multiplies_nothing(by_rows, monkeypatch) -> None:
    """It is slow where the CPU has no instructions for FP8, and refuses several scales."""
    seen = []

    def watched(*operands, **options):
        seen.append(torch.backends.mkldnn.enabled)
        return multiply(*operands, **options)

    multiply = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", watched)
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", True)
    ones = torch.ones(16, 64).to(E4M3)
    scale = torch.full((16,) if by_rows else (), 0.5)
    made = product(ones, ones, scale, scale, out_dtype=torch.bfloat16)
    assert torch.equal(made, torch.full_like(made, 16.0))
    assert seen == [False]
    assert torch.backends.mkldnn.enabled


@pytest.fixture
def cpu_of_torch_2_11(monkeypatch) -> Iterator[None]:
    """PyTorch's kernel for the CPU takes one scale for each operand."""

    def multiply(a, b, *, scale_a, scale_b, **options):
        if not scale_a.numel() == scale_b.numel() == 1:
            raise RuntimeError("Now _scaled_mm only supports per-tensor scaling for CPU backend.")
        return original(a, b, scale_a=scale_a, scale_b=scale_b, **options)

    original = torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    _cpu_multiplies_by_rows.cache_clear()
    yield
    _cpu_multiplies_by_rows.cache_clear()


@pytest.mark.usefixtures("cpu_of_torch_2_11")
@pytest.mark.parametrize("out_dtype", formats.HIGH_PRECISION)
def test_rows_have_their_scales_where_the_cpu_s_kernel_has_one(out_dtype) -> None:
    cpu = torch.device("cpu")
    a, b = whole_numbers(32, 64, dtype=E4M3, device=cpu), whole_numbers(48, 64, dtype=E4M3, device=cpu)
    rows, columns = 2.0 ** torch.arange(-2, 2).repeat(8), 2.0 ** torch.arange(-1, 2).repeat(16)
    exact = a.double() @ b.double().t() * rows[:, None] * columns
    assert torch.equal(product(a, b, rows, columns, out_dtype=out_dtype), exact.to(out_dtype))


def test_who_counts_products_sees_none_that_only_asks() -> None:
    _cpu_multiplies_by_rows.cache_clear()
    with FlopCounterMode(display=False) as counted:
        assert _cpu_multiplies_by_rows()
    assert counted.get_total_flops() == 0
