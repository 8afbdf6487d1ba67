"""A run that is made to diverge is warned of long before its loss moves, and its undisturbed copy is not."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import divergence
from benchmarks.divergence import figure_records, planned, read_records, tables
from benchmarks.harness.results import Record, Result
from benchmarks.training import disturbed
from benchmarks.training.disturbed import KINDS, Setting, growths, lead, moved, run_setting, warnings_of
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
    monkeypatch.setattr(disturbed, "TEXT", str(file))
    monkeypatch.setitem(disturbed.MODELS, "nano", NANO)


def test_a_run_that_diverges_is_warned_of_fifty_steps_before_and_its_copy_is_not(small, tmp_path) -> None:
    setting = Setting(seed=0, model="nano", start=80, steps=400)
    normal, diverging = run_setting(setting, [KIND], True, torch.device("cpu"))
    assert normal["kind"] is None
    assert normal["steps"] == 400
    assert normal["warned"]["10"] == normal["warned"]["50"] == []
    assert diverging["moved"] is not None
    assert setting.start < diverging["warned"]["10"][0][0]
    assert lead(diverging, 10) >= 50
    shown = [table.markdown() for table in tables([normal, diverging])]
    assert f"| {diverging['moved']} | {lead(diverging, 10)} |" in shown[0]
    # what is written is shown alike later, together with other runs
    file = tmp_path / "divergence.json"
    file.write_text(Result("divergence", "", {}, tables([normal, diverging])).json())
    assert [table.markdown() for table in tables(read_records([file]))] == shown
    normal["warned"].popitem()  # as a version that judged fewer samples wrote it
    file.write_text(Result("divergence", "", {}, tables([normal, diverging])).json())
    with pytest.raises(ValueError, match=r"divergence\.json has samples of other steps than this version judges"):
        read_records([file])


def test_runs_of_earlier_files_are_shown_once_and_kinds_that_none_has_are_run(tmp_path) -> None:
    first, other = disturbed.DIVERGING[0], "learning rate grows, no weight decay"

    def write(name: str, *kinds: str | None, loss: float = 3.0) -> Path:
        found = {"setting": str(first), "start": first.start, "fp8": False, "steps": 600, "moved": None}
        records = [found | {"kind": kind, "losses": {600: math.nan if kind else loss}} for kind in kinds]
        (tmp_path / name).write_text(Result("divergence", "", {}, tables(records)).json())
        return tmp_path / name

    # either file has the run that is not disturbed, from which losses move
    files = [write("a.json", None, KIND), write("b.json", None, other), write("a again.json", None, KIND)]
    earlier = read_records(files)
    assert [each["kind"] for each in earlier] == [None, KIND, other]

    def work(records: Sequence[Record], **options: Any) -> list[tuple[Setting, tuple[str, ...], bool]]:
        return planned(list(KINDS), records, **{"quick": False, "seeds": [first.seed], "fp8": False} | options)

    assert work([]) == [(first, tuple(KINDS), False)]
    assert work(earlier) == [(first, tuple(kind for kind in KINDS if kind not in (KIND, other)), False)]
    assert work(earlier[:1], fp8=None) == [(first, tuple(KINDS), True), (first, tuple(KINDS), False)]
    assert planned([KIND, other], earlier, quick=False, seeds=[first.seed], fp8=False) == []
    # a quick run is short, and another one
    ((quick, kinds, _),) = work(earlier, quick=True)
    assert (quick.steps, kinds) == (40, tuple(KINDS))
    with pytest.raises(
        ValueError, match=r"c\.json and another file differ in the run micro, .*, undisturbed; give one"
    ):
        read_records([*files, write("c.json", None, loss=4.0)])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--seed", "999"], "error: --seed is 999; use 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110"),
        (["--seed", "103", "--no-fp8"], "error: no run has these --seed and --fp8; without FP8 the settings that"),
        (["--before", "nowhere.json"], "error: nowhere.json is missing; give --before a file that --json of this"),
        (["--before", "OTHER"], "is a result of another benchmark; give --before a file that --json of this"),
        (["--kind", "none"], "error: --kind is 'none'; use 'a channel"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, sentence, tmp_path) -> None:
    (other := tmp_path / "other.json").write_text('{"tables": {"ends": []}}')
    arguments = [str(other) if each == "OTHER" else each for each in arguments]
    app = typer.Typer()
    app.command()(divergence.main)
    out = ["--out", str(tmp_path / "out"), "--json", str(tmp_path / "out.json")]
    result = CliRunner().invoke(app, ["--device", "cpu", *out, *arguments])
    assert result.exit_code == 2
    assert sentence in result.output
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "out.json").exists()


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
