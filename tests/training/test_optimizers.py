from __future__ import annotations

import math

import pytest

from fp8booster.training.optimizers import WarmupCosine


def test_warm_up_cosine_and_floor():
    schedule = WarmupCosine(peak=1.0, floor=0.1, warmup=10, decay=110)
    assert schedule.rate(1) == pytest.approx(0.1)
    assert schedule.rate(10) == 1.0
    assert schedule.rate(60) == pytest.approx(0.55)  # half way down the cosine
    assert schedule.rate(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert schedule.rate(110) == schedule.rate(1000) == 0.1


def test_no_warm_up_begins_near_the_peak():
    assert WarmupCosine(peak=1.0, floor=0.0, warmup=0, decay=100).rate(1) == pytest.approx(1.0, abs=1e-3)
