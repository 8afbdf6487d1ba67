from __future__ import annotations

import pytest
import torch

from fp8booster.nn.graphs import recorder
from tests.nn.graphs.rerun import Rerun


@pytest.fixture
def record(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Rerun | None:
    """What stands in for graphs on the CPU; a GPU has room for graphs whatever other tests take of it."""
    monkeypatch.setattr(recorder, "ROOM", -(2**50))
    rerun = Rerun() if device.type == "cpu" else None
    if rerun is not None:
        monkeypatch.setattr(recorder, "recorder_for", lambda _: rerun)
    return rerun
