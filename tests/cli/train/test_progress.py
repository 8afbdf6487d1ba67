from __future__ import annotations

import io
import sys

import pytest

from fp8booster.cli.train import progress as progress_module
from fp8booster.cli.train.progress import TimeLeft, make_display

STEPS = 200
FIGURES = {"loss": 2.5, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 9e3}


def show(progress: str) -> None:
    with make_display(progress, "fp8") as display:
        display.show("status", text="building the model tiny")
        display.show("start", done=0, steps=STEPS)
        for step in range(1, STEPS + 1):
            display.show("step", step=step, **FIGURES)
        display.show("checkpoint", folder="run/step-200", step=STEPS)
        display.show("status", text="saving")
        display.show("done")


def test_a_log_gets_about_twenty_lines(capsys):
    show("lines")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fp8: building the model tiny"
    assert lines[-2:] == ["fp8: saved run/step-200", "fp8: saving"]
    steps = [line for line in lines if "step " in line and "loss" in line]
    assert len(steps) == 21  # the first and every tenth
    assert steps[-1] == "fp8: step 200/200  loss 2.5000  lr 1.00e-03  norm 1.00  9,000 tokens/s"


def test_a_line_has_the_share_of_the_peak_where_it_is_known():
    assert progress_module.figures(FIGURES | {"share": 0.4149}).endswith("9,000 tokens/s, 41% of FP8 peak")
    assert progress_module.figures(FIGURES | {"share": None}).endswith("9,000 tokens/s")


@pytest.mark.parametrize(
    ("seconds", "steps", "left"),
    [(9.0, 5, "27 s left"), (9.0, 200, "30 min left"), (300.0, 201, "16.6 h left"), (0.1, 3, "0 s left")],
)
def test_the_time_left_is_that_of_the_recent_steps(monkeypatch, seconds, steps, left):
    now = [0.0]
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now[0])
    clock = TimeLeft(steps)
    said = []
    for step in range(1, steps + 1):
        now[0] += seconds
        said.append(clock.after(step))
    assert said[1] == left
    assert said[-1] == ""
    later = TimeLeft(1000)
    now[0] += 500.0  # a first step that compiles
    later.after(1)
    for step in range(2, 30):
        now[0] += 1.0
        said.append(later.after(step))
    assert said[-1] == "16 min left"


@pytest.mark.parametrize("progress", ["bar", "lines"])
def test_the_time_left_is_shown(capsys, monkeypatch, progress):
    monkeypatch.setattr(TimeLeft, "after", lambda self, step: "7 min left")
    show(progress)
    assert "7 min left" in capsys.readouterr().err


def test_auto_writes_lines_where_there_is_no_terminal(capsys):
    show("auto")
    assert len(capsys.readouterr().err.splitlines()) == 24


def test_a_bar_ends_full(capsys):
    show("bar")
    last = capsys.readouterr().err.splitlines()[-1]
    assert "200/200" in last
    assert "loss 2.5" in last  # the figures, not that the end was saved


@pytest.mark.parametrize("progress", ["bar", "lines", "none"])
def test_a_notice_is_shown_whole_by_all(capsys, progress):
    text = "The last checkpoint of finite values is " + "runs/[1]/" * 20
    with make_display(progress, "fp8") as display:
        display.show("notice", text=text)
    assert text in capsys.readouterr().err


def test_none_is_silent(capsys):
    show("none")
    assert capsys.readouterr() == ("", "")


def test_a_bar_elsewhere_leaves_standard_error_to_the_log(capsys):
    stream = io.StringIO()
    with make_display("bar", "fp8", stream) as display:
        display.show("start", done=0, steps=STEPS)
        sys.stderr.write("a warning\n")
    assert capsys.readouterr().err == "a warning\n"
    assert "0/200" in stream.getvalue()
    assert "a warning" not in stream.getvalue()
