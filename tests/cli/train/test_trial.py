from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest

from fp8booster.cli.train import trial
from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.defaults import resolve
from fp8booster.cli.train.launch import Task
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.run import run
from tests.cli.train.test_runs import ENVIRONMENT, SMALL, losses, succeed, wait_until
from tests.programs import Program

NOTHING = TokenFile(Path(), "", "", 300, 1)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[object, ...]:
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("Some words to train on.\n" * 400)
    return ("--data", folder, "--cache", tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize(
    ("precision", "bf16", "fp8", "steps"),
    [
        ("compare", 1.0, 2.0, 50),
        ("fp8", 1.0, 2.0, 75),
        ("compare", 0.1, 0.2, 200),  # the recipe's
        ("compare", 60.0, 90.0, 20),  # fewer say nothing
    ],
)
def test_steps_of_all_precisions_take_the_time(tmp_path, monkeypatch, capsys, precision, bf16, fp8, steps) -> None:
    tried = []

    def run_ranks(task: Task, store: object) -> bool:
        assert task.trial
        tried.append(task.precision)
        # others use the processor in one of the steps
        seconds = [99.0, *[{"bf16": bf16, "fp8": fp8}[task.precision] * busy for busy in (0.75, 1.5, 0.75)]]
        task.folder.mkdir(parents=True)
        rest = {"loss": 1.0, "lr": 1.0, "grad_norm": 1.0, "tokens_per_second": 1.0, "peak_memory": 0, "wire_bytes": 0}
        lines = [json.dumps({"step": step + 1, "seconds": each, **rest}) for step, each in enumerate(seconds)]
        (task.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return True

    monkeypatch.setattr(trial, "run_ranks", run_ranks)
    options = resolve(TrainOptions(precision=precision, out=str(tmp_path)), launched=False)
    assert trial.steps_in_time(options, NOTHING) == steps
    assert tried == (["bf16", "fp8"] if precision == "compare" else [precision])
    assert f"The run takes {steps} steps; --steps sets another number." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_steps_that_are_given_are_not_sized(monkeypatch) -> None:
    assert trial.is_sized_by_trial(TrainOptions())
    assert not trial.is_sized_by_trial(TrainOptions(steps=3))
    for variable in ("RANK", "WORLD_SIZE"):  # ranks of a launcher would each find another number
        monkeypatch.setenv(variable, "1")
    assert not trial.is_sized_by_trial(TrainOptions())


def test_a_run_that_is_interrupted_in_its_trial_ends_at_once_and_resumes(tmp_path, data) -> None:
    out = tmp_path / "run"
    words = ("train", "--out", out, "--precision", "bf16", *data, *SMALL)
    process = Program("fp8booster", *words, environment=ENVIRONMENT)
    wait_until(process, lambda: len(psutil.Process(process.pid).children()) == 2)
    ranks = psutil.Process(process.pid).children()
    for rank in ranks:
        rank.suspend()  # no step ends
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert not psutil.wait_procs(ranks, timeout=30)[1]
    assert "Stopped before the first step; nothing was saved." in said
    assert f"Continue with: fp8booster train --resume {out}" in said
    assert not (out / "trial").exists()
    succeed("--resume", out, "--steps", 2)
    assert list(losses(out / "bf16")) == [1, 2]


def test_a_sized_run_keeps_the_number_and_what_follows_from_it(tmp_path, data, monkeypatch, capsys) -> None:
    monkeypatch.setattr(trial, "SECONDS", 0.0)
    _, text, _, cache = data
    given = {"data": str(text), "cache": str(cache), "vocabulary": 512, "batch": 2, "sequence": 32, "progress": "none"}
    assert run(given | {"precision": "bf16", "out": str(tmp_path)}, None, "fp8booster train") == 0
    assert "The run takes 20 steps" in capsys.readouterr().err
    assert len(losses(tmp_path / "bf16")) == 20
    options = json.loads((tmp_path / "run.json").read_text())["options"]
    assert (options["steps"], options["warmup"], options["decay"]) == (20, 2, 20)
    assert not (tmp_path / "trial").exists()
