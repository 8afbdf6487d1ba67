"""Where chunks of FP8 weights end, without ranks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)


def planned(sizes: list[int], merged: list[tuple[int, ...]], kind: str = "weights"):
    """A plan of weights of these sizes, in their order, of which some are multiplied as one."""
    from fp8booster.colossal.gemini.groups import Group, Plan

    weights = [nn.Parameter(torch.empty(size, dtype=torch.float32)) for size in sizes]
    plan, group = object.__new__(Plan), Group(kind, tensor_parallel=False)
    plan.groups = dict.fromkeys(weights, group)
    plan.sizes = {group: sum(sizes)}
    plan.together = {weights[place]: [weights[each] for each in places] for places in merged for place in places}
    return plan, group


@pytest.mark.parametrize(
    ("sizes", "merged", "size", "expected"),
    [
        ([60, 40, 50], [(0, 1)], 100, [100, 50]),  # two that fill a chunk
        ([60, 41, 50], [(0, 1)], 100, [101, 50]),  # two that are larger than one
        ([30, 60, 40, 10], [(1, 2)], 100, [30, 100, 10]),  # two that would be cut
        ([50, 50, 60, 40], [(2, 3)], 100, [100, 100]),
        ([10, 20, 30], [(0, 1)], 100, [60]),
        ([60, 40, 50], [], 100, [100]),  # without any, the size that was asked for
        ([10, 20], [], 100, [30]),
    ],
)
@pytest.mark.parametrize("multiple", [1, 16])
def test_chunks_end_before_weights_that_would_be_cut(sizes, merged, size, expected, multiple) -> None:
    plan, group = planned(sizes, merged)
    rounded = [-(-each // multiple) * multiple for each in expected]
    assert plan.chunk_sizes(group, size, multiple) == rounded


def test_chunks_of_other_kinds_have_the_size_that_was_asked_for() -> None:
    plan, group = planned([60, 40, 50], [(0, 1)], kind="others")
    assert plan.chunk_sizes(group, 80, 16) == [80]
    assert plan.chunk_sizes(group, 1000, 16) == [160]
