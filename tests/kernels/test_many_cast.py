from __future__ import annotations

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.cast import cast
from fp8booster.kernels.many_cast import ManyCast
from tests.kernels.matrices import same, special, spread

SHAPES = [(16, 16), (64, 128), (80, 144), (16, 1024), (1024, 16), (192, 336)]


def many_cast(matrices: list[torch.Tensor], dtype: torch.dtype, power_of_two: bool = False) -> ManyCast:
    """A cast into buffers filled with what no cast writes."""

    def filled(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full(shape, 0x55, dtype=torch.uint8, device=matrices[0].device).view(dtype)

    return ManyCast(
        matrices,
        [filled(tuple(matrix.shape)) for matrix in matrices],
        [filled(tuple(matrix.shape[::-1])) for matrix in matrices],
        torch.full((len(matrices),), -1.0, device=matrices[0].device),
        power_of_two,
    )


def differing(casts: ManyCast) -> list[int]:
    """The matrices whose outputs are not those of a cast of their own."""
    return [
        index
        for index, (matrix, plain, transpose) in enumerate(
            zip(casts.matrices, casts.plains, casts.transposes, strict=True)
        )
        if not all(
            same(one, other)
            for one, other in zip(
                (plain, transpose, casts.inverse_scales[index]),
                cast(matrix, plain.dtype, transposed=True, power_of_two=casts.power_of_two),
                strict=True,
            )
        )
    ]


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_each_matrix_is_cast_as_if_alone(dtype, source, power_of_two, device) -> None:
    matrices = [(10.0**index * spread(shape, source)).to(source) for index, shape in enumerate(SHAPES)]
    matrices += [torch.nn.functional.pad(matrix, (0, 14, 0, 15))[:48, :64] for _, matrix in special(source)]
    matrices = [matrix.contiguous().to(device) for matrix in matrices]
    casts = many_cast(matrices, dtype, power_of_two)
    for _ in range(50 if device.type == "cuda" else 2):
        casts.run()
        assert differing(casts) == []
    for matrix in matrices:
        matrix.mul_(0.5)[0, 0] = 3.0
    casts.run()  # into the same memory
    assert differing(casts) == []


@pytest.mark.gpu
def test_a_captured_cast_follows_its_matrices() -> None:
    matrices = [spread(shape, torch.bfloat16).cuda() for shape in SHAPES]
    casts = many_cast(matrices, formats.E4M3)
    casts.run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        casts.run()
    for factor in (0.25, 3.0):
        for matrix in matrices:
            matrix.mul_(factor)
        graph.replay()
        assert differing(casts) == []


def inputs(**changes: object) -> dict[str, object]:
    whole = {
        "matrices": [torch.zeros(32, 16), torch.zeros(16, 48)],
        "plains": [torch.empty(32, 16, dtype=formats.E4M3), torch.empty(16, 48, dtype=formats.E4M3)],
        "transposes": [torch.empty(16, 32, dtype=formats.E4M3), torch.empty(48, 16, dtype=formats.E4M3)],
        "inverse_scales": torch.empty(2),
    }
    return whole | changes


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"matrices": [torch.zeros(32, 16)]}, ValueError, "1 matrices, 2 plain outputs"),
        ({"inverse_scales": torch.empty(2).double()}, TypeError, "inverse scales are torch.float64"),
        ({"matrices": [torch.zeros(32, 16), torch.zeros(16, 40)]}, ValueError, r"matrix 1 has shape \(16, 40\)"),
        ({"matrices": [torch.zeros(32, 16), torch.zeros(16, 48).half()]}, TypeError, "matrix 1 is torch.float16"),
        ({"matrices": [torch.zeros(32, 16).int(), torch.zeros(16, 48)]}, TypeError, "torch.int32; cast it"),
        ({"matrices": [torch.zeros(16, 32).t(), torch.zeros(16, 48)]}, ValueError, "matrix 0 must be contiguous"),
        (
            {"matrices": [torch.zeros(513)[1:].view(32, 16), torch.zeros(16, 48)]},
            ValueError,
            "matrix 0 must be contiguous and begin at a multiple of 16",
        ),
        (
            {"plains": [torch.empty(16, 32, dtype=formats.E4M3), torch.empty(16, 48, dtype=formats.E4M3)]},
            ValueError,
            r"plain output 0 has shape \(16, 32\)",
        ),
        (
            {"transposes": [torch.empty(16, 32, dtype=formats.E4M3), torch.empty(48, 16, dtype=formats.E5M2)]},
            TypeError,
            "transpose 1 is torch.float8_e5m2",
        ),
        ({"inverse_scales": torch.empty(2, device="meta")}, ValueError, "matrix 0 is on cpu"),
    ],
)
def test_what_does_not_fit_is_named(changes, error, message) -> None:
    with pytest.raises(error, match=message):
        ManyCast(**inputs(**changes))
