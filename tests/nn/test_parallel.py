"""Every check of `tests.nn.parallel_checks` on two gloo ranks, which are started once for all of them."""

from __future__ import annotations

import functools

import pytest

from tests.distributed import run_ranks
from tests.nn.parallel_checks import CHECKS, run_checks


@functools.cache
def outcomes() -> list[dict[str, str | None]]:
    """What each rank found."""
    return run_ranks(run_checks, 2, timeout=120)


@pytest.mark.parametrize("name", CHECKS)
def test_on_two_ranks(name: str) -> None:
    for rank, outcome in enumerate(outcomes()):
        assert outcome[name] is None, f"rank {rank}: {outcome[name]}"
