"""What `benchmarks.convergence` keeps when something goes wrong, and what it refuses before it trains."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import convergence
from benchmarks.harness.results import Result
from benchmarks.training import learner
from benchmarks.training.campaign import Place, places, work_off
from benchmarks.training.data import tokens_of
from benchmarks.training.job import Job
from benchmarks.training.runs import HELD_OUT, NOT_FINITE, Run, RunFolder
from benchmarks.training.variants import VARIANTS, chosen
from tests.distributed import TEST_SECONDS
from tests.programs import Program

JOB = Job(model="micro", sequence=32, steps=20, warm_up=0, device="cpu")
MICRO = ["--device", "cpu", "--model", "micro", "--sequence", "32", "--held-out", "0.1"]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(1500)))
    return folder / "text.txt"


@pytest.fixture
def environment(text) -> dict[str, str]:
    return os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(text.parent / "cache")}


def record(folder: RunFolder, *steps: int, size: int = 10) -> RunFolder:
    """A folder with a record of `size` losses a line, each at its step."""
    folder.path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        folder.append(step=step, losses=[1.0] * size, tokens=1000, seconds=4.0)
    return folder


def end(folder: RunFolder) -> None:
    folder.finish(HELD_OUT, held_out={"own": 4.0, "error": 0.1, "BF16": 4.0}, kinds={}, layers=None)


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(convergence.app, [*MICRO, *arguments])
    return result.exit_code, result.output


def test_one_command_at_a_time_is_in_a_folder(tmp_path) -> None:
    folder = RunFolder(tmp_path / "run")
    with (
        folder.locked(),
        pytest.raises(ValueError, match=f"another command is training in {folder.path}; wait for it, or give another"),
        RunFolder(folder.path).locked(),
    ):
        pass
    with RunFolder(folder.path).locked():
        pass
    with pytest.raises(ValueError, match="--also a=b is given twice; leave one out"):
        chosen(["bf16"], ["a=b", "c=d", "a=b"])


def test_another_run_in_a_folder_is_refused_with_what_differs(tmp_path) -> None:
    with (folder := RunFolder(tmp_path)).locked():
        folder.claim("fp8booster-bf16", JOB, 2)
        folder.claim("fp8booster-bf16", JOB, 2)
        with pytest.raises(ValueError, match=r"holds a run that differs in ranks; give another --runs, or the options"):
            folder.claim("fp8booster-bf16", JOB, 1)
        with pytest.raises(ValueError, match=r"differs in micro_batch, lr; give"):
            folder.claim("fp8booster-bf16", replace(JOB, lr=1e-3, micro_batch=1), 2)
        (tmp_path / "job.json").write_text("{")
        with pytest.raises(ValueError, match=r"job.json is broken: .*; remove the run's folder"):
            folder.claim("fp8booster-bf16", JOB, 2)


def test_losses_are_one_for_each_step(tmp_path) -> None:
    twice = record(RunFolder(tmp_path / "twice"), 10, 10, 20, 20)
    with pytest.raises(ValueError, match=f"does not have one loss for each of 20 steps; remove {twice.path} to train"):
        twice.cut(20)
    assert len(twice.losses()) == 40  # as it was
    with pytest.raises(ValueError, match="one loss for each of 30 steps"):  # the checkpoint is of a later step
        record(RunFolder(tmp_path / "lost"), 10, 20).cut(30)
    end(twice)
    with pytest.raises(ValueError, match="one loss for each of 20 steps"):
        twice.claim("fp8booster-bf16", JOB, 1)
    end(whole := record(RunFolder(tmp_path / "whole"), 10, 20))
    whole.claim("fp8booster-bf16", JOB, 1)
    # a line of losses that are not finite has fewer
    (broken := record(record(RunFolder(tmp_path / "broken"), 10), 20, size=4)).finish(NOT_FINITE, at_step=15)
    broken.claim("fp8booster-bf16", JOB, 1)


@pytest.mark.parametrize("line", ['{"step": 20, "lo', "7", "\0\xff"])
def test_a_broken_line_is_named(tmp_path, line: str) -> None:
    folder = record(RunFolder(tmp_path), 10)
    with (tmp_path / "losses.jsonl").open("a") as stream:
        stream.write(line + "\n")
    with pytest.raises(ValueError, match=f"{tmp_path}/losses.jsonl, line 2, is broken: .*; remove the run's folder"):
        folder.losses()


def test_the_record_is_on_the_disk_before_checkpoints_go(tmp_path, monkeypatch) -> None:
    folder = record(RunFolder(tmp_path), 10)
    folder.checkpoints.mkdir()
    there: list[bool] = []
    monkeypatch.setattr(os, "fsync", lambda file: there.append(folder.checkpoints.exists()))
    end(folder)
    assert there == [True]
    assert not folder.checkpoints.exists()


def test_losses_and_samples_are_on_the_disk_before_their_checkpoint(tmp_path, monkeypatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda _: order.append("losses"))
    monkeypatch.setattr(learner, "new_checkpoint", lambda *_, **__: order.append("checkpoint") or nullcontext())
    monkeypatch.setattr(learner, "save_random_state", Mock())
    monkeypatch.setattr(learner, "batches", Mock())
    monkeypatch.setattr(learner, "_over_ranks", lambda losses, late, _: ([1.0] * len(losses), late))
    monkeypatch.setattr(learner.dist, "get_rank", lambda: 0)
    built = Mock(**{"optimizer.param_groups": [], "replica.count": 1})
    task = {"until": math.inf, "saves": True}
    recording = Mock(**{"flush.side_effect": lambda: order.append("samples")})
    assert learner._train(built, replace(JOB, steps=1), RunFolder(tmp_path), 0, task, torch.device("cpu"), recording)
    assert order == ["samples", "losses", "checkpoint"]


def place_of(tmp_path: Path, *statuses: int) -> Place:
    """A place whose ranks have ended."""
    place = Place(len(statuses), None, "none")
    place.run = Run(0, VARIANTS["bf16"], JOB, RunFolder(tmp_path))
    place._ends_at = time.monotonic() + 100
    place._hosts = [SimpleNamespace(ended=lambda _, status=status: status, kill=Mock()) for status in statuses]
    for rank in range(len(statuses)):
        (tmp_path / f"rank-{rank}.log").write_text(f"the log\nof rank {rank}")
    return place


def test_the_first_failure_is_the_reason(tmp_path) -> None:
    for rank, at in enumerate((2.0, 1.0)):
        file = tmp_path / f"rank-{rank}.failed"
        file.write_text(f"reason of rank {rank}")
        os.utime(file, (at, at))
    assert place_of(tmp_path, 1, 1).ended() == (True, "reason of rank 1")
    # one that the system ended wrote none, and others lost their connection to it
    (tmp_path / "rank-1.failed").unlink()
    assert place_of(tmp_path, 1, -9).ended() == (True, "rank 1 ended by signal SIGKILL: of rank 1")
    (tmp_path / "rank-0.failed").write_text("")  # on a full disk
    assert place_of(tmp_path, 1).ended() == (True, "rank 0 ended with code 1: of rank 0")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--minutes", "90", "--runs", "r"], "error: --limit is 3600 s, and a run fails then before --minutes 90 lets"),
        (["--also", "a=b", "--also", "a=b"], "error: --also a=b is given twice"),
        (["--held-out", "0.0001"], "error: --held-out 0.0001 of the text is "),
        (["--kind", "short={folder}/short.txt"], "error: the text of {folder}/short.txt is "),
        (["--micro-batch", "100000"], "error: The text has "),
        (["--json", "{folder}/short.txt/a.json"], "error: {folder}/short.txt/a.json cannot be written: "),
        (["--json", "{folder}"], "error: {folder} cannot be written: Is a directory; give another file or folder"),
        (["--out", "{folder}/short.txt"], "error: {folder}/short.txt/convergence-micro-1-seeds-0-1-2-3_"),
    ],
)
def test_a_mistake_is_found_before_training(text, tmp_path, monkeypatch, arguments: list[str], sentence: str) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    monkeypatch.setattr(convergence, "work_off", Mock(side_effect=AssertionError))
    (tmp_path / "short.txt").write_text("eleven and twelve")
    given = [each.format(folder=tmp_path) for each in arguments]
    code, output = invoke("--data", str(text), "--variant", "bf16", "--out", str(tmp_path / "out"), *given)
    assert output.replace("\n", "").startswith(sentence.format(folder=tmp_path))
    assert code == 2


def test_a_negative_seed_is_refused() -> None:
    code, output = invoke("--first-seed", "-1")
    assert code == 2
    assert "greater than or equal to 0" in output


def work_at_once(runs: Sequence[Run], at: Any, *, before_run: Any, after_run: Any, **options: Any) -> None:
    """End all runs, without training."""
    for run in runs:
        before_run(run)
        end(record(run.folder, 10, 20))
        after_run(run, None)


def test_what_cannot_be_written_on_the_way_ends_no_run(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    monkeypatch.setattr(convergence, "work_off", work_at_once)
    with monkeypatch.context() as patch:
        patch.setattr(Result, "write", Mock(side_effect=[OSError(28, "No space left on device"), []]))
        given = ["--data", str(text), "--variant", "bf16", "--steps", "20", "--json", str(tmp_path / "a.json")]
        code, output = invoke(*given, "--seeds", "1")
        assert "the result cannot be written: [Errno 28] No space left on device" in output
        assert code == 0
        patch.setattr(Result, "write", Mock(side_effect=[*[OSError(28, "No space left on device")] * 3, []]))
        code, output = invoke(*given, "--seeds", "2")
        assert output.count("cannot be written") == 3
        assert "2 of 2 runs have ended" in output
        assert code == 1  # no file has the result, which is shown
    assert not (tmp_path / "a.json").exists()  # it was tried, and nothing is left of that


def test_a_result_of_another_training_is_not_replaced(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    monkeypatch.setattr(convergence, "work_off", work_at_once)
    given = ["--data", str(text), "--variant", "bf16", "--steps", "20", "--seeds", "1", "--out", str(tmp_path)]
    assert invoke(*given)[0] == 0
    assert invoke(*given, "--at-once", "3")[0] == 0  # the same, another way
    for other in (["--lr", "1e-2"], ["--variant", "fp8"]):
        code, output = invoke(*given, *other)
        assert code == 2
        assert "is the result of another training; give another --out, or rename that file" in output


def test_what_follows_the_last_step(text, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(text.parent / "cache"))
    job = replace(JOB, steps=1, held_out=0.1)
    job = replace(job, tokens=tokens_of(str(text), "text", job))
    beyond, short = runs = [
        Run.of(tmp_path / name, chosen(["bf16"], []), [0], replace(job, **changes))[0]
        for name, changes in (
            ("beyond", {"lr": 1e39}),  # the weights are not finite
            ("short", {"held_out": 0.001}),
        )
    ]
    reasons: list[str | None] = []
    work_off(
        runs,
        places(1, 1, "cpu"),
        until=math.inf,
        limit_s=TEST_SECONDS,
        saves=True,
        before_run=Mock(),
        after_run=lambda _, reason: reasons.append(reason),
    )
    assert reasons[0] is None
    assert len(beyond.folder.losses()) == 1
    assert beyond.folder.end() == {"end": NOT_FINITE, "at_step": 1}
    # what fails there does not take the training with it
    assert str(reasons[1]).startswith("ValueError: --held-out 0.001 of the text is")
    assert short.folder.resumes_at == 1


@pytest.mark.parametrize(
    ("finite", "own", "ended"),
    [(True, 4.0, HELD_OUT), (False, 4.0, NOT_FINITE), (True, math.nan, NOT_FINITE), (True, math.inf, NOT_FINITE)],
)
def test_a_run_is_finite_to_the_end(tmp_path, monkeypatch, finite: bool, own: float, ended: str) -> None:
    found = {HELD_OUT: {"own": 4.0, "error": math.nan}, "code": {"own": own, "BF16": math.nan}}
    monkeypatch.setattr(learner, "evaluate", lambda *_: found)
    monkeypatch.setattr(learner, "facts_of", lambda _: {})
    monkeypatch.setattr(learner.dist, "get_rank", lambda: 0)
    built = Mock()
    built.boosted.is_finite.return_value = finite
    learner._finish(built, JOB, folder := RunFolder(tmp_path), torch.device("cpu"))
    assert folder.end()["end"] == ended


def test_a_command_that_is_asked_to_end_saves(text, tmp_path, environment) -> None:
    given = ["--data", text, "--variant", "bf16", "--steps", "100000", "--seeds", "2", "--runs", tmp_path]
    program = Program("benchmarks.convergence", *MICRO, *given, environment=environment)
    folder = RunFolder(tmp_path / "seed-0" / "bf16")
    try:
        while not folder.losses():
            assert program.returncode is None, program.stderr
            time.sleep(0.1)
        with pytest.raises(ValueError, match="another command is training"), folder.locked():
            pass
        program.send_signal(signal.SIGTERM)
        assert program.wait() == 0
    finally:
        program.kill()
    assert "seed 0, BF16: saved after" in program.stderr
    assert "seed 1" not in program.stderr
    assert folder.resumes_at == len(folder.losses()) > 0
    assert not folder.stop.exists()


def test_without_a_folder_of_runs_a_command_ends_at_once(monkeypatch) -> None:
    place = Mock(run=None, ranks=1)
    run = Mock()
    run.folder.end.return_value = None
    run.folder.locked.return_value.__enter__ = run.folder.locked.return_value.__exit__ = Mock(return_value=False)
    place.begin.side_effect = lambda *_: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        work_off([run], [place], until=float("inf"), limit_s=1, saves=False, before_run=Mock(), after_run=Mock())
    assert ended.value.code == 143
    place.close.assert_called_once()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
