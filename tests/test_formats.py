from __future__ import annotations

import pytest
import torch

from fp8booster import formats


@pytest.mark.parametrize(
    ("dtype", "mantissa_bits", "largest_exponent", "largest_mantissa"),
    [(formats.E4M3, 3, 8, 1.75), (formats.E5M2, 2, 15, 1.75)],
)
def test_largest_value_follows_from_the_bits(dtype, mantissa_bits, largest_exponent, largest_mantissa) -> None:
    assert formats.MAX[dtype] == largest_mantissa * 2.0**largest_exponent
    assert torch.finfo(dtype).eps == 2.0**-mantissa_bits
    assert torch.finfo(dtype).bits == 8


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_an_fp8_format_is_accepted(dtype) -> None:
    assert formats.require_format(dtype) is dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fnuz, torch.uint8])
def test_another_dtype_is_no_fp8_format(dtype) -> None:
    with pytest.raises(ValueError, match=r"not an FP8 format; use torch.float8_e4m3fn or torch.float8_e5m2"):
        formats.require_format(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.complex64, torch.float8_e4m3fn])
def test_only_what_can_be_cast_is_high_precision(dtype) -> None:
    with pytest.raises(TypeError, match=r"the gradient is .*; cast it to bfloat16, float16 or float32 first"):
        formats.require_high_precision(torch.zeros(1, dtype=dtype), "the gradient")
    for allowed in formats.HIGH_PRECISION:
        tensor = torch.zeros(1, dtype=allowed)
        assert formats.require_high_precision(tensor, "the gradient") is tensor
