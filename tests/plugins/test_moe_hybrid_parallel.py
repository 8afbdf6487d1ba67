"""`MoeHybridParallelPlugin` and its blocks on two and four gloo ranks, started once for all checks of a number."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

MODULES = {
    2: ["tests.colossal.moe.block_checks", "tests.plugins.moe_checks", "tests.plugins.moe_native_checks"],
    4: ["tests.plugins.moe_four_rank_checks"],
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> object:
    """`outcomes(ranks)`: what each of so many ranks found."""

    @cache
    def of(ranks: int) -> list[Outcomes]:
        return check_ranks(run_checks, ranks, MODULES[ranks], str(tmp_path_factory.mktemp("checkpoints")))

    return of


@pytest.mark.parametrize(
    ("ranks", "name"),
    [(ranks, name) for ranks, modules in MODULES.items() for module in modules for name in names(module)],
)
def test_on_ranks(outcomes, ranks: int, name: str) -> None:
    judge(outcomes(ranks), name)
