"""Adam with 8-bit moments: codes within their bounds, masters exact, blocks that are skipped, kernels byte for byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from fp8booster.kernels.adamw import AdamRates
from fp8booster.kernels.adamw_8bit import (
    BLOCK,
    MOST_OCTAVES,
    Moments8bit,
    Shards8bit,
    _update_part,
    decode_first,
    decode_second,
    encode_second,
    master_of,
    split,
    step_rows,
    update_8bit,
)
from fp8booster.kernels.group_codes import encode_roots
from tests.kernels.interpreted import interpreted

RATES = AdamRates(1e-2, (0.9, 0.95), 1e-8, 0.1, decoupled=True)


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


def test_a_weight_that_was_set_to_zero_is_zero(device) -> None:
    weight, low = split(torch.randn(10000).to(device))
    weight *= torch.zeros_like(weight)  # of both signs
    assert (low < 0).any()
    assert (master_of(weight, low).abs() < 2.0**-133).all()


def test_first_moments_err_by_half_a_code(device) -> None:
    m = torch.randn(8, BLOCK, device=device) * torch.exp(3 * torch.randn(8, BLOCK, device=device))
    m[1] = 0
    code, amaxes = encode_roots(m)
    found = decode_first(code.flatten(), amaxes)
    roots = (m.abs() / amaxes.clamp(min=1e-38)[:, None]).sqrt()
    error = (found.sign() * (found.abs() / amaxes.clamp(min=1e-38)[:, None]).sqrt() - m.sign() * roots).abs()
    assert error.max() <= 0.708 / 127  # the slope of lines in place of the root is 0.71 of its own at least
    assert (found[1] == 0).all()
    largest = m.abs().argmax(1, keepdim=True)
    torch.testing.assert_close(found.gather(1, largest), m.gather(1, largest))


def blocks_of_moments() -> torch.Tensor:
    """First moments of many blocks: of all sizes and spreads, with zeros, blocks that are not full, and extremes."""
    generator = torch.Generator().manual_seed(3)
    spread = torch.tensor([0.0, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 0.1, 1.0, 5.0, 20.0]).repeat(60)[:, None]
    size = torch.exp2(torch.randint(-149, 128, (len(spread), 1), generator=generator).double())
    m = size * torch.exp(spread * torch.randn(len(spread), BLOCK, generator=generator).double())
    m *= torch.randint(-1, 2, m.shape, generator=generator)
    m[::7, 100:] = 0
    m[::11, 1:] = 0
    return m.clamp(-3.4e38, 3.4e38).float()


def test_decoded_moments_are_encoded_without_loss(device) -> None:
    m = blocks_of_moments().to(device)
    first, amaxes = encode_roots(m)
    decoded = decode_first(first.flatten(), amaxes)
    again, amaxes_again = encode_roots(decoded)
    assert torch.equal(again, first)
    assert torch.equal(amaxes_again, amaxes)
    v = m.abs()
    v[5], v[6, ::2] = math.inf, math.inf  # which are made finite
    for chance in (None, *range(8)):
        codes, ranges = encode_second(v, None if chance is None else seed(chance).to(device))
        decoded = decode_second(codes.flatten(), ranges)
        codes, ranges = encode_second(decoded, None)
        again = decode_second(codes.flatten(), ranges)
        assert torch.equal(again[7:], decoded[7:])
        assert again.isfinite().all()


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


def update_one(
    state: tuple, gradient: torch.Tensor, step: int, skipped: torch.Tensor, divisor: torch.Tensor | None = None
) -> torch.Tensor:
    """Update one tensor, of `tensors`, and return its amax."""
    weight, low, moments = state
    return update_8bit(Shards8bit([weight], [low], [gradient], [moments], [step], [0]), RATES, skipped, divisor)[0]


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
        update_one((weight, low, moments), gradient, step, skipped)
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
        update_one(state, gradient, step, skipped)
        for found, was in zip(flat(*state), flat(*before), strict=True):
            of_block = slice(256, 512) if len(found) == 700 else slice(1, 2)
            assert torch.equal(found[of_block], was[of_block]) is (bad is not None)
            assert not torch.equal(found, was)
    assert skipped.item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_are_divided_and_the_amax_is_found(dtype, device) -> None:
    divided = tensors(1000, dtype, device)
    other = copied(*divided)
    skipped = torch.zeros((), dtype=torch.int32, device=device)
    for step in range(1, 4):
        gradient = torch.randn(1000, device=device)
        amax = update_one(divided, 8 * gradient, step, skipped, torch.tensor(8.0, device=device))
        assert amax == update_one(other, gradient, step, skipped) == divided[0].abs().max()
        assert all(torch.equal(*pair) for pair in zip(flat(*divided), flat(*other), strict=True))


@pytest.mark.parametrize("bad", [math.inf, math.nan, 0.0])
def test_a_divisor_that_is_not_finite_leaves_all_as_it_is(bad, device) -> None:
    state = tensors(700, torch.float32, device)
    before = copied(*state)
    skipped = torch.zeros((), dtype=torch.int32, device=device)
    amax = update_one(state, torch.ones(700, device=device), 1, skipped, torch.tensor(bad, device=device))
    assert all(torch.equal(*pair) for pair in zip(flat(*state), flat(*before), strict=True))
    assert skipped == 3
    assert amax == state[0].abs().max()


def test_wrong_tensors_are_refused() -> None:
    weight, low, moments = tensors(512, torch.bfloat16)
    skipped = torch.zeros((), dtype=torch.int32)
    with pytest.raises(ValueError, match=r"a weight is torch.float16; give FP32, or BF16"):
        update_one((weight.half(), low, moments), weight, 1, skipped)
    with pytest.raises(ValueError, match="give contiguous tensors"):
        update_one((weight, low, moments), torch.zeros(1024)[::2], 1, skipped)


KINDS = (
    *((count, torch.bfloat16, torch.bfloat16) for count in (1, 7, 256, 1000, 0, 4097)),
    *((count, torch.float32, torch.float32) for count in (257, 1024, 3)),
    (513, torch.bfloat16, torch.float32),
    (100, torch.float32, torch.float16),
)
"""Values of a tensor, and dtypes of weight and gradient. All are updated in one call."""


def shifted(each: torch.Tensor) -> torch.Tensor:
    """The values at an address that is no multiple of 16."""
    return torch.cat([each.new_zeros(1), each.flatten()])[1:].view(each.shape)


def shards_of(states: Sequence[tuple], given: Sequence[torch.Tensor], step: int) -> Shards8bit:
    weights, lows, moments = zip(*states, strict=True)
    numbers = list(range(7, 7 + len(states)))
    # some have taken more steps than others
    return Shards8bit(weights, lows, given, moments, [step + number % 3 for number in numbers], numbers)


def updates_differ(device: str, decoupled: bool, blocks: int) -> list[str]:
    """The tensors of which the kernel does not give the reference's bytes."""
    from fp8booster.kernels import adamw_8bit_triton, tables_triton

    torch.manual_seed(0)
    adamw_8bit_triton._BLOCKS, before = blocks, adamw_8bit_triton._BLOCKS
    tables_triton._known_parts.cache_clear()  # of programs of another size
    found = []
    divisor = torch.tensor(3.0, device=device)
    rates = RATES._replace(decoupled=decoupled)
    ours = [tensors(count, dtype, device) for count, dtype, _ in KINDS]
    weight, low, moments = ours[3]
    ours[3] = shifted(weight), shifted(low), Moments8bit(*map(shifted, moments))
    for weight, *_ in ours:
        weight[::3] *= torch.zeros_like(weight[::3])  # whatever their low bits are
    theirs = [copied(*each) for each in ours]
    skipped = torch.zeros(2, dtype=torch.int32, device=device)
    of_steps = [list(gradients(count, dtype)) if count else 6 * [torch.zeros(0)] for count, _, dtype in KINDS]
    for step, of_step in enumerate(zip(*of_steps, strict=True), 1):
        given = [gradient.to(device) for gradient in of_step]
        if step % 3 == 0:
            given[0], given[5] = shifted(given[0]), shifted(given[5])
        scale = divisor if step % 2 else None
        mine = adamw_8bit_triton.update_8bit_triton(shards_of(ours, given, step), rates, skipped[0], scale)
        right = update_8bit.reference(shards_of(theirs, given, step), rates, skipped[1], scale)
        differ = (mine != right).tolist()
        found += [f"amax of {kind}, step {step}" for kind, differs in zip(KINDS, differ, strict=True) if differs]
    adamw_8bit_triton._BLOCKS = before
    tables_triton._known_parts.cache_clear()
    for kind, one, other in zip(KINDS, ours, theirs, strict=True):
        pairs = zip(flat(*one), flat(*other), strict=True)
        if not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs):
            found.append(str(kind))
    # of each tensor the first block and the last
    blocks_left = sum(len({0, (count - 1) // BLOCK}) for count, *_ in KINDS if count)
    return [*found, *([f"{skipped} blocks were left"] if skipped.tolist() != 2 * [blocks_left] else [])]


@pytest.mark.parametrize(("decoupled", "blocks"), [(True, 1), (False, 2)])
def test_the_interpreted_kernel_is_its_reference(decoupled, blocks) -> None:
    assert interpreted(updates_differ, "cpu", decoupled, blocks) == []


@pytest.mark.gpu
@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("blocks", [1, 2, 4])
def test_the_kernel_is_its_reference(decoupled, blocks) -> None:
    assert updates_differ("cuda", decoupled, blocks) == []


def the_end_differs(device: str, count: int) -> list[str]:
    """What of the last values of a tensor is not as the reference has it; all before have no gradient."""
    from fp8booster.kernels.adamw_8bit_triton import update_8bit_triton

    torch.manual_seed(0)
    begin = count // BLOCK * BLOCK - BLOCK
    of_blocks = slice(begin // BLOCK, None)
    weight = torch.zeros(count, dtype=torch.bfloat16, device=device)
    low, gradient = torch.zeros_like(weight, dtype=torch.int16), torch.zeros_like(weight)
    moments = Moments8bit.zeros(count, torch.device(device))
    weight[begin:], low[begin:] = (each.to(device) for each in split(torch.randn(count - begin)))
    gradient[begin:] = torch.randn(count - begin, device=device)
    # one after it in the table, where programs before it are many
    other = tensors(700, torch.bfloat16, device)
    shards = Shards8bit(
        [weight, other[0]],
        [low, other[1]],
        [gradient, torch.ones(700, device=device)],
        [moments, other[2]],
        [1, 1],
        [3, 4],
    )
    first, amaxes, second, ranges = moments
    parts = weight[begin:], low[begin:], first[begin:], amaxes[of_blocks], second[begin:], ranges[of_blocks]
    before = copied(*other)
    wanted = [each.clone() for each in parts]
    skipped = torch.zeros((), dtype=torch.int32, device=device)
    found = update_8bit_triton(shards, RATES, skipped)
    row = step_rows(shards, RATES)[0]
    _update_part(*wanted[:2], gradient[begin:], Moments8bit(*wanted[2:]), row, RATES, skipped, begin)
    row_of_other = step_rows(shards, RATES)[1]
    _update_part(*before[:2], shards.gradients[1], before[2], row_of_other, RATES, skipped, 0)
    names = ("weight", "low", "first", "amaxes", "second", "ranges")
    differ = [name for name, part, want in zip(names, parts, wanted, strict=True) if not torch.equal(part, want)]
    pairs = zip(flat(*other), flat(*before), strict=True)
    if not all(torch.equal(one, want) for one, want in pairs):
        differ.append("the tensor after it")
    if found.tolist() != [weight[begin:].abs().max().item(), other[0].abs().max().item()] or skipped != 0:
        differ.append("amaxes or skipped blocks")
    return differ


def test_the_interpreted_kernel_updates_the_end() -> None:
    assert interpreted(the_end_differs, "cpu", 9000) == []


@pytest.mark.gpu
def test_the_end_of_a_tensor_of_more_than_2_to_31_values_is_updated() -> None:
    assert the_end_differs("cuda", 2**31 + 700) == []
