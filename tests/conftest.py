"""Fixtures that many tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that FP8 products run on; `pytest -m gpu` asks for the GPU."""
    torch.manual_seed(0)
    return torch.device(request.param)
