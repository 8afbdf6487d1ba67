"""The rows of experts: the definition against a loop, and the kernels against the definition, number for number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

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
    place_sent,
    sender_begins,
    words_of,
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
    ends, places, choices = expert_rows(owners, experts, len(owners))
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
    found = expert_rows(owners, experts)
    assert [each.tolist() for each in found] == list(by_loop(owners.tolist(), experts, most_rows(choices, experts)))
    ends, places, held = expert_rows(owners, experts, count)
    own = [(owner, choice) for choice, owner in enumerate(owners.tolist()) if 0 <= owner < experts]
    assert held.tolist() == [choice for _, choice in sorted(own)]
    assert places[held.long()].tolist() == list(range(count))
    assert (places == count).sum() == choices - count
    assert ends.tolist() == [sum(owner <= expert for owner, _ in own) for expert in range(experts)]


def test_rows_behind_those_that_are_not_padded_hold_a_choice_that_there_is() -> None:
    ends, places, held = expert_rows(torch.tensor([2, 0, 3, 2]), 3, 4)
    assert held.tolist() == [1, 0, 3, 0]
    assert places.tolist() == [1, 0, 4, 2]
    assert ends.tolist() == [1, 1, 3]


def choices_of(tokens: int, of_token: int, experts: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(tokens)
    return torch.rand(tokens, experts, generator=generator).topk(of_token).indices.to(dtype)


def test_of_the_choices_on_one_rank_the_first_of_each_token_is_told_apart() -> None:
    chosen = torch.tensor([[5, 1, 0], [2, 3, 4], [1, 0, 1], [5, 4, 5]])
    assert first_on_ranks(chosen, 2, 3).view(4, 3).tolist() == [[2, 0, 3], [1, 3, 2], [0, 3, 3], [2, 3, 3]]


def packed(
    pack: Callable[..., None], chosen: torch.Tensor, weights: torch.Tensor, held: int, ranks: int
) -> tuple[torch.Tensor, list[int]]:
    """What goes with each row, in memory where rows lie apart, and how many rows go to each rank."""
    ends, _, choices = expert_rows.reference(first_on_ranks.reference(chosen, held, ranks), ranks, chosen.numel())
    of_experts = expert_rows.reference(chosen.reshape(-1), held * ranks, chosen.numel())
    words = torch.full((len(choices), 4 + words_of(chosen.shape[1])), -7, dtype=torch.int32, device=chosen.device)
    pack(chosen, weights, choices, of_experts.places, of_experts.ends, held, words[:, 4:])
    assert (words[:, :4] == -7).all()
    return words[:, 4:], ends.diff(prepend=ends.new_zeros(1)).tolist()


def test_a_row_carries_the_choices_of_its_token_as_its_rank_counts_them() -> None:
    chosen, weights = torch.tensor([[5, 1, 0], [2, 3, 4], [5, 3, 0]]), torch.arange(1.0, 10.0).view(3, 3)
    words, rows = packed(pack_choices, chosen, weights, 2, 3)
    assert rows == [2, 2, 3]
    # of tokens 0 and 2; 1 and 2; 0, 1 and 2
    own = [[2, 1, 0], [2, 2, 0], [0, 1, 2], [2, 1, 2], [1, 2, 2], [2, 2, 0], [1, 2, 2]]
    before = [[0, 0, 0], [1, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 1, 1]]
    assert words[:7, :3].tolist() == own
    assert words[:7, 3:6].tolist() == before
    assert torch.equal(words[:7, 6:9].contiguous().view(torch.float32), weights[[0, 2, 1, 2, 0, 1, 2]])
    assert not words[:, 9:].any()


def arriving(tokens: list[int], of_token: int, held: int, ranks: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The words that come to one of the ranks, whose tokens are so many, and what it was told of them."""
    words, numbers = [], []
    for sender, count in enumerate(tokens):
        chosen = choices_of(count + 1000 * sender, of_token, held * ranks)[:count]
        of_sender, rows = packed(pack_choices, chosen, torch.rand(chosen.shape), held, ranks)
        words.append(of_sender.split([*rows, len(of_sender) - sum(rows)])[rank])
        counts = chosen.flatten().bincount(minlength=held * ranks)[rank * held :][:held].tolist()
        numbers.append([*counts, -7, rows[rank], -7])
    return torch.cat(words), torch.tensor(numbers)


ARRIVING = {
    "two senders": ([40, 300], 3, 6, 2, 1),
    "one sent nothing": ([0, 129, 0, 7], 2, 2, 4, 2),
    "nothing came": ([0, 0], 2, 2, 2, 0),
    "many experts": ([70, 65], 8, 64, 2, 0),
    "one expert of each": ([33, 20, 11], 2, 1, 3, 2),
}
"""Tokens of each rank, choices of a token, experts of a rank, ranks, and the one to which they come."""


@pytest.mark.parametrize("case", ARRIVING.values(), ids=ARRIVING)
def test_what_senders_sent_lies_as_its_choices_do_by_expert(case: tuple[Any, ...]) -> None:
    _, of_token, held, *_ = case
    words, told = arriving(*case)
    ends, begins = sender_begins(told, held)
    counted = int(told[:, :held].sum())
    found = place_sent(words, told, ends, begins, of_token, counted)
    most = most_counted_rows(counted, held)
    assert most % REPEATED_ROWS == 0 <= most - most_rows(counted, held) < REPEATED_ROWS
    assert [each.tolist() for each in found] == list(by_loop(words[:, :of_token].flatten().tolist(), held, most))
    assert [each.dtype for each in found] == [torch.int32, torch.int64, torch.int32]


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
                for owners, rows in itertools.product((whole, some(whole, experts)), (None, choices)):
                    expected = expert_rows.reference(owners, experts, rows)
                    if not same(kernels.expert_rows_triton(owners, experts, rows), expected):
                        yield f"{case}, {like}, {dtype}, {rows} rows"
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
        for weights in (torch.rand(chosen.shape, device=device), torch.rand(chosen.shape, device=device).bfloat16()):
            found, expected = (
                packed(pack, chosen, weights, held, ranks)[0]
                for pack in (kernels.pack_choices_triton, pack_choices.reference)
            )
            if not torch.equal(found, expected):
                yield f"{tokens} tokens, {of_token} of {experts} on {ranks}: packed"
    for case, sent in ARRIVING.items():
        _, of_token, held, *_ = sent
        words, numbers = (each.to(device) for each in arriving(*sent))
        begins = sender_begins.reference(numbers, held)
        if not all(map(torch.equal, kernels.sender_begins_triton(numbers, held), begins)):
            yield f"{case}: begins"
        given_to = words, numbers, *begins, of_token, int(numbers[:, :held].sum())
        if not same(kernels.place_sent_triton(*given_to), place_sent.reference(*given_to)):
            yield f"{case}: sent"


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
    tensors = {"chosen": "*i64", "weights": "*bf16", "choices": "*i32", "places": "*i64", "ends": "*i32"}
    tensors |= {"words": "*i32", "values": "*fp32"}
    numbers = dict.fromkeys(("rows", "held", "stride", "width"), "i32")
    constants |= {"WIDTH": 8}
    pack = ptx_of(kernels.pack_kernel, tensors | numbers, constants, unspecialized=tuple(numbers), num_warps=4)
    tensors, numbers = {"told": "*i64", "ends": "*i32", "begins": "*i32"}, dict.fromkeys(("senders", "experts"), "i32")
    sizes = {"ALIGNMENT": 16, "SENDERS": 8, "EXPERTS": 16}
    begins = ptx_of(kernels.sender_begins_kernel, tensors | numbers | {"stride": "i32"}, sizes, num_warps=8)
    tensors = {"words": "*i32", **tensors, "behind": "*i32", "places": "*i64", "held": "*i32"}
    numbers = dict.fromkeys(("tokens", "experts", "senders", "words_stride", "told_stride", "most"), "i32")
    numbers["token_programs"] = "i32"
    constants |= {"SENDERS": 8, "PADDED": kernels.PADDED}
    place = ptx_of(kernels.place_sent_kernel, tensors | numbers, constants, unspecialized=tuple(numbers), num_warps=4)
    assert not any("atom" in ptx for ptx in (tell, first, pack, begins, place))


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    assert list(differences("cuda")) == []


@pytest.mark.gpu
def test_many_choices_on_a_gpu_and_the_same_again() -> None:
    owners = given(131072, 128, "skewed").cuda()
    found = expert_rows(owners, 128)
    assert same(found, expert_rows.reference(owners, 128))
    assert all(same(expert_rows(owners, 128), found) for _ in range(5))
