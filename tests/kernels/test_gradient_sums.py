"""Sums of gradients in 8 bits: what they lose, what is no number, and the bytes that kernels write."""

from __future__ import annotations

import math

import pytest
import torch

from fp8booster.kernels.group_codes import GROUP, GroupCodes, add_to_sums, encode_groups, read_sums, zero_sums
from tests.kernels.interpreted import interpreted

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COUNTS = (1, 100, GROUP, 1040, 5000)


def gradients(count: int, micro_batches: int, dtype: torch.dtype, device: torch.device | str) -> list[torch.Tensor]:
    """With something in common, as those of one step have, over some octaves."""
    common, sizes = torch.randn(count), torch.exp(torch.randn(count))
    return [((common + torch.randn(count)) * sizes).to(device, dtype) for _ in range(micro_batches)]


def summed(given: list[torch.Tensor]) -> GroupCodes:
    sums = zero_sums(given[0])
    for gradient in given:
        add_to_sums(sums, gradient)
    return sums


def decibels(found: torch.Tensor, expected: torch.Tensor) -> float:
    noise = (found.double() - expected.double()).square().sum()
    return 10 * math.log10(expected.double().square().sum() / noise)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_gradient_is_encoded_as_it_is(dtype, device) -> None:
    for count in COUNTS:
        (gradient,) = gradients(count, 1, dtype, device)
        found, expected = summed([gradient.view(-1, 1)]), encode_groups(gradient.float().view(1, -1))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(("micro_batches", "least"), [(1, 42), (4, 38), (16, 34)])
def test_each_addition_costs_a_rounding(micro_batches, least, device) -> None:
    given = gradients(100_000, micro_batches, torch.bfloat16, device)
    exact = torch.stack(given).double().sum(0)
    sums = summed(given[:-1]) if micro_batches > 1 else zero_sums(given[0])
    assert least < decibels(read_sums(summed(given), None, torch.float32), exact) < least + 6
    # the last one is added in FP32
    read = read_sums(sums, given[-1], torch.float32)
    assert decibels(read, exact) > decibels(read_sums(summed(given), None, torch.float32), exact)
    assert torch.equal(read_sums(sums, given[-1], torch.bfloat16), read.bfloat16())


def test_what_is_no_number_makes_its_group_nan_until_the_end(device) -> None:
    sums = zero_sums(torch.empty(400, device=device))
    for bad in (math.inf, 1.0):
        gradient = torch.ones(400, device=device)
        gradient[130] = bad
        add_to_sums(sums, gradient)
    found = read_sums(sums, torch.ones(400, device=device), torch.float32)
    assert found[GROUP : 2 * GROUP].isnan().all()
    assert (torch.cat([found[:GROUP], found[2 * GROUP :]]) == 3).all()


def test_other_gradients_are_refused() -> None:
    sums = zero_sums(torch.empty(6))
    with pytest.raises(ValueError, match="a gradient has 5 values and its sum 6; give as many"):
        add_to_sums(sums, torch.ones(5))
    with pytest.raises(ValueError, match="give contiguous tensors"):
        read_sums(sums, torch.ones(3, 2).t(), torch.float32)


def what_differs(device: str = "cpu", counts: tuple[int, ...] = COUNTS) -> list[str]:
    """Cases whose bytes are not those of the definition."""
    from fp8booster.kernels.group_codes_triton import add_to_sums_triton, read_sums_triton

    torch.manual_seed(0)
    different = []
    # the interpreter does not round to BF16, it cuts off
    outs = (torch.float32, torch.bfloat16 if device == "cuda" else torch.float16)
    for dtype in DTYPES:
        for count in (*counts, 0):
            given = gradients(count, 3, dtype, device)
            if count > 600:
                given[0][3], given[1][300], given[2][count - 1] = math.inf, math.nan, -math.inf
                given[0][512:600] = given[1][512:600] = given[2][512:600] = 0
            ours, right = zero_sums(given[0]), zero_sums(given[0])
            for gradient in given:
                for out in outs:
                    for added in (None, gradient):
                        found, expected = (read(right, added, out) for read in (read_sums_triton, read_sums.reference))
                        if not torch.equal(found.float().nan_to_num(), expected.float().nan_to_num()):
                            different.append(f"sums of {dtype} {count} read in {out}, one added: {added is not None}")
                add_to_sums_triton(ours, gradient)
                add_to_sums.reference(right, gradient)
                if not torch.equal(ours.codes, right.codes) or not torch.equal(
                    ours.amaxes.nan_to_num(-1), right.amaxes.nan_to_num(-1)
                ):
                    different.append(f"sums of {dtype} {count}")
    return different


def test_kernels_interpreted_write_the_bytes_of_the_definition() -> None:
    assert interpreted(what_differs) == []


@pytest.mark.gpu
def test_kernels_write_the_bytes_of_the_definition() -> None:
    for _ in range(5):
        assert what_differs("cuda", (*COUNTS, 4096, 1_000_001, 2**22)) == []


@pytest.mark.parametrize("name", ["add_to_sums_kernel", "read_sums_kernel"])
def test_kernels_compile_for_hopper_and_move_whole_vectors(name) -> None:
    pytest.importorskip("triton")
    from fp8booster.kernels import group_codes_triton
    from tests.kernels.compiled import narrow_accesses, stages_of

    types = {"codes": "*i8", "amaxes": "*fp32", "gradients": "*bf16", "totals": "*fp32", "count": "i32"}
    constants = {"ADDS": True, "VALUES": group_codes_triton._VALUES}
    ptx = stages_of(getattr(group_codes_triton, name), types, constants, enable_fp_fusion=False)["ptx"]
    assert "ld.global.v4.b32" in ptx
    assert narrow_accesses(ptx) == []
