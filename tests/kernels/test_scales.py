from __future__ import annotations

import math
import struct

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.scales import MAX_SCALE, amax_of, amaxes_of, scale_of

SMALLEST_SUBNORMAL = 2.0**-149
SMALLEST_NORMAL = 2.0**-126
LARGEST = torch.finfo(torch.float32).max


def to_float32(value: float) -> float:
    """Round a Python float, which has double precision, to the nearest float32."""
    return struct.unpack("f", struct.pack("f", value))[0]


def spread_amaxes(device: torch.device) -> torch.Tensor:
    """Magnitudes over the whole range of float32, and the edges."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    mantissas = 1 + torch.rand(exponents.shape, dtype=torch.float64)
    edges = torch.tensor([SMALLEST_SUBNORMAL, SMALLEST_NORMAL, LARGEST, 448.0, 57344.0, 448 / MAX_SCALE])
    amax = torch.cat([(mantissas * 2.0**exponents).float(), edges])
    return amax.clamp(SMALLEST_SUBNORMAL, LARGEST).to(device)


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_scale_is_the_double_precision_quotient_rounded_once(dtype, device) -> None:
    amax = spread_amaxes(device)
    scale, inverse = scale_of(amax, dtype)
    for a, s, i in zip(amax.tolist(), scale.tolist(), inverse.tolist(), strict=True):
        assert s == to_float32(min(formats.MAX[dtype] / a, MAX_SCALE))
        assert i == to_float32(1.0 / s)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_scales_and_their_inverses_are_normal_numbers(dtype, power_of_two, device) -> None:
    for factor in scale_of(spread_amaxes(device), dtype, power_of_two):
        assert torch.isfinite(factor).all()
        assert (factor >= SMALLEST_NORMAL).all()


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_power_of_two_scale_is_exact_and_at_most_one_bit_smaller(dtype, device) -> None:
    amax = spread_amaxes(device)
    exact, _ = scale_of(amax, dtype)
    scale, inverse = scale_of(amax, dtype, power_of_two=True)
    assert {math.frexp(s)[0] for s in scale.tolist()} == {0.5}
    assert torch.equal(scale * inverse, torch.ones_like(scale))
    assert (scale <= exact).all()
    assert (exact < 2 * scale).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_zero_amax_gives_one(dtype, power_of_two, device) -> None:
    for zero in (0.0, -0.0):
        scale, inverse = scale_of(torch.tensor(zero, device=device), dtype, power_of_two)
        assert (scale.item(), inverse.item()) == (1.0, 1.0)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_infinite_or_nan_amax_gives_nan_to_its_group_alone(bad, power_of_two, device) -> None:
    amax = torch.tensor([1.0, bad, 7.0], device=device)
    for factor in scale_of(amax, formats.E4M3, power_of_two):
        assert factor.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", formats.HIGH_PRECISION)
def test_amax_is_the_largest_magnitude_in_float32(dtype, device) -> None:
    tensor = torch.randn(37, 5, device=device).to(dtype)
    tensor[3, 1] = -9.0
    amax = amax_of(tensor.t())
    assert amax.dtype is torch.float32
    assert amax.shape == ()
    assert amax.item() == 9.0
    assert amax_of(tensor.abs()) == amax


@pytest.mark.parametrize("shape", [(0,), (0, 16), (3, 0, 2)])
def test_amax_of_nothing_is_zero(shape, device) -> None:
    assert amax_of(torch.empty(shape, device=device)).item() == 0.0


@pytest.mark.parametrize(
    ("value", "expected"),
    [(math.inf, math.inf), (-math.inf, math.inf), (math.nan, math.nan), (-(2.0**-149), 2.0**-149)],
)
@pytest.mark.parametrize("position", [0, 37, 1000])
def test_amax_sees_one_special_value(value, expected, position, device) -> None:
    tensor = torch.zeros(1001, device=device)
    tensor[position] = value
    torch.testing.assert_close(amax_of(tensor).item(), expected, rtol=0, atol=0, equal_nan=True)


def test_nan_wins_over_infinity(device) -> None:
    assert amax_of(torch.tensor([math.inf, math.nan, -math.inf], device=device)).isnan()


# two compilations, for each takes seconds: a format is a constant of the division, before powers of two are found
@pytest.mark.parametrize(("dtype", "power_of_two"), [(formats.E4M3, True), (formats.E5M2, False)])
def test_compiled_scales_have_the_bits_of_eager_ones(dtype, power_of_two, device) -> None:
    special = torch.tensor([0.0, math.inf, math.nan], device=device)
    amax = torch.cat([spread_amaxes(device), torch.rand(4096, device=device) * 1e-3, special])
    compiled = torch.compile(scale_of, fullgraph=True)
    for eager, other in zip(scale_of(amax, dtype, power_of_two), compiled(amax, dtype, power_of_two), strict=True):
        assert torch.equal(eager.nan_to_num(-1.0), other.nan_to_num(-1.0))


def test_the_amaxes_of_many_are_those_of_each() -> None:
    tensors = [torch.randn(7), torch.zeros(0), torch.tensor([1.0, torch.nan]), torch.tensor([-torch.inf, 2.0])]
    for one, tensor in zip(amaxes_of(tensors), tensors, strict=True):
        assert one.dtype is torch.float32
        assert torch.equal(one.nan_to_num(nan=-1.0), amax_of(tensor).nan_to_num(nan=-1.0))
    assert amaxes_of([]) == []
