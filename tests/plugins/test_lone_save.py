"""Saves that rank 0 alone calls, on two gloo ranks that are started once for all checks."""

from __future__ import annotations

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

MODULES = ["tests.plugins.lone_save_checks"]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("checks"))
    return check_ranks(run_checks, 2, MODULES, folder)


@pytest.mark.parametrize("name", [name for module in MODULES for name in names(module)])
def test_on_two_ranks(outcomes: list[Outcomes], name: str) -> None:
    judge(outcomes, name)
