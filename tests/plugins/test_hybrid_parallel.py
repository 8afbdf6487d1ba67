"""`HybridParallelPlugin` on two gloo ranks, which are started once for all checks of these modules."""

from __future__ import annotations

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

MODULES = [
    "tests.comm.coalesced_checks",
    "tests.plugins.large_collective_checks",
    "tests.plugins.no_effect_checks",
    *(
        f"tests.plugins.hybrid_{role}_checks"
        for role in ("native", "census", "learning", "traffic", "option", "checkpoint", "model", "norm")
    ),
    "tests.plugins.learning_checks",  # which compares with the same process
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return check_ranks(run_checks, 2, MODULES, folder)


@pytest.mark.parametrize("name", [name for module in MODULES for name in names(module)])
def test_on_two_ranks(outcomes: list[Outcomes], name: str) -> None:
    judge(outcomes, name)
