"""Adam with 8-bit moments: codes within their bounds, masters exact, blocks that are skipped, kernels byte for byte."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch

from fp8booster.kernels.adam_step import AdamRates
from fp8booster.kernels.adamw_8bit import (
    decode_first,
    decode_second,
    encode_first,
    encode_second,
    master_of,
    split,
    step_rows,
    update_8bit,
)
from fp8booster.kernels.moments import BLOCK, MOST_OCTAVES, Moments8bit
from tests.kernels.interpreted import interpreted

RATES = AdamRates(1e-2, (0.9, 0.95), 1e-8, 0.1, decoupled=True)
COUNTS = (1, 7, 256, 1000, 4097)


def seed(number: int) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.int32)


def test_a_weight_and_its_low_bits_are_its_master(device) -> None:
    masters = torch.cat(
        [
            torch.randn(10000),
            torch.randint(-(2**31), 2**31 - 1, (10000,), dtype=torch.int64).to(torch.int32).view(torch.float32),
            torch.tensor([0.0, -0.0, math.inf, -math.inf, 2.0**-149, 3.4028235e38]),
            torch.arange(0x3F800000, 0x3F830000, 0x4000, dtype=torch.int32).view(torch.float32),  # ties among them
        ]
    ).to(device)
    masters = masters[~masters.isnan()]
    weight, low = split(masters)
    assert weight.dtype is torch.bfloat16
    assert low.dtype is torch.int16
    assert torch.equal(master_of(weight, low).view(torch.int32), masters.view(torch.int32))
    finite = masters.isfinite() & weight.isfinite()
    assert ((weight.float() - masters)[finite].abs() <= (masters[finite].abs() * 2.0**-8).clamp(min=2.0**-134)).all()


def test_a_masters_nan_stays_one(device) -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1], dtype=torch.int32, device=device)
    weight, low = split(bits.view(torch.float32))
    assert weight.isnan().all()
    assert master_of(weight, low).isnan().all()


def test_first_moments_err_by_half_a_code(device) -> None:
    m = torch.randn(8, BLOCK, device=device) * torch.exp(3 * torch.randn(8, BLOCK, device=device))
    m[1] = 0
    code, amaxes = encode_first(m)
    found = decode_first(code.flatten(), amaxes)
    roots = (m.abs() / amaxes.clamp(min=1e-38)[:, None]).sqrt()
    error = (found.sign() * (found.abs() / amaxes.clamp(min=1e-38)[:, None]).sqrt() - m.sign() * roots).abs()
    assert error.max() <= 0.5001 / 127
    assert (found[1] == 0).all()
    largest = m.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), m.gather(1, largest))


@pytest.mark.parametrize("octaves", [0, 3, 12, 60])
def test_second_moments_err_by_a_part_of_their_range(octaves, device) -> None:
    v = torch.exp2(octaves * torch.rand(16, BLOCK, device=device) - octaves) * 1e-3
    v[:, ::7] = 0
    code, ranges = encode_second(v, None)
    found = decode_second(code.flatten(), ranges)
    assert torch.equal(found == 0, v == 0)
    counts = v > torch.exp2(v.amax(1).log2() - MOST_OCTAVES + 1)[:, None]
    # half a step of bits, a unit of which is at most 2^-23 of the value
    bound = 0.5 * ranges[:, 1:].float() * 2.0**-23 + 1e-6
    assert (((found - v).abs() / v)[counts] <= bound.expand_as(v)[counts]).all()
    below = (v > 0) & (v < torch.exp2(v.amax(1).log2() - MOST_OCTAVES - 1)[:, None])
    assert below.any() == (octaves == 60)
    assert (found >= v)[below].all()  # too small for the range: they count as its least


def test_a_second_moment_that_decays_by_less_than_a_code_decays(device) -> None:
    """With beta2 = 0.999 and gradients of 0; rounded to nearest it would stay."""
    v = torch.exp2(6 * torch.rand(64, BLOCK, device=device))
    moved = v.clone()
    for step in range(1000):
        moved = decode_second(encode_second(moved * 0.999, seed(step * 7919).to(device))[0].flatten(), ranges_of(moved))
        if step == 0:
            stuck = decode_second(encode_second(v * 0.999, None)[0].flatten(), encode_second(v * 0.999, None)[1])
            assert (stuck > v * 0.9995).float().mean() > 0.4
    ratio = (moved / (v * 0.999**1000)).mean().item()
    assert ratio == pytest.approx(1, rel=0.02)


def ranges_of(v: torch.Tensor) -> torch.Tensor:
    return encode_second(v * 0.999, None)[1]


def tensors(count: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple:
    """(weight, low bits, moments) of so many values."""
    master = torch.randn(count)
    weight, low = split(master) if dtype is torch.bfloat16 else (master, None)
    low = None if low is None else low.to(device)
    return weight.to(device), low, Moments8bit.zeros(count, torch.device(device))


def copied(weight: torch.Tensor, low: torch.Tensor | None, moments: Moments8bit) -> tuple:
    return weight.clone(), None if low is None else low.clone(), Moments8bit(*(each.clone() for each in moments))


def flat(weight: torch.Tensor, low: torch.Tensor | None, moments: Moments8bit) -> list[torch.Tensor]:
    return [each for each in (weight, low, *moments) if each is not None]


def gradients(count: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Of six steps; the fourth has values that are not finite."""
    for step in range(1, 7):
        gradient = torch.randn(count) * torch.exp(3 * torch.randn(count))
        gradient[torch.rand(count) < 0.1] = 0
        if step == 4:
            gradient[0], gradient[-1] = math.nan, math.inf
        yield gradient.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_step_is_torchs_up_to_the_rounding_of_moments(dtype, device) -> None:
    weight, low, moments = tensors(5000, dtype, device)
    master = weight.clone() if low is None else master_of(weight, low)
    parameter = torch.nn.Parameter(master.clone())
    optimizer = torch.optim.AdamW([parameter], lr=1e-2, betas=RATES.betas, weight_decay=0.1)
    skipped = torch.zeros((), dtype=torch.int32, device=device)
    for step in range(1, 11):
        gradient = torch.randn(5000, device=device)
        parameter.grad = gradient.clone()
        optimizer.step()
        update_8bit(weight, low, gradient, moments, step_rows(RATES, [step], [0], device)[0], RATES, skipped)
    found = weight if low is None else master_of(weight, low)
    moved = (parameter.detach() - master).norm()
    assert (found - parameter.detach()).norm() < 0.01 * moved
    assert skipped.item() == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_whose_gradient_is_not_finite_stays_as_it_is(dtype, device) -> None:
    state = tensors(700, dtype, device)
    skipped = torch.zeros((), dtype=torch.int32, device=device)
    for step, bad in enumerate((None, 300, None), 1):
        before = copied(*state)
        gradient = torch.randn(700, device=device)
        if bad is not None:
            gradient[bad] = math.inf
        update_8bit(*state[:2], gradient, state[2], step_rows(RATES, [step], [0], device)[0], RATES, skipped)
        for found, was in zip(flat(*state), flat(*before), strict=True):
            of_block = slice(256, 512) if len(found) == 700 else slice(1, 2)
            assert torch.equal(found[of_block], was[of_block]) is (bad is not None)
            assert not torch.equal(found, was)
    assert skipped.item() == 1


def test_wrong_tensors_are_refused() -> None:
    weight, low, moments = tensors(512, torch.bfloat16)
    row, skipped = step_rows(RATES, [1], [0], torch.device("cpu"))[0], torch.zeros((), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"the weight is torch.float16; give FP32, or BF16"):
        update_8bit(weight.half(), low, weight, moments, row, RATES, skipped)
    with pytest.raises(ValueError, match="give contiguous tensors"):
        update_8bit(weight, low, torch.zeros(1024)[::2], moments, row, RATES, skipped)


def updates_differ(device: str) -> list[str]:
    """The cases where the kernel does not give the reference's bytes."""
    from fp8booster.kernels.adamw_8bit_triton import update_8bit_triton

    torch.manual_seed(0)
    found = []
    for count, dtype, decoupled in product(COUNTS, (torch.bfloat16, torch.float32), (True, False)):
        rates = RATES._replace(decoupled=decoupled)
        ours = tensors(count, dtype, device)
        theirs = copied(*ours)
        skipped = torch.zeros(2, dtype=torch.int32, device=device)
        for step, gradient in enumerate(gradients(count, dtype), 1):
            row = step_rows(rates, [step], [count], torch.device(device))[0]
            gradient = gradient.to(device)
            update_8bit_triton(*ours[:2], gradient, ours[2], row, rates, skipped[0])
            update_8bit.reference(*theirs[:2], gradient, theirs[2], row, rates, skipped[1])
        pairs = zip(flat(*ours), flat(*theirs), strict=True)
        if any(not torch.equal(one, other) for one, other in pairs) or skipped[0] != skipped[1] or skipped[0] == 0:
            found.append(f"{count} {dtype} decoupled={decoupled}")
    return found


def test_the_interpreted_kernel_is_its_reference() -> None:
    assert interpreted(updates_differ, "cpu") == []


@pytest.mark.gpu
def test_the_kernel_is_its_reference() -> None:
    assert updates_differ("cuda") == []
