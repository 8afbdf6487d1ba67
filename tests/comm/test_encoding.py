from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm, formats
from fp8booster.comm import Encoding, encoding
from tests.comm.bounds import assert_within, block_amax, rounding_bound
from tests.distributed import ranks


@pytest.mark.parametrize("size", [0, 31, 48, 8192, -256])
def test_a_block_size_that_is_not_allowed_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="power of two from 32 to 4096"):
        Encoding(block_size=size)


def test_a_format_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="float8_e4m3fn"):
        Encoding(format=torch.bfloat16)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("block", [32, 256, 4096, None])
@pytest.mark.parametrize("dtype", formats.FORMATS)
def test_a_round_trip_is_within_half_a_step_and_the_bound_is_no_looser(dtype, block, power_of_two) -> None:
    torch.manual_seed(0)
    encoding = Encoding(format=dtype, block_size=block, power_of_two=power_of_two)
    values = torch.randn(50_000) * torch.exp(4 * torch.randn(50_000))
    layout = encoding.layout(values.numel())
    message = torch.empty(layout.bytes, dtype=torch.uint8)
    encoding.encode(values, message, layout)
    decoded = torch.empty_like(values)
    encoding.decode(message, decoded, layout)
    bound = rounding_bound(values, block_amax(values, [values.numel()], block), encoding)
    assert_within(decoded, values, bound)
    assert ((decoded - values).abs() / bound).max() > 0.95


def gradients() -> list[torch.Tensor]:
    """Parameters whose gradients differ by five orders of magnitude, with heavy tails and rows of their own size."""
    torch.manual_seed(0)
    heavy = torch.distributions.StudentT(3.0)
    parts = []
    for rows, columns, magnitude in ((256, 512, 1e-3), (1, 512, 1e-1), (512, 256, 1e-6), (1, 256, 2e-2)):
        rows_differ = torch.exp(torch.randn(rows, 1)) if rows > 1 else 1.0
        parts.append((heavy.sample((rows, columns)) * magnitude * rows_differ).flatten())
    return parts


def noise_in_decibels(encoding: Encoding) -> float:
    """Signal over noise of the parameter that fares worst."""
    parts = gradients()
    values = torch.cat(parts)
    layout = encoding.layout(values.numel())
    message = torch.empty(layout.bytes, dtype=torch.uint8)
    encoding.encode(values, message, layout)
    decoded = torch.empty_like(values)
    encoding.decode(message, decoded, layout)
    ratios = [
        part.square().sum() / (part - got).square().sum()
        for part, got in zip(parts, decoded.split([part.numel() for part in parts]), strict=True)
    ]
    return 10 * torch.log10(torch.stack(ratios).min()).item()


def test_the_default_keeps_small_gradients_that_one_scale_flushes() -> None:
    default = noise_in_decibels(Encoding())
    assert default > 30
    assert default > noise_in_decibels(Encoding(format=formats.E5M2)) + 4
    assert default > noise_in_decibels(Encoding(block_size=None)) + 12


@ranks(2)
def test_what_is_cast_is_named_by_the_call_that_it_is_for() -> None:
    names: list[str] = []
    encoding.observers.append(lambda name, *_: names.append(name))
    try:
        values, other = torch.ones(4096), 1 - dist.get_rank()
        comm.all_reduce(values)
        for sends in (other == 1, other == 0):
            (comm.isend(values, other) if sends else comm.irecv(values, other)).wait()
            comm.all_gather_into_tensor(torch.empty(8192), values)
    finally:
        encoding.observers.clear()
    reduced, gathered = ["all_reduce", "all_reduce sums"], "all_gather_into_tensor"
    assert names == [*reduced, *(["send", gathered, gathered] if other else [gathered, "send", gathered])]
