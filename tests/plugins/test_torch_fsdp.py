"""`TorchFSDPPlugin` on two gloo ranks, which are started once for all checks."""

from __future__ import annotations

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

MODULES = [f"tests.plugins.fsdp_{name}checks" for name in ("", "fused_", "checkpoint_")]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return check_ranks(run_checks, 2, MODULES, folder)


@pytest.mark.parametrize("name", [name for module in MODULES for name in names(module)])
def test_on_two_ranks(outcomes: list[Outcomes], name: str) -> None:
    judge(outcomes, name)
