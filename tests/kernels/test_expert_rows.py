"""The rows of experts: the definition against a loop, and the kernels against the definition, number for number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from fp8booster.kernels.expert_rows import (
    REPEATED_ROWS,
    ExpertRows,
    count_choices,
    expert_rows,
    first_on_ranks,
    most_counted_rows,
    most_rows,
    pack_choices,
)
from tests.kernels.interpreted import all_of, interpreted

CASES = {
    "none": (0, 3),
    "one": (1, 1),
    "fewer than experts": (40, 130),
    "a block": (1024, 8),
    "several blocks and tiles": (2500, 300),
    "many for each": (3001, 5),
}
"""Choices and experts."""


def given(choices: int, experts: int, like: str, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(choices)
    if like == "even":
        return torch.randint(experts, (choices,), generator=generator).to(dtype)
    if like == "skewed":
        weights = torch.arange(experts, dtype=torch.float32).square() + 1e-3
        return weights.multinomial(max(choices, 1), replacement=True, generator=generator)[:choices].to(dtype)
    return torch.full((choices,), {"first": 0, "last": experts - 1}[like], dtype=dtype)


LIKE = ("even", "skewed", "first", "last")


def by_loop(owners: list[int], experts: int, most: int) -> tuple[list[int], list[int], list[int]]:
    """As the words of `expert_rows` say."""
    choices: list[int] = []
    ends = []
    for expert in range(experts):
        own = [choice for choice, owner in enumerate(owners) if owner == expert]
        choices += own + [-1] * (-len(own) % 16 or 16 * (not own))
        ends.append(len(choices))
    choices += [-1] * (most - len(choices))
    ends[-1] = most
    return ends, [choices.index(choice) if choice in choices else most for choice in range(len(owners))], choices


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("case", CASES)
def test_an_expert_has_its_choices_in_order_and_then_rows_that_pad(case: str, like: str) -> None:
    owners, experts = given(*CASES[case], like), CASES[case][1]
    found = expert_rows(owners, experts)
    assert [each.tolist() for each in found] == list(by_loop(owners.tolist(), experts, most_rows(len(owners), experts)))
    assert [each.dtype for each in found] == [torch.int32, torch.int64, torch.int32]


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("case", CASES)
def test_without_padding_an_expert_has_its_choices_alone(case: str, like: str) -> None:
    owners, experts = given(*CASES[case], like), CASES[case][1]
    ends, places, choices = expert_rows(owners, experts, padded=False)
    assert torch.equal(choices.long(), owners.argsort(stable=True))
    assert torch.equal(choices[places], torch.arange(len(owners), dtype=torch.int32))
    assert torch.equal(ends.diff(prepend=ends.new_zeros(1)), owners.bincount(minlength=experts))


def some(owners: torch.Tensor, experts: int) -> torch.Tensor:
    """The same, but that of each seven choices two are no expert's."""
    owners = owners.clone()
    owners[::7], owners[3::7] = experts, -1
    return owners


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("case", CASES)
def test_choices_of_no_expert_have_no_row(case: str, like: str) -> None:
    choices, experts = CASES[case]
    owners = some(given(choices, experts, like), experts)
    count = int(((owners >= 0) & (owners < experts)).sum())
    most = most_counted_rows(count, experts)
    assert most % REPEATED_ROWS == 0 <= most - most_rows(count, experts) < REPEATED_ROWS
    found = expert_rows(owners, experts, counted=count)
    assert [each.tolist() for each in found] == list(by_loop(owners.tolist(), experts, most))
    ends, places, held = expert_rows(owners, experts, padded=False, counted=count)
    own = [(owner, choice) for choice, owner in enumerate(owners.tolist()) if 0 <= owner < experts]
    assert held.tolist() == [choice for _, choice in sorted(own)]
    assert places[held.long()].tolist() == list(range(count))
    assert (places == count).sum() == choices - count
    assert ends.tolist() == [sum(owner <= expert for owner, _ in own) for expert in range(experts)]


def test_rows_behind_those_that_are_not_padded_hold_a_choice_that_there_is() -> None:
    ends, places, held = expert_rows(torch.tensor([2, 0, 3, 2]), 3, padded=False, counted=4)
    assert held.tolist() == [1, 0, 3, 0]
    assert places.tolist() == [1, 0, 4, 2]
    assert ends.tolist() == [1, 1, 3]


def choices_of(tokens: int, of_token: int, experts: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=generator).topk(of_token).indices.to(dtype)


def test_of_the_choices_on_one_rank_the_first_of_each_token_is_told_apart() -> None:
    chosen = torch.tensor([[5, 1, 0], [2, 3, 4], [1, 0, 1], [5, 4, 5]])
    assert first_on_ranks(chosen, 2, 3).view(4, 3).tolist() == [[2, 0, 3], [1, 3, 2], [0, 3, 3], [2, 3, 3]]


def test_a_row_carries_the_choices_of_its_token_as_its_rank_counts_them() -> None:
    chosen, weights = torch.tensor([[5, 1, 0], [2, 3, 4]]), torch.tensor([[0.5, 1.0, 2.0], [3.0, 4.0, 5.0]])
    packed = pack_choices(chosen, weights, torch.tensor([1, 3, 5, 0], dtype=torch.int32), 2)
    assert packed[:, :3].contiguous().view(torch.int32).tolist() == [[2, 1, 0], [0, 1, 2], [2, 2, 0], [1, 2, 2]]
    assert packed[:, 3:].tolist() == [[0.5, 1.0, 2.0], [3.0, 4.0, 5.0], [3.0, 4.0, 5.0], [0.5, 1.0, 2.0]]


def told(
    count: Callable[..., None], owners: torch.Tensor, ranks: int, held: int, amaxes: list[float], rows: bool
) -> torch.Tensor:
    """What is written to a column more than is told."""
    numbers = torch.full((ranks, held + 3), -7, dtype=torch.int64, device=owners.device)
    ends = torch.arange(1, ranks + 1, dtype=torch.int32, device=owners.device).square() if rows else None
    count(owners, numbers, held, torch.tensor(amaxes, device=owners.device) if amaxes else None, ends)
    return numbers


AMAXES: list[list[float]] = [[], [0.0], [-0.0, 3.5, 0.25], [1.0] * 300 + [2.0], [1.0, math.inf]]


@pytest.mark.parametrize("amaxes", AMAXES, ids=len)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("rows", [True, False])
def test_ranks_tell_how_many_choices_each_expert_has(ranks: int, amaxes: list[float], rows: bool) -> None:
    owners = given(1000, 5 * ranks, "skewed")
    numbers = told(count_choices, owners, ranks, 5, amaxes, rows)
    assert torch.equal(numbers[:, :5].flatten(), owners.bincount(minlength=5 * ranks))
    bits = torch.tensor(max(map(abs, amaxes))).view(torch.int32).item() if amaxes else -7
    assert numbers[:, 5:].tolist() == [[bits, 2 * rank + 1 if rows else -7, -7] for rank in range(ranks)]


def same(found: ExpertRows, expected: ExpertRows) -> bool:
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def differences(device: str) -> Iterator[str]:
    """Where the kernels give other numbers than the definition."""
    from fp8booster.kernels import expert_rows_triton as kernels

    for case, (choices, experts) in CASES.items():
        for like in LIKE:
            for dtype in (torch.int64, torch.int32, torch.int16):
                whole = given(choices, experts, like, dtype).to(device)
                part = some(whole, experts)
                count = int(((part >= 0) & (part < experts)).sum())
                for owners, counted in ((whole, None), (part, None), (part, count)):
                    for padded in (True, False):
                        expected = expert_rows.reference(owners, experts, padded, counted)
                        if not same(kernels.expert_rows_triton(owners, experts, padded, counted), expected):
                            yield f"{case}, {like}, {dtype}, padded {padded}, counted {counted}"
    for case, (choices, experts) in CASES.items():
        for ranks, amaxes, rows in itertools.product((1, 3), AMAXES, (True, False)):
            owners = given(choices, ranks * experts, "skewed").to(device)
            numbers, expected = (
                told(count, owners, ranks, experts, amaxes, rows)
                for count in (kernels.count_choices_triton, count_choices.reference)
            )
            if not torch.equal(numbers, expected):
                yield f"{case}, {ranks} ranks, {len(amaxes)} amaxes, rows {rows}"
    sizes = ((0, 2, 4, 2), (1, 1, 4, 4), (300, 3, 12, 3), (129, 8, 128, 8), (40, 4, 4, 4))
    for (tokens, of_token, experts, ranks), dtype in itertools.product(sizes, (torch.int64, torch.int32)):
        chosen, held = choices_of(tokens, of_token, experts, dtype).to(device), experts // ranks
        first = first_on_ranks.reference(chosen, held, ranks)
        if not torch.equal(kernels.first_on_ranks_triton(chosen, held, ranks), first):
            yield f"{tokens} tokens, {of_token} of {experts} on {ranks}: first"
        rows = expert_rows.reference(first, ranks, padded=False).choices
        for weights in (torch.rand(chosen.shape, device=device), torch.rand(chosen.shape, device=device).bfloat16()):
            given_to = chosen, weights, rows, held
            found, expected = kernels.pack_choices_triton(*given_to), pack_choices.reference(*given_to)
            if not torch.equal(found.view(torch.int32), expected.view(torch.int32)):
                yield f"{tokens} tokens, {of_token} of {experts} on {ranks}: packed"


def test_the_kernels_in_triton_s_interpreter() -> None:
    assert interpreted(all_of, differences, "cpu") == []


@pytest.mark.parametrize("amax", [True, False])
def test_kernels_of_what_is_told_and_sent_compile_for_hopper(amax: bool) -> None:
    pytest.importorskip("triton")
    from fp8booster.kernels import expert_rows_triton as kernels
    from tests.kernels.compiled import ptx_of

    tensors = {"owners": "*i64", "numbers": "*i64", "amaxes": "*fp32" if amax else "*i64", "ends": "*i32"}
    numbers = dict.fromkeys(("choices", "ranks", "columns", "held", "partials"), "i32")
    constants = {"AT_ONCE": kernels.AT_ONCE, "EXPERTS": kernels.FEW, "RANKS": 2, "PARTIALS_BLOCK": 256 if amax else 0}
    constants["ENDS"] = True
    tell = ptx_of(kernels.tell_kernel, tensors | numbers, constants, unspecialized=tuple(numbers), num_warps=8)
    tensors, numbers = {"chosen": "*i64", "owners": "*i32"}, dict.fromkeys(("choices", "held", "ranks"), "i32")
    constants = {"OF_TOKEN": 8, "PACKED": kernels.PACKED}
    first = ptx_of(kernels.first_kernel, tensors | numbers, constants, unspecialized=tuple(numbers), num_warps=4)
    tensors = {"chosen": "*i64", "weights": "*bf16", "choices": "*i32", "experts": "*i32", "values": "*fp32"}
    numbers = dict.fromkeys(("rows", "held"), "i32")
    constants |= {"WIDTH": 8}
    pack = ptx_of(kernels.pack_kernel, tensors | numbers, constants, unspecialized=tuple(numbers), num_warps=4)
    assert not any("atom" in ptx for ptx in (tell, first, pack))


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    assert list(differences("cuda")) == []


@pytest.mark.gpu
def test_many_choices_on_a_gpu_and_the_same_again() -> None:
    owners = given(131072, 128, "skewed").cuda()
    found = expert_rows(owners, 128)
    assert same(found, expert_rows.reference(owners, 128))
    assert all(same(expert_rows(owners, 128), found) for _ in range(5))
