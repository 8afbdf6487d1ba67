"""`GeminiPlugin` on one GPU, or on two where there are two."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import run_ranks
from tests.plugins.registry import names, run_checks

pytestmark = pytest.mark.gpu

MODULE = "tests.plugins.gemini_gpu_checks"


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str | None]]:
    """What each rank found."""
    ranks = min(2, torch.cuda.device_count())
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return run_ranks(run_checks, ranks, [MODULE], folder, timeout=500, initialize=False)


@pytest.mark.parametrize("name", names(MODULE))
def test_on_gpus(outcomes: list[dict[str, str | None]], name: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome[name] is None, f"rank {rank}: {outcome[name]}"
