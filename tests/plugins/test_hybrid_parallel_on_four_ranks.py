"""`HybridParallelPlugin` with two kinds of parallelism at once, on four gloo ranks started once for all checks."""

from __future__ import annotations

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

MODULES = [
    f"tests.plugins.{checks}_checks" for checks in ("hybrid_four_rank", "hybrid_loss_four_rank", "gemini_to_hybrid")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return check_ranks(run_checks, 4, MODULES, folder)


@pytest.mark.parametrize("name", [name for module in MODULES for name in names(module)])
def test_on_four_ranks(outcomes: list[Outcomes], name: str) -> None:
    judge(outcomes, name)
