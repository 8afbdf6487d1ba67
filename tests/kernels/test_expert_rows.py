"""The rows of experts: the definition against a loop, and the kernels against the definition, number for number."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fp8booster.kernels.expert_rows import ExpertRows, expert_rows
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


def same(found: ExpertRows, expected: ExpertRows) -> bool:
    return all(one.dtype is other.dtype and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def differences(device: str) -> Iterator[str]:
    """Where the kernels give other numbers than the definition."""
    from fp8booster.kernels.expert_rows_triton import expert_rows_triton

    for case, (choices, experts) in CASES.items():
        for like in LIKE:
            for dtype in (torch.int64, torch.int32, torch.int16):
                owners = given(choices, experts, like, dtype).to(device)
                if not same(expert_rows_triton(owners, experts), expert_rows.reference(owners, experts)):
                    yield f"{case}, {like}, {dtype}"


def test_the_kernels_in_triton_s_interpreter() -> None:
    assert interpreted(all_of, differences, "cpu") == []


@pytest.mark.gpu
def test_the_kernels_on_a_gpu() -> None:
    assert list(differences("cuda")) == []


@pytest.mark.gpu
def test_many_choices_on_a_gpu_and_the_same_again() -> None:
    owners = given(131072, 128, "skewed").cuda()
    found = expert_rows(owners, 128)
    assert same(found, expert_rows.reference(owners, 128))
    assert all(same(expert_rows(owners, 128), found) for _ in range(5))
