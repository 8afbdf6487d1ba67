"""`GeminiPlugin` on one GPU, or on two where there are two."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins.registry import names, run_checks

pytestmark = pytest.mark.gpu

MODULE = "tests.plugins.gemini_gpu_checks"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[Outcomes]:
    """What each rank found."""
    ranks = min(2, torch.cuda.device_count())
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return check_ranks(run_checks, ranks, [MODULE], folder, preloaded=False)


@pytest.mark.parametrize("name", names(MODULE))
def test_on_gpus(outcomes: list[Outcomes], name: str) -> None:
    judge(outcomes, name)
