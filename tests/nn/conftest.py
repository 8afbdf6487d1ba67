"""Counters of what FP8 layers do."""

from __future__ import annotations

import pytest
import torch

from fp8booster.kernels.cast import cast
from fp8booster.kernels.stack_cast import stack_cast
from fp8booster.nn.linear import speed_model
from tests.nn.reference import count_calls


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list:
    """(matrix, or the list of those of a stack, format) of every cast that ran, in compiled code too."""
    return count_calls(monkeypatch, stack_cast, "run", count_calls(monkeypatch, cast, "run"))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list:
    """(first, second operand) of every FP8 product that eager code ran."""
    return count_calls(monkeypatch, torch, "_scaled_mm")


@pytest.fixture(autouse=True)
def every_size_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, where the layers of tests are so small that BF16 would be chosen."""
    monkeypatch.setattr(speed_model, "measured_rates", lambda device: None)
    monkeypatch.setattr(speed_model, "_looked_up", lambda device: None)
