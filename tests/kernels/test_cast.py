from __future__ import annotations

import math

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.cast import cast, saturate
from fp8booster.kernels.scales import amax_of, scale_of

MANTISSA_BITS = {formats.E4M3: 3, formats.E5M2: 2}
SMALLEST_EXPONENT = {formats.E4M3: -6, formats.E5M2: -14}
SHAPES = [(16, 16), (1, 1), (17, 5), (64, 48), (33, 130), (257, 96)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({1: torch.uint8, 4: torch.int32}[tensor.element_size()])


def round_to_format(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to the nearest value of an FP8 format, ties to even, saturating: in double precision, by its definition."""
    values = values.double()
    exponent = torch.frexp(values).exponent - 1
    # ldexp is exact everywhere; CUDA's power is not
    step = torch.ldexp(torch.ones_like(values), exponent.clamp(min=SMALLEST_EXPONENT[dtype]) - MANTISSA_BITS[dtype])
    return (torch.round(values / step) * step).clamp(-formats.MAX[dtype], formats.MAX[dtype])


@pytest.mark.parametrize("size", range(40))
def test_aligned_is_the_next_multiple_of_sixteen(size) -> None:
    assert aligned(size) == next(n for n in range(size, size + 16) if n % 16 == 0)


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_every_representable_value_survives(dtype, device) -> None:
    codes = torch.arange(256, dtype=torch.uint8, device=device)
    values = codes.view(dtype).float()
    finite = values.isfinite()
    assert torch.equal(bits(saturate(values[finite], dtype)), codes[finite])


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_values_round_to_nearest_even_and_saturate(dtype, device) -> None:
    magnitudes = torch.cat(
        [2.0 ** torch.linspace(-20, 17, 4001), torch.arange(0, 512, dtype=torch.float32) / 64, torch.tensor([1e30])]
    )
    values = torch.cat([magnitudes, -magnitudes]).to(device)
    assert torch.equal(saturate(values, dtype).double(), round_to_format(values, dtype))


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_what_overflows_saturates_and_nan_stays(dtype, device) -> None:
    largest = formats.MAX[dtype]
    values = torch.tensor([1.2 * largest, -1e38, math.inf, -math.inf, math.nan], device=device)
    rounded = saturate(values, dtype).float().tolist()
    assert rounded[:4] == [largest, -largest, largest, -largest]
    assert math.isnan(rounded[4])


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
@pytest.mark.parametrize("dtype", formats.FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_cast_is_scale_then_round_then_pad(shape, dtype, source, power_of_two, device) -> None:
    matrix = (torch.randn(shape, device=device) * 3e-3).to(source)
    data, transpose, inverse = cast(matrix, dtype, transposed=True, power_of_two=power_of_two)
    scale, expected_inverse = scale_of(matrix.abs().max().float(), dtype, power_of_two)
    rows, columns = shape
    assert data.dtype is transpose.dtype is dtype
    assert data.shape == (aligned(rows), aligned(columns))
    assert data.is_contiguous()
    assert transpose.is_contiguous()
    assert torch.equal(inverse, expected_inverse)
    assert torch.equal(data[:rows, :columns].double(), round_to_format(matrix.float() * scale, dtype))
    assert torch.equal(bits(transpose), bits(data).t())
    outside = bits(data).clone()
    outside[:rows, :columns] = 0
    assert not outside.any()


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_the_layouts_asked_for_are_the_same_bytes(dtype, device) -> None:
    matrix = torch.randn(40, 24, device=device)
    data, transpose, inverse = cast(matrix, dtype, transposed=True)
    only_data, nothing, _ = cast(matrix, dtype)
    nothing_either, only_transpose, other_inverse = cast(matrix, dtype, plain=False, transposed=True)
    assert nothing.numel() == nothing_either.numel() == 0
    assert torch.equal(bits(only_data), bits(data))
    assert torch.equal(bits(only_transpose), bits(transpose))
    assert torch.equal(other_inverse, inverse)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[:, ::2],
        lambda t: t[::3],
        lambda t: t[1:2].expand(30, -1),
        lambda t: t[:1, :1].expand(18, 33),
        lambda t: t[:, :1].expand(-1, 20),
        lambda t: t[5:, 3:],
    ],
    ids=["transposed", "columns", "rows", "expanded rows", "expanded scalar", "expanded columns", "offset"],
)
def test_strides_do_not_matter(view, device) -> None:
    matrix = view(torch.randn(48, 40, device=device, dtype=torch.bfloat16))
    for one, other in zip(
        cast(matrix, formats.E4M3, transposed=True),
        cast(matrix.contiguous(), formats.E4M3, transposed=True),
        strict=True,
    ):
        assert torch.equal(bits(one), bits(other))


def test_a_given_amax_is_used_and_the_rest_saturates(device) -> None:
    matrix = torch.tensor([[0.5, -1.0, 3.0, -100.0]], device=device)
    partials = torch.tensor([0.25, 1.0], device=device)
    data, _, inverse = cast(matrix, formats.E4M3, amax=partials)
    assert (data.float() * inverse)[0, :4].tolist() == [0.5, -1.0, 1.0, -1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_one_bad_value_makes_the_whole_tensor_nan(dtype, bad, device) -> None:
    matrix = torch.ones(20, 20, device=device, dtype=torch.bfloat16)
    matrix[7, 11] = bad
    data, transpose, inverse = cast(matrix, dtype, transposed=True)
    assert inverse.isnan()
    assert data.float()[:20, :20].isnan().all()
    assert transpose.float()[:20, :20].isnan().all()


def test_zeros_stay_zeros_with_scale_one(device) -> None:
    data, transpose, inverse = cast(torch.zeros(3, 5, device=device), formats.E4M3, transposed=True)
    assert not bits(data).any()
    assert not bits(transpose).any()
    assert inverse.item() == 1.0


@pytest.mark.parametrize("exponent", [-149, -140, -130, -126, -100, 100, 127])
def test_the_largest_value_comes_back_whatever_its_magnitude(exponent, device) -> None:
    matrix = torch.full((2, 2), 2.0**exponent, device=device)
    data, _, inverse = cast(matrix, formats.E4M3)
    recovered = (data[:2, :2].double() * inverse.double()).cpu()
    if exponent < -136:  # scaled by the cap of 2**126 it lies under half of the format's smallest value
        assert not recovered.any()
    else:
        torch.testing.assert_close(recovered, matrix.double().cpu(), rtol=2.0**-20, atol=0)


# two compilations, for each takes seconds: whether a scale is a power of two is decided behind the matrix's dtype
@pytest.mark.parametrize(("source", "power_of_two"), [(torch.bfloat16, False), (torch.float32, True)])
def test_the_reference_compiled_has_the_bits_of_eager(source, power_of_two, device) -> None:
    matrix = torch.randn(50, 70, device=device).mul(1e-2).to(source)
    options = {"plain": True, "transposed": True, "power_of_two": power_of_two, "amax": None}
    compiled = torch.compile(cast.reference, fullgraph=True)
    for eager, other in zip(
        cast.reference(matrix, formats.E5M2, **options), compiled(matrix, formats.E5M2, **options), strict=True
    ):
        assert torch.equal(bits(eager), bits(other))


@pytest.mark.parametrize("plain", [True, False])
def test_the_operator_tells_compilers_what_it_gives(plain, device) -> None:
    matrix = torch.randn(20, 33, device=device)
    arguments = (matrix, formats.E4M3, plain, True, False, None)
    checks = torch.library.opcheck(
        torch.ops.fp8booster.cast, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )
    assert set(checks.values()) == {"SUCCESS"}


def test_cast_equals_its_reference_byte_for_byte(device) -> None:
    for shape in SHAPES:
        matrix = torch.randn(shape, device=device, dtype=torch.bfloat16)
        for dtype in formats.FORMATS:
            ours = cast(matrix, dtype, transposed=True)
            reference = cast.reference(matrix, dtype, plain=True, transposed=True, power_of_two=False, amax=None)
            for one, other in zip(ours, reference, strict=True):
                assert torch.equal(bits(one), bits(other))


def test_the_amax_of_the_cast_is_the_largest_of_many_tiles(device) -> None:
    matrix = torch.randn(300, 5000, device=device)
    matrix[299, 4999] = -50.0
    _, _, inverse = cast(matrix, formats.E4M3)
    assert torch.equal(inverse, scale_of(amax_of(matrix), formats.E4M3)[1])
    assert inverse.item() == pytest.approx(50.0 / 448.0)
