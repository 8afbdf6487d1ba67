"""LowLevelZero with FP8 on the wire, on 2, 3 and 4 gloo ranks, started once for all checks of a number."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

MODULES = {
    2: (
        "option_checks",
        "weight_checks",
        "fused_checks",
        "traffic_checks",
        "convergence_checks",
        "gradient_scaling_checks",
        "fp8_alone_checks",
    ),
    3: ("three_rank_checks",),
    4: ("four_rank_checks",),
}
CASES = [
    (ranks, name)
    for ranks, modules in MODULES.items()
    for module in modules
    for name in names(f"tests.colossal.zero.{module}")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> object:
    """`outcomes(ranks)`: what each of so many ranks found."""

    @cache
    def of(ranks: int) -> list[Outcomes]:
        modules = [f"tests.colossal.zero.{module}" for module in MODULES[ranks]]
        folder = str(tmp_path_factory.mktemp("checkpoints"))
        return check_ranks(run_checks, ranks, modules, folder)

    return of


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_on_ranks(outcomes, ranks: int, name: str) -> None:
    judge(outcomes(ranks), name)
