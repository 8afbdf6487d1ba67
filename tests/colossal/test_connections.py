"""CUDA_DEVICE_MAX_CONNECTIONS is what the user has set, whichever package is imported first."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import pytest
import torch

from fp8booster.colossal.compat import environment
from fp8booster.colossal.compat.environment import CONNECTIONS, streams_have_queues_of_their_own
from fp8booster.colossal.compat.registry import Replacements
from tests.distributed import TEST_SECONDS

INITIALIZE = types.ModuleType("colossalai.initialize")


@pytest.fixture
def replacements(monkeypatch: pytest.MonkeyPatch) -> Replacements:
    """After colossalai was imported."""
    monkeypatch.setenv(CONNECTIONS, "1")
    return Replacements()


@pytest.mark.parametrize("given", [None, "4"])
def test_what_the_user_has_set_comes_back(
    replacements: Replacements, monkeypatch: pytest.MonkeyPatch, given: str | None
) -> None:
    monkeypatch.setattr(environment, "_GIVEN", given)
    streams_have_queues_of_their_own(INITIALIZE, replacements)
    assert os.environ.get(CONNECTIONS) == given
    replacements.undo()
    assert os.environ[CONNECTIONS] == "1"


def test_one_queue_stays_for_who_asks_for_it(replacements: Replacements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_GIVEN", "1")
    streams_have_queues_of_their_own(INITIALIZE, replacements)
    assert os.environ[CONNECTIONS] == "1"
    assert not replacements


def test_a_gpu_that_is_in_use_is_told_of(replacements: Replacements, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_GIVEN", None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.warns(UserWarning, match=r"import fp8booster\.plugins before the first use of a GPU"):
        streams_have_queues_of_their_own(INITIALIZE, replacements)
    assert os.environ[CONNECTIONS] == "1"


def test_the_environment_of_the_process_tells_once_colossalai_is_imported() -> None:
    script = (
        f"import colossalai, os; print(os.environ['{CONNECTIONS}']); import fp8booster.plugins; "
        f"print(os.environ['{CONNECTIONS}'])"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=os.environ | {CONNECTIONS: "4"},
        capture_output=True,
        text=True,
        check=True,
        timeout=TEST_SECONDS,
    )
    assert result.stdout.split()[-2:] == ["1", "4"]
