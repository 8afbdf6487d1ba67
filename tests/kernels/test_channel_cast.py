from __future__ import annotations

import math

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.cast import cast
from fp8booster.kernels.product import product
from fp8booster.kernels.rowwise_cast import channel_cast, column_amax
from tests.kernels.interpreted import interpreted
from tests.kernels.matrices import SHAPES, VIEWS, exact, quantize, same, spread

LAYOUTS = [(True, False), (False, True), (True, True)]


def operands(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> tuple[torch.Tensor, ...]:
    """A matrix, factors of its columns, and the amax of their product."""
    matrix = spread(shape, dtype).to(device)
    factors = torch.exp2(torch.randint(-9, 10, shape[1:], device=device))
    return matrix, factors, (column_amax(matrix) * factors).amax()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
def test_it_is_the_cast_of_the_matrix_times_the_factors(source, power_of_two, device) -> None:
    matrix, factors, amax = operands((130, 70), source, device)
    scaled = matrix.float() * factors
    assert torch.equal(amax, scaled.abs().max())
    expected = cast.reference(scaled, formats.E4M3, transposed=True, power_of_two=power_of_two)
    found = channel_cast(matrix, factors, amax, formats.E4M3, transposed=True, power_of_two=power_of_two)
    assert all(map(same, found, expected))


@pytest.mark.parametrize("dtype", formats.FORMATS)
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
def test_it_is_its_reference(source, dtype, device) -> None:
    for shape in SHAPES:
        for name, view in VIEWS.items():
            matrix = view(spread(shape, source).to(device))
            found = column_amax(matrix)
            assert same(found, column_amax.reference(matrix)), (shape, name)
            factors = torch.exp2(torch.randint(-9, 10, matrix.shape[1:], device=device))
            amax = (found * factors).amax()
            for plain, transposed in LAYOUTS:
                options = {"plain": plain, "transposed": transposed}
                ours = channel_cast(matrix, factors, amax, dtype, **options)
                reference = channel_cast.reference(matrix, factors, amax, dtype, **options)
                assert all(map(same, ours, reference)), (shape, name)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_no_number_stays_so(bad, device) -> None:
    matrix = torch.ones(40, 70, device=device)
    matrix[3, 5] = bad
    amaxes = column_amax(matrix)
    assert amaxes[torch.arange(70, device=device) != 5].eq(1).all()
    *_, inverse_scale = channel_cast(matrix, torch.ones(70, device=device), amaxes.amax(), formats.E4M3)
    assert inverse_scale.isnan()


def differing() -> list[str]:
    from fp8booster.kernels.rowwise_cast_triton import channel_cast_triton, column_amax_triton

    found = []
    for shape in [(1, 1), (1, 300), (300, 1), (33, 130), (70, 300)]:
        for name, view in VIEWS.items():
            matrix = view(exact(shape, 448.0, torch.bfloat16))
            factors = torch.exp2(torch.randint(-1, 1, matrix.shape[1:]))
            amaxes = column_amax_triton(matrix)
            if not same(amaxes, column_amax.reference(matrix)):
                found.append(f"amax {shape} {name}")
            for plain, transposed in LAYOUTS:
                options = {"plain": plain, "transposed": transposed, "power_of_two": True}
                arguments = (matrix, factors, (amaxes * factors).amax(), formats.E4M3)
                ours, reference = (f(*arguments, **options) for f in (channel_cast_triton, channel_cast.reference))
                if not all(map(same, ours, reference)):
                    found.append(f"{shape} {name} {options}")
    return found


def test_the_kernels_interpreted_agree_with_their_references() -> None:
    assert interpreted(differing) == []


def test_a_product_takes_one_scale_for_one_operand_and_one_a_row_for_the_other(device) -> None:
    a, b = (
        quantize(torch.randn(32, 64, device=device), formats.E5M2),
        quantize(torch.randn(48, 64, device=device), formats.E4M3),
    )
    by_row = b.inverse_scale * torch.exp2(torch.arange(48, device=device) % 5)
    exact_product = (a.data.double() @ b.data.double().t()) * a.inverse_scale.double() * by_row.double()
    for emulate in (False, True):
        found = product(a.data, b.data, a.inverse_scale, by_row, out_dtype=torch.bfloat16, emulate=emulate)
        torch.testing.assert_close(found.double(), exact_product, rtol=2.0**-7, atol=2.0**-6)
        found = product(b.data, a.data, by_row, a.inverse_scale, out_dtype=torch.bfloat16, emulate=emulate)
        torch.testing.assert_close(found.double(), exact_product.t(), rtol=2.0**-7, atol=2.0**-6)
