"""The rows of experts: the definition against a loop, and the kernels against the definition, number for number."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch

from fp8booster.kernels.expert_rows import SENT_ROWS, ExpertRows, count_choices, expert_rows, most_sent_rows, sent_rows
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


def by_loop(owners: list[int], experts: int) -> tuple[list[int], list[int], list[int]]:
    """As the words of `expert_rows` say."""
    choices, ends = [], []
    for expert in range(experts):
        own = [choice for choice, owner in enumerate(owners) if owner == expert]
        choices += own + [-1] * (-len(own) % 16 or 16 * (not own))
        ends.append(len(choices))
    choices += [-1] * (len(owners) // 16 * 16 + 16 * experts - len(choices))
    ends[-1] = len(choices)
    return ends, [choices.index(choice) for choice in range(len(owners))], choices


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("case", CASES)
def test_an_expert_has_its_choices_in_order_and_then_rows_that_pad(case: str, like: str) -> None:
    owners, experts = given(*CASES[case], like), CASES[case][1]
    found = expert_rows(owners, experts)
    assert [each.tolist() for each in found] == list(by_loop(owners.tolist(), experts))
    assert [each.dtype for each in found] == [torch.int32, torch.int64, torch.int32]


@pytest.mark.parametrize("like", LIKE)
@pytest.mark.parametrize("case", CASES)
def test_without_padding_an_expert_has_its_choices_alone(case: str, like: str) -> None:
    owners, experts = given(*CASES[case], like), CASES[case][1]
    ends, places, choices = expert_rows(owners, experts, padded=False)
    assert torch.equal(choices.long(), owners.argsort(stable=True))
    assert torch.equal(choices[places], torch.arange(len(owners), dtype=torch.int32))
    assert torch.equal(ends.diff(prepend=ends.new_zeros(1)), owners.bincount(minlength=experts))


SENT = {
    "one sender": [[3, 0, 40, 16]],
    "three senders": [[3, 0, 40], [0, 0, 8], [13, 0, 1]],
    "all to the last": [[0, 0, 70], [0, 0, 3000]],
    "all to the first": [[64, 0, 0], [9000, 0, 0]],
    "nothing": [[0, 0], [0, 0]],
    "one expert": [[5], [300]],
    "many": [[(7 * sender + 3 * expert) % 20 for expert in range(130)] for sender in range(5)],
}


@pytest.mark.parametrize("counts", SENT.values(), ids=SENT)
def test_what_senders_sent_lies_as_its_choices_do_by_expert(counts: list[list[int]]) -> None:
    owners = [expert for sender in counts for expert, count in enumerate(sender) for _ in range(count)]
    found = sent_rows(torch.tensor(counts), len(owners))
    ends, places, choices = by_loop(owners, len(counts[0]))
    most = most_sent_rows(len(owners), len(counts[0]))
    assert most % SENT_ROWS == 0 <= most - len(choices) < SENT_ROWS
    right = [[*ends[:-1], most], places, choices + [-1] * (most - len(choices))]
    assert [each.tolist() for each in found] == right
    assert [each.dtype for each in found] == [torch.int32, torch.int64, torch.int32]


def told(count: Callable[..., None], owners: torch.Tensor, ranks: int, held: int, amaxes: list[float]) -> torch.Tensor:
    """What is written to a column more than is told."""
    numbers = torch.full((ranks, held + 2), -7, dtype=torch.int64, device=owners.device)
    count(owners, numbers, held, torch.tensor(amaxes, device=owners.device) if amaxes else None)
    return numbers


AMAXES: list[list[float]] = [[], [0.0], [-0.0, 3.5, 0.25], [1.0] * 300 + [2.0], [1.0, math.inf]]


@pytest.mark.parametrize("amaxes", AMAXES, ids=len)
@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_ranks_tell_how_many_choices_each_expert_has(ranks: int, amaxes: list[float]) -> None:
    owners = given(1000, 5 * ranks, "skewed")
    numbers = told(count_choices, owners, ranks, 5, amaxes)
    assert torch.equal(numbers[:, :5].flatten(), owners.bincount(minlength=5 * ranks))
    bits = torch.tensor(max(map(abs, amaxes))).view(torch.int32).item() if amaxes else -7
    assert numbers[:, 5:].tolist() == [[bits, -7]] * ranks


def same(found: ExpertRows, expected: ExpertRows) -> bool:
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def differences(device: str) -> Iterator[str]:
    """Where the kernels give other numbers than the definition."""
    from fp8booster.kernels.expert_rows_triton import count_choices_triton, expert_rows_triton, sent_rows_triton

    for case, (choices, experts) in CASES.items():
        for like in LIKE:
            for dtype in (torch.int64, torch.int32, torch.int16):
                owners = given(choices, experts, like, dtype).to(device)
                for padded in (True, False):
                    expected = expert_rows.reference(owners, experts, padded)
                    if not same(expert_rows_triton(owners, experts, padded), expected):
                        yield f"{case}, {like}, {dtype}, padded {padded}"
    for case, (choices, experts) in CASES.items():
        for ranks, amaxes in itertools.product((1, 3), AMAXES):
            owners = given(choices, ranks * experts, "skewed").to(device)
            numbers, expected = (
                told(count, owners, ranks, experts, amaxes) for count in (count_choices_triton, count_choices.reference)
            )
            if not torch.equal(numbers, expected):
                yield f"{case}, {ranks} ranks, {len(amaxes)} amaxes"
    for case, numbers in SENT.items():
        # as they come, with another number behind them
        counts = torch.tensor([[*sender, -1] for sender in numbers], device=device)[:, :-1]
        choices = sum(map(sum, numbers))
        if not same(sent_rows_triton(counts, choices), sent_rows.reference(counts, choices)):
            yield case


def test_the_kernels_in_triton_s_interpreter() -> None:
    assert interpreted(all_of, differences, "cpu") == []


@pytest.mark.parametrize("amax", [True, False])
def test_kernels_of_what_is_told_and_sent_compile_for_hopper(amax: bool) -> None:
    pytest.importorskip("triton")
    from fp8booster.kernels import expert_rows_triton as kernels
    from tests.kernels.compiled import ptx_of

    tensors = {"counts": "*i64", "ends": "*i32", "places": "*i64", "held": "*i32"}
    numbers = dict.fromkeys(("senders", "experts", "stride", "most"), "i32")
    constants = {"ALIGNMENT": 16, "SENT": kernels.SENT, "PROGRAMS": kernels.PROGRAMS, "SENDERS": 2, "EXPERTS": 4}
    sent = ptx_of(kernels.sent_kernel, tensors | numbers, constants, unspecialized=("counts", *numbers), num_warps=4)
    tensors = {"owners": "*i64", "numbers": "*i64", "amaxes": "*fp32" if amax else "*i64"}
    numbers = dict.fromkeys(("choices", "ranks", "columns", "held", "partials"), "i32")
    constants = {"AT_ONCE": kernels.AT_ONCE, "EXPERTS": kernels.FEW, "RANKS": 2, "PARTIALS_BLOCK": 256 if amax else 0}
    tell = ptx_of(kernels.tell_kernel, tensors | numbers, constants, unspecialized=tuple(numbers), num_warps=8)
    assert not any("atom" in ptx for ptx in (sent, tell))


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    assert list(differences("cuda")) == []


@pytest.mark.gpu
def test_many_choices_on_a_gpu_and_the_same_again() -> None:
    owners = given(131072, 128, "skewed").cuda()
    found = expert_rows(owners, 128)
    assert same(found, expert_rows.reference(owners, 128))
    assert all(same(expert_rows(owners, 128), found) for _ in range(5))
