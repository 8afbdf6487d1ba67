"""Layers and attention spread over two gloo ranks, and rings of four, started once for all checks."""

from __future__ import annotations

import functools

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.nn.parallel import parallel_checks, ring_checks  # noqa: F401 (importing them registers their checks)
from tests.nn.parallel.rank_registry import CHECKS, run_checks
from tests.nn.weights import collective_checks  # noqa: F401 (as above)

PARALLEL, RING = "tests.nn.parallel.parallel_checks", "tests.nn.parallel.ring_checks"
COLLECTIVES = "tests.nn.weights.collective_checks"
RING_CHECKS = [name for name, function in CHECKS.items() if function.__module__ == RING]


@functools.cache
def outcomes(ranks: int) -> list[Outcomes]:
    """What each rank found."""
    modules = (PARALLEL, RING, COLLECTIVES) if ranks == 2 else (RING,)
    return check_ranks(run_checks, ranks, modules, initialize=True)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str) -> None:
    judge(outcomes(2), name)


@pytest.mark.parametrize("name", RING_CHECKS)
def test_on_four_ranks(name: str) -> None:
    judge(outcomes(4), name)
