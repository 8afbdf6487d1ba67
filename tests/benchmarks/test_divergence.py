"""A run that is made to diverge is warned of long before its loss moves, and its undisturbed copy is not."""

from __future__ import annotations

import random

import pytest
import torch

from benchmarks import divergence
from benchmarks.divergence import (
    KINDS,
    Setting,
    figure_records,
    growths,
    lead,
    moved,
    read_records,
    run_setting,
    tables,
    warnings_of,
)
from benchmarks.harness.results import Result
from fp8booster.training.models import Architecture
from tests.monitor.test_sinks import row

NANO = Architecture("LLaMA of 1 layer", 32, 64, 1, 2, 2, vocabulary=512, sequence=64)
KIND = "a channel of SwiGLU aligns and grows, its column of down too"


def text() -> str:
    """Words of which each follows few others; the same whatever the project's files say."""
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlu", k=draw.randint(1, 8))) for _ in range(400)]
    after = {word: draw.choices(words, [1 / (1 + rank) for rank in range(400)], k=6) for word in words}
    written = [words[0]]
    for _ in range(40_000):
        written.append(draw.choice(after[written[-1]] if draw.random() < 0.8 else words))
    return " ".join(written)


@pytest.fixture
def small(monkeypatch, tmp_path) -> None:
    """A smaller model, on a text that is made here."""
    file = tmp_path / "words.txt"
    file.write_text(text())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(divergence, "TEXT", str(file))
    monkeypatch.setitem(divergence.MODELS, "nano", NANO)


def test_a_run_that_diverges_is_warned_of_fifty_steps_before_and_its_copy_is_not(small, tmp_path) -> None:
    setting = Setting(seed=0, model="nano", start=80, steps=400)
    normal, disturbed = run_setting(setting, [KIND], True, torch.device("cpu"))
    assert normal["kind"] is None
    assert normal["steps"] == 400
    assert normal["warned"]["10"] == normal["warned"]["50"] == []
    assert disturbed["moved"] is not None
    assert setting.start < disturbed["warned"]["10"][0][0]
    assert lead(disturbed, 10) >= 50
    shown = [table.markdown() for table in tables([normal, disturbed])]
    assert f"| {disturbed['moved']} | {lead(disturbed, 10)} |" in shown[0]
    # what is written is shown alike later, together with other runs
    file = tmp_path / "divergence.json"
    file.write_text(Result("divergence", "", {}, tables([normal, disturbed])).json())
    assert [table.markdown() for table in tables(read_records(file))] == shown


def test_a_loss_has_moved_at_the_first_step_that_is_too_far_above_the_normal_one() -> None:
    normal = {10: 4.0, 20: 3.5, 30: 3.2}
    assert moved(normal, normal) is None
    assert moved({10: 4.05, 20: 3.59, 30: 3.35}, normal) == 30
    assert moved({10: 4.0, 20: float("nan")}, normal) == 20


def test_warnings_are_given_a_step_after_the_sample_of_an_interval() -> None:
    rows = [row(step, amax=1.0 if step < 200 else 10.0) for step in (1, *range(10, 401, 10))]
    assert [step for step, _ in warnings_of(rows, 10)] == [211]
    # five samples come before two that are judged
    assert [step for step, _ in warnings_of(rows, 50)] == [301]
    assert warnings_of(rows, 100) == []


def test_leads_of_other_figures_are_those_of_thresholds_above_all_normal_runs() -> None:
    normal = [row(step, kurtosis=3.0) for step in range(1, 30)]
    grown = [row(step, kurtosis=3.0 * 1.2 ** max(0, step - 10)) for step in range(1, 30)]
    records = [
        {"kind": None, "fp8": True, "moved": None, "growths": growths(normal)},
        {"kind": KIND, "fp8": True, "moved": 25, "growths": growths(grown)},
        {"kind": KIND, "fp8": False, "moved": 21},
    ]
    found = {each["figure"]: each for each in figure_records(records)}
    # 1.2 above the others in two samples, the step 12 and the one before; the host knows it at 13
    assert found["kurtosis of weights"]["leads"] == {kind: [11] if kind == KIND else [] for kind in KINDS}
    assert found["amax of weights"]["leads"][KIND] == [None]
