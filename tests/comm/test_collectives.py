"""Every check of `tests.comm.checks` on 2, 3 and 4 ranks, which are started once for all of them."""

from __future__ import annotations

import functools

import pytest

from tests.comm.checks import CHECKS, run_checks
from tests.distributed import run_ranks


@functools.cache
def outcomes(ranks: int) -> list[dict[str, str | None]]:
    """What each rank found."""
    return run_ranks(run_checks, ranks, timeout=300)


@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_on_gloo(ranks: int, name: str) -> None:
    for rank, outcome in enumerate(outcomes(ranks)):
        assert outcome[name] is None, f"rank {rank}: {outcome[name]}"
