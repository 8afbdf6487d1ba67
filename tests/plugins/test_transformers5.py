"""Plugins that do not shard models train fused ones under transformers 5, on two gloo ranks.

Under transformers 4.51 each of these checks runs in the file of its plugin.
"""

from __future__ import annotations

import pytest

from fp8booster.colossal.sharding import why_not_sharded
from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

pytestmark = pytest.mark.skipif(
    why_not_sharded("", "") is None, reason="these checks run in the files of their plugins"
)
MODULES = [
    f"tests.plugins.{name}_checks" for name in ("fused", "native", "checkpoint", "ddp", "fsdp_fused", "gemini_fused")
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """What each rank found."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return check_ranks(run_checks, 2, MODULES, folder)


@pytest.mark.parametrize("name", [name for module in MODULES for name in names(module)])
def test_on_two_ranks(outcomes: list[Outcomes], name: str) -> None:
    judge(outcomes, name)
