from __future__ import annotations

import math
from itertools import product

import pytest
import torch

from fp8booster import formats
from fp8booster.kernels.cast import cast
from fp8booster.kernels.scales import amax_of
from fp8booster.kernels.shard_cast import cast_shards, unpack

SETTINGS = list(product(formats.FORMATS, (False, True)))
COUNTS = (1, 7, 255, 4096, 4097, 70001)
SHAPES = [(16, 16), (1, 1), (17, 5), (64, 48), (33, 130), (257, 96)]


def spread(count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> torch.Tensor:
    """Values over many powers of two, with zeros of both signs among them."""
    values = torch.randn(count) * torch.exp(2 * torch.randn(count))
    values[::5] = 0.0
    values[1::11] = -0.0
    return values.to(dtype).to(device)


def special(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Shards that a cast may get wrong, and the amax to cast them with."""
    values = spread(1001, dtype)
    one_nan = values.clone()
    one_nan[77] = torch.nan
    return {
        "zeros": torch.zeros(1001, dtype=dtype),
        "one nan": one_nan,
        "all nan": torch.full((1001,), torch.nan, dtype=dtype),
        "infinities": torch.tensor([math.inf, -math.inf, 1.0, 0.0], dtype=dtype),
        "tiny": values * 1e-7,
        "largest": torch.full((33,), torch.finfo(dtype).max, dtype=dtype),
    }


def run(implementation, shard, amax, dtype, power_of_two) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((shard.numel(),), 0xAA, dtype=torch.uint8, device=shard.device).view(dtype)
    inverse_scale = torch.full((), -1.0, device=shard.device)
    implementation([shard], amax.view(1), [out], [inverse_scale], power_of_two)
    return out.view(torch.uint8), inverse_scale


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal values, NaN equal to NaN; for FP8 bytes, equal bytes."""
    return torch.equal(one.nan_to_num(nan=-1.0), other.nan_to_num(nan=-1.0)) and torch.equal(one.isnan(), other.isnan())


@pytest.mark.parametrize(("dtype", "power_of_two"), SETTINGS)
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_shards_cast_apart_are_the_cast_of_the_whole(ranks, source, dtype, power_of_two) -> None:
    torch.manual_seed(0)
    for rows, columns in ((16, 16), (48, 32), (112, 80)):
        matrix = spread(rows * columns, source).view(rows, columns)
        expected, _, inverse = cast.reference(
            matrix, dtype, plain=True, transposed=False, power_of_two=power_of_two, amax=None
        )
        padded = torch.nn.functional.pad(matrix.view(-1), (0, -matrix.numel() % ranks))
        parts = [run(cast_shards, shard, amax_of(matrix), dtype, power_of_two) for shard in padded.chunk(ranks)]
        assert torch.equal(
            torch.cat([part for part, _ in parts])[: matrix.numel()], expected.view(torch.uint8).view(-1)
        )
        assert all(torch.equal(scale, inverse) for _, scale in parts)


@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_an_amax_that_is_not_finite_makes_every_shard_nan(dtype) -> None:
    for amax in (math.inf, math.nan):
        out, inverse_scale = run(cast_shards, torch.ones(33), torch.tensor(amax), dtype, False)
        assert out.view(dtype).float().isnan().all()
        assert inverse_scale.isnan()


@pytest.mark.parametrize("dtype", formats.FORMATS)
@pytest.mark.parametrize("target", formats.HIGH_PRECISION)
@pytest.mark.parametrize("shape", SHAPES)
def test_unpacking_transposes_the_bytes_and_rounds_their_values_once(shape, target, dtype) -> None:
    torch.manual_seed(0)
    rows, columns = shape
    matrix = torch.randint(0, 256, shape, dtype=torch.uint8)
    inverse_scale = torch.tensor(0.0123)
    beside, weight = torch.zeros(columns, rows + 6, dtype=torch.uint8), torch.empty(shape, dtype=target)
    for transpose in (torch.empty(columns, rows, dtype=torch.uint8), beside[:, 2 : rows + 2]):
        unpack([matrix.view(dtype)], [inverse_scale], [transpose.view(dtype)], [weight])
        assert torch.equal(transpose, matrix.t())
        assert same(weight, (matrix.view(dtype).float() * inverse_scale).to(target))
    only = torch.empty(shape, dtype=target)
    unpack([matrix.view(dtype)], [inverse_scale], [None], [only])
    assert same(only, weight)
    assert not beside[:, :2].any()
    assert not beside[:, rows + 2 :].any()


def test_values_that_lie_apart_are_refused() -> None:
    every_second, amaxes, inverse_scale = torch.ones(32)[::2], torch.ones(1), torch.empty(())
    out = torch.empty(16, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="contiguous"):
        cast_shards([every_second], amaxes, [out], [inverse_scale])


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "power_of_two"), SETTINGS)
@pytest.mark.parametrize("source", formats.HIGH_PRECISION)
def test_triton_casts_the_bytes_of_the_reference(source, dtype, power_of_two) -> None:
    from fp8booster.kernels.shard_cast_triton import cast_shards_triton

    torch.manual_seed(0)
    shards = special(source) | {str(count): spread(count, source) for count in COUNTS}
    for name, shard in shards.items():
        amaxes = [amax_of(shard), 4 * amax_of(shard), torch.tensor(math.inf), torch.tensor(math.nan)]
        for amax in amaxes:
            expected, inverse = run(cast_shards.reference, shard, amax, dtype, power_of_two)
            found, scale = run(cast_shards_triton, shard.cuda(), amax.cuda(), dtype, power_of_two)
            assert same(found.view(dtype).float().cpu(), expected.view(dtype).float()), (name, amax)
            is_nan = expected.view(dtype).float().isnan()  # a NaN's sign is of no account
            assert torch.equal(found.cpu()[~is_nan], expected[~is_nan]), (name, amax)
            assert same(scale.cpu(), inverse), (name, amax)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", formats.FORMATS)
@pytest.mark.parametrize("target", formats.HIGH_PRECISION)
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 1040)])
def test_triton_unpacks_the_bytes_of_the_reference(shape, target, dtype) -> None:
    from fp8booster.kernels.shard_cast_triton import unpack_triton

    torch.manual_seed(0)
    rows, columns = shape
    matrix = torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)
    for scale in (0.0123, 1.0, 2.0**-20, math.nan):
        results = []
        for implementation, device in ((unpack.reference, "cpu"), (unpack_triton, "cuda")):
            transpose = torch.empty(columns, rows + 32, dtype=dtype, device=device)[:, 16 : rows + 16]
            weight = torch.empty(shape, dtype=target, device=device)
            implementation([matrix.to(device)], [torch.tensor(scale, device=device)], [transpose], [weight])
            results.append((transpose.view(torch.uint8).cpu(), weight.cpu()))
        assert torch.equal(results[0][0], results[1][0])
        assert same(results[0][1], results[1][1])
        only = torch.empty(shape, dtype=target, device="cuda")
        unpack_triton([matrix.cuda()], [torch.tensor(scale, device="cuda")], [None], [only])
        assert same(only.cpu(), results[0][1])
