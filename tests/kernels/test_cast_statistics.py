"""What a cast did to a matrix is found as counting each value by itself finds it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.blockwise_cast import scales_of_groups
from fp8booster.kernels.cast import saturate
from fp8booster.kernels.cast_statistics import FIELDS, cast_statistics
from fp8booster.tensor import QuantizedMatrix
from tests.kernels.interpreted import interpreted
from tests.kernels.matrices import SHAPES, VIEWS, quantize, special, spread

SCALES = ("tensor", "row", "group", "block")


def scales_of(made: QuantizedMatrix) -> torch.Tensor:
    """Of the plain layout."""
    scale = made.inverse_scale
    return scales_of_groups(made.data, scale) if scale.dim() == 2 else scale


def whole(parts: torch.Tensor) -> dict[str, float]:
    """The parts of a matrix as one."""
    values = [parts[:, 0].max(), *parts[:, 1:].sum(0)]
    return dict(zip(FIELDS, map(float, values), strict=True))


def counted(matrix: torch.Tensor, made: QuantizedMatrix, limit: float) -> dict[str, float]:
    """The definition, one value after another in Python's own floats."""
    found = dict.fromkeys(FIELDS, 0.0)
    rows, columns = matrix.shape
    ones = torch.ones_like(made.data.float()).to(made.data.dtype)
    inverses = made._replace(data=ones).dequantize(rows, columns).tolist()
    codes = made.data.float()[:rows, :columns].tolist()
    for row, of_row, scales in zip(matrix.float().tolist(), codes, inverses, strict=True):
        for value, code, scale in zip(row, of_row, scales, strict=True):
            if not math.isfinite(value):
                found["non_finite"] += 1
                continue
            found["amax"] = max(found["amax"], abs(value))
            found["nonzero"] += value != 0
            found["flushed"] += value != 0 and code == 0
            found["saturated"] += abs(value) > limit * scale * (1 + 2**-20)
            found["signal"] += value**2
            found["fourth"] += value**4
            found["noise"] += (value - code * scale) ** 2
    return found


def close(one: dict[str, float], other: dict[str, float]) -> bool:
    exact = ("amax", "nonzero", "flushed", "saturated", "non_finite")
    return all(one[name] == other[name] for name in exact) and all(
        math.isclose(one[name], other[name], rel_tol=1e-9, abs_tol=0)
        or (math.isnan(one[name]) and math.isnan(other[name]))
        for name in ("signal", "noise", "fourth")
    )


@pytest.mark.parametrize("scale_for", SCALES)
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_statistics_are_those_counted_one_by_one(dtype, scale_for, device) -> None:
    for source, (name, view) in ((torch.bfloat16, each) for each in VIEWS.items()):
        values = spread((33, 130), source)
        values[0, 3:5] = torch.tensor([1e-20, 1000.0])
        matrix = view(values).to(device)
        made = quantize(matrix, dtype, scale_for=scale_for)
        found = whole(cast_statistics(matrix, made.data, scales_of(made)))
        expected = counted(matrix, made, formats.MAX[dtype])
        assert close(found, expected), name
        assert found["flushed"] > 0
        assert found["saturated"] == 0


def test_a_cast_with_too_large_a_scale_saturates(device) -> None:
    matrix = torch.tensor([[1.0, -2.0, 3.0, 0.0]], device=device)
    inverse = torch.tensor(1.0 / 448, device=device)
    data = saturate(matrix * 448, formats.E4M3)
    found = whole(cast_statistics(matrix, data, inverse))
    assert found["saturated"] == 2
    assert found["noise"] == pytest.approx(1 + 4, rel=1e-6)


def test_what_is_not_finite_is_counted_and_left_out(device) -> None:
    matrix = torch.tensor([[1.0, math.nan, -math.inf, 2.0]], device=device)
    made = quantize(matrix, formats.E4M3)
    found = whole(cast_statistics(matrix, made.data, scales_of(made)))
    assert (found["amax"], found["nonzero"], found["non_finite"], found["signal"]) == (2.0, 2, 2, 5.0)
    assert math.isnan(found["noise"])


def test_a_transpose_tells_the_same(device) -> None:
    matrix = spread((33, 130), torch.bfloat16).to(device)
    made = quantize(matrix, formats.E5M2, transposed=True)
    plain = whole(cast_statistics(matrix, made.data, scales_of(made)))
    assert close(whole(cast_statistics(matrix, made.transpose.t(), made.inverse_scale)), plain)


@pytest.mark.parametrize("scale_for", SCALES)
def test_many_rows_are_the_sum_of_their_chunks(scale_for, device) -> None:
    """Each with the scales of its own rows."""
    matrix = spread((400, 3001), torch.bfloat16).to(device)
    matrix[350:] *= 2.0**-6
    made = quantize(matrix, formats.E4M3, scale_for=scale_for)
    found = whole(cast_statistics(matrix, made.data, scales_of(made)))
    exact, decoded = matrix.double(), made.dequantize(400, 3001).double()
    assert found["amax"] == float(exact.abs().max())
    assert found["nonzero"] == int((matrix != 0).sum())
    assert found["flushed"] == int(((matrix != 0) & (decoded == 0)).sum())
    assert found["saturated"] == 0
    assert found["signal"] == pytest.approx(float(exact.square().sum()), rel=1e-12)
    assert found["noise"] == pytest.approx(float((exact - decoded).square().sum()), rel=1e-5)


def test_an_empty_matrix_has_none() -> None:
    empty = torch.empty(0, 16)
    assert not any(whole(cast_statistics(empty, torch.empty(0, 16).to(formats.E4M3), torch.tensor(1.0))).values())


def interpreted_differ() -> Iterator[str]:
    from fp8booster.kernels.cast_statistics_triton import cast_statistics_triton

    cases = [(f"{shape}", spread(shape, torch.float32)) for shape in SHAPES]
    cases += [(name, view(spread((33, 130), torch.float16))) for name, view in VIEWS.items()]
    cases += list(special(torch.float32))
    for (index, (name, matrix)), dtype in product(enumerate(cases), formats.FORMATS):
        # the kinds of scales differ in where a scale is read, the formats in what is rounded: two kinds with each
        for scale_for in SCALES[(index + formats.FORMATS.index(dtype)) % 2 :: 2]:
            made = quantize(matrix, dtype, scale_for=scale_for)
            arguments = matrix, made.data, scales_of(made)
            ours, expected = whole(cast_statistics_triton(*arguments)), whole(cast_statistics.reference(*arguments))
            if not close(ours, expected):
                yield f"{name} {dtype} {scale_for}: {ours} {expected}"


def differing() -> list[str]:
    return list(interpreted_differ())


def test_the_kernel_finds_what_its_definition_finds() -> None:
    assert interpreted(differing) == []
