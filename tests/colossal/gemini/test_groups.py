"""Where chunks of FP8 weights end, and what one launch casts of them, without ranks."""

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
    plan.merged = [[weights[place] for place in places] for places in merged]
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


@pytest.mark.parametrize(
    ("scale_of", "ranges", "expected"),
    [
        ([0, 1], [(0, 8), (8, 20)], [(0, 0, 8), (1, 8, 20)]),  # side by side, with scales of their own
        ([0, 0, 2], [(0, 8), (8, 20), (20, 24)], [(0, 0, 20), (2, 20, 24)]),  # under one scale
        ([0, 0], [(0, 8), (16, 20)], [(0, 0, 8), (0, 16, 20)]),  # with a gap between them
        ([0, 0, 2], [(0, 0), (0, 6), (6, 6)], [(0, 0, 6)]),  # of which others have the rest
        ([0, 1], [(0, 0), (0, 0)], []),
    ],
)
def test_a_launch_casts_what_lies_together_under_one_scale(scale_of, ranges, expected) -> None:
    from fp8booster.colossal.gemini.masters import _runs

    assert [tuple(run) for run in _runs(scale_of, ranges)] == expected
