"""`GeminiPlugin` on two and four gloo ranks, which are started once for all checks of a number."""

from __future__ import annotations

from functools import cache

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

MODULES = {
    2: ("fp8", "option", "layer", "fused", "native", "checkpoint", "host"),
    4: ("tensor_parallel", "fused_tensor_parallel"),
}
CASES = [
    (ranks, name)
    for ranks, modules in MODULES.items()
    for module in modules
    for name in names(f"tests.plugins.gemini_{module}_checks")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> object:
    """`outcomes(ranks)`: what each of so many ranks found."""

    @cache
    def of(ranks: int) -> list[Outcomes]:
        modules = [f"tests.plugins.gemini_{module}_checks" for module in MODULES[ranks]]
        folder = str(tmp_path_factory.mktemp("checkpoints"))
        return check_ranks(run_checks, ranks, modules, folder)

    return of


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_on_ranks(outcomes, ranks: int, name: str) -> None:
    judge(outcomes(ranks), name)
