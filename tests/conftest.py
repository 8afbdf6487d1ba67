"""Fixtures that many tests share."""

from __future__ import annotations

import os

import pytest
import torch

from fp8booster.kernels.instructions import BEFORE_AMX, VARIABLE, avoid_trapping_instructions, multiply_bf16_in_fp32

# no test needs a hub, which peft would ask for a base's config, for 20 s where none answers
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# what this machine measured of its links is not to decide what tests send in FP8
os.environ["FP8BOOSTER_LINKS"] = ""

# before any product, here and in the processes that tests start, of which a worker of pytest-xdist is one
if avoid_trapping_instructions() is not None or os.environ.get(VARIABLE) == BEFORE_AMX:
    torch.backends.mkldnn.enabled = False  # as products do by themselves outside compiled code
multiply_bf16_in_fp32()
torch.set_num_threads(1)  # the tensors are small, and two threads on a busy machine wait for each other


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Each test draws the same numbers, whatever ran before it in this process."""
    torch.default_generator.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Many processes share a GPU, and what PyTorch keeps in one of them is missing in the others."""
    if torch.cuda.is_initialized() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device that FP8 products run on; `pytest -m gpu` asks for the GPU."""
    torch.manual_seed(0)
    return torch.device(request.param)
