"""Real runs of `fp8booster train` on two gloo ranks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from fp8booster.checkpoints import write_manifest
from tests.colossal.payload import Payload
from tests.distributed import TEST_SECONDS
from tests.programs import Program, run_program

ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}
SMALL = ("--vocabulary", "512", "--batch", "2", "--sequence", "32", "--progress", "lines")


def train(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    return run_program("fp8booster", "train", *arguments, environment=ENVIRONMENT, **options)


def succeed(*arguments: object) -> str:
    done = train(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in metrics(folder)}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> tuple[object, ...]:
    """Options that name a little real text and a cache that all runs of this file share."""
    folder = tmp_path_factory.mktemp("data")
    for name in ("argparse.py", "ast.py"):
        shutil.copy(Path(sysconfig.get_paths()["stdlib"], name), folder)
    return ("--data", folder, "--cache", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory, data) -> tuple[Path, str]:
    """A run in both precisions with a checkpoint in the middle, and what it printed."""
    out = tmp_path_factory.mktemp("compared") / "run"
    return out, succeed("--steps", 6, "--save", 3, "--out", out, *data, *SMALL)


def test_a_run_in_both_precisions_ends_with_a_table_and_keeps_its_files(compared):
    out, printed = compared
    assert re.search(r"linear layers in FP8 +│ +0 of 29 +│ +28 of 29", printed)
    assert "FP8 run, not in FP8: lm_head" in printed
    bf16, fp8 = losses(out / "bf16"), losses(out / "fp8")
    assert list(bf16) == list(fp8) == [1, 2, 3, 4, 5, 6]
    # the same weights and batches: only FP8's rounding lies between the two, but it does lie there
    assert fp8[1] == pytest.approx(bf16[1], rel=2e-3)
    assert fp8[1] != bf16[1]
    assert bf16[6] < bf16[1] - 0.1
    assert fp8[6] == pytest.approx(bf16[6], rel=1e-2)
    for name in ("summary.md", "summary.json", "loss.png", "run.json", "fp8/result.json"):
        assert (out / name).stat().st_size > 0
    assert any((out / "fp8" / "tensorboard").iterdir())
    line = metrics(out / "bf16")[-1]
    assert line["peak_memory"] > 100e6
    # ZeRO-2 on two ranks: half of the BF16 gradients leave by reduce-scatter, half of the weights by all-gather
    parameters = json.loads((out / "bf16" / "result.json").read_text())["parameters"]
    assert line["wire_bytes"] == pytest.approx(2 * parameters, rel=1e-3)
    assert line["grad_norm"] > 0


def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(compared, tmp_path):
    whole = compared[0] / "fp8"
    succeed("--resume", whole / "checkpoints" / "step-00000003", "--out", tmp_path)
    resumed = tmp_path / "fp8"
    for was, now in zip(metrics(whole)[3:], metrics(resumed), strict=True):
        for name in ("step", "loss", "lr", "grad_norm"):
            assert was[name] == now[name]
    last = Path("checkpoints", "step-00000006")
    files = [*(whole / last / "masters").iterdir(), *(whole / last / "model").glob("*.safetensors")]
    assert len(files) == 3
    for file in files:
        was, now = load_file(file), load_file(resumed / file.relative_to(whole))
        assert was.keys() == now.keys()
        assert all(was[name].equal(now[name]) for name in was)


def test_a_checkpoint_resumes_on_another_number_of_processes(compared, tmp_path):
    whole = compared[0] / "bf16"
    checkpoint = whole / "checkpoints" / "step-00000003"
    succeed("--resume", checkpoint, "--out", tmp_path, "--nproc", 1, "--accumulate", 2)
    was, now = losses(whole), losses(tmp_path / "bf16")
    # the same sequences a step; only the order of sums differs
    assert [now[step] for step in (4, 5, 6)] == pytest.approx([was[step] for step in (4, 5, 6)], rel=1e-3)
    assert now[4] != pytest.approx(was[5], rel=1e-4)


@pytest.fixture
def copy(compared, tmp_path) -> Path:
    """A copy of the run in both precisions, to change."""
    return Path(shutil.copytree(compared[0], tmp_path / "run"))


def test_a_checkpoint_that_one_rank_cannot_load_leaves_the_run_as_it_was(copy):
    checkpoint = copy / "fp8" / "checkpoints" / "step-00000006"
    (checkpoint / "random" / "rank-00001.pt").unlink()
    write_manifest(checkpoint)

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in copy.rglob("*") if path.is_file() and path.suffix != ".log"}

    before = contents()
    done = train("--resume", checkpoint, "--steps", 7)
    assert done.returncode == 2
    assert "rank-00001.pt" in done.stderr
    assert contents() == before


def test_a_checkpoint_with_a_changed_file_is_refused_and_the_one_before_is_named(copy):
    before, newest = (copy / "fp8" / "checkpoints" / name for name in ("step-00000003", "step-00000006"))
    masters = newest / "masters" / "rank-00001-of-00002.safetensors"
    data = bytearray(masters.read_bytes())
    data[-9] ^= 1  # a value, which any reader takes
    masters.write_bytes(data)
    done = train("--resume", copy, "--steps", 7)
    assert done.returncode == 2
    assert f"error: {newest} is broken: masters/{masters.name} is of another step, or changed; " in done.stderr
    assert f"--resume {before} with another --out." in done.stderr
    # of a run that is finished no checkpoint is read
    assert "6 steps" in succeed("--resume", copy)
    # nor is the other one, which is broken too
    (before / "state.json").write_text((before / "state.json").read_text() + "\n")
    done = train("--resume", copy, "--steps", 7)
    assert done.returncode == 2
    assert "--resume" not in done.stderr


def test_a_person_starts_it(data, tmp_path):
    """In processes of their own, which import what they need."""
    command = ("-m", "fp8booster", "train", "--precision", "fp8", "--nproc", 1, "--steps", 2, "--out", tmp_path)
    words = [sys.executable, *map(str, (*command, *data, *SMALL))]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TEST_SECONDS, env=ENVIRONMENT, check=False)
    assert done.returncode == 0, done.stderr
    assert "28 of 29" in done.stdout
    assert list(losses(tmp_path / "fp8")) == [1, 2]


def test_torchrun_brings_the_processes(compared, data, tmp_path):
    whole, _ = compared
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    command = ("-m", "fp8booster", "train", "--steps", 2, "--out", tmp_path, *data, *SMALL)
    done = run_program(*launcher, *command, environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("linear layers in FP8") == 1
    for precision in ("bf16", "fp8"):
        was = losses(whole / precision)
        assert losses(tmp_path / precision) == {step: was[step] for step in (1, 2)}


def wait_until(process: Program, come: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TEST_SECONDS
    while not come():
        assert process.returncode is None, process.stderr
        assert time.monotonic() < deadline
        time.sleep(0.1)


def begin(out: Path, *arguments: object) -> tuple[Program, list[psutil.Process]]:
    """Start a long run; the command and its ranks, when it has done two steps."""
    arguments = ("train", "--steps", 5000, "--out", out, *arguments, *SMALL)
    process = Program("fp8booster", *arguments, environment=ENVIRONMENT)
    wait_until(process, lambda: sum(len(path.read_text().splitlines()) for path in out.glob("*/metrics.jsonl")) >= 2)
    ranks = psutil.Process(process.pid).children()
    assert len(ranks) == 2
    return process, sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))


def test_an_interrupted_run_says_how_to_go_on_and_does(tmp_path, data):
    out = tmp_path / "run"
    process, _ = begin(out, "--precision", "fp8", "--stage", 1, "--accumulate", 2, *data)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate()
    assert process.returncode == 130
    assert "Traceback" not in said
    assert f"Continue with: fp8booster train --resume {out}" in said
    (checkpoint,) = (out / "fp8" / "checkpoints").iterdir()
    step = int(checkpoint.name.removeprefix("step-"))
    before = losses(out / "fp8")
    assert list(before) == list(range(1, step + 1))

    succeed("--resume", out, "--steps", step + 2)
    after = losses(out / "fp8")
    assert list(after) == list(range(1, step + 3))
    assert {number: after[number] for number in before} == before


def test_a_rank_that_dies_ends_the_run_with_its_name(tmp_path, data):
    process, workers = begin(tmp_path / "run", "--precision", "bf16", *data)
    # not rank 0, whose peers lose its connection first and say so
    workers[1].kill()
    _, said = process.communicate()
    assert process.returncode == 2
    assert "Traceback" not in said
    assert "error: Rank 1 was ended by signal SIGKILL. " in said
    assert not psutil.wait_procs(workers, timeout=30)[1]


def is_told_to_stop(worker: psutil.Process) -> bool:
    """Tell whether SIGTERM waits for a process that is stopped."""
    pending = re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{worker.pid}/status").read_text())[1]
    return bool(int(pending, 16) >> (signal.SIGTERM - 1) & 1)


def test_a_second_signal_before_a_save_tells_what_was_lost(tmp_path, data):
    process, workers = begin(tmp_path / "run", "--precision", "bf16", *data)
    for worker in workers:
        worker.suspend()  # so that none saves before the second signal
    wait_until(process, lambda: all(worker.status() == psutil.STATUS_STOPPED for worker in workers))
    process.send_signal(signal.SIGTERM)
    wait_until(process, lambda: all(map(is_told_to_stop, workers)))
    wait_until(process, lambda: "Stopping: the step at hand is taken and saved first." in process.stderr)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate()
    assert process.returncode == 130
    lost = re.search(r"Stopped at step (\d+) without saving its last (\d+) steps; no step was saved\.", said)
    assert lost, said
    assert int(lost[1]) == int(lost[2]) >= 2


def test_a_disk_that_is_full_is_told_and_the_run_goes_on_from_what_is_whole(compared, data, tmp_path):
    out = Path(shutil.copytree(compared[0], tmp_path / "run"))
    done = train("--resume", out, "--steps", 7, largest_file=1 << 20)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "error: The disk took no more (" in done.stderr
    assert sorted(path.name for path in (out / "bf16" / "checkpoints").glob("step-*")) == [
        "step-00000003",
        "step-00000006",
    ]


def test_code_in_a_checkpoint_does_not_run_and_is_not_recommended(copy, tmp_path):
    checkpoint = copy / "fp8" / "checkpoints" / "step-00000006"
    for file in (checkpoint / "random").iterdir():
        torch.save({"torch": Payload(tmp_path / "ran")}, file)
    write_manifest(checkpoint)
    done = train("--resume", checkpoint, "--steps", 7)
    assert done.returncode == 2
    assert "asks for posix.mkdir" in done.stderr
    assert "do not trust this checkpoint" in done.stderr
    assert "weights_only" not in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_rank_that_waits_ends_when_the_command_is_killed(tmp_path, data):
    process, workers = begin(tmp_path / "run", "--precision", "bf16", *data)
    workers[0].suspend()
    process.kill()
    process.wait()
    try:
        assert psutil.wait_procs(workers[1:], timeout=60)[0]
    finally:
        for worker in workers:
            if worker.is_running():
                worker.kill()


def test_a_resume_that_is_refused_leaves_the_run_as_it_was(compared):
    out, _ = compared
    before = (out / "run.json").read_text()
    for arguments, says in (
        (("--steps", 2), "has done 6 steps and --steps is 2; give more --steps"),
        (("--lr", 1e-4), "has taken all its 6 steps, so --lr changes nothing; give more --steps"),
        (("--plugin", "gemini"), "was trained with --plugin low_level_zero; resume it without another --plugin"),
        (("--steps", 8, "--batch", 100000), "tokens and one step takes"),
    ):
        done = train("--resume", out, *arguments)
        assert done.returncode == 2
        assert says in done.stderr
    # a sentence of a rank's
    done = train("--resume", out, "--steps", 8, "--data", out / "summary.md", "--batch", 1, "--sequence", 2)
    assert done.returncode == 2
    assert "was trained on other text" in done.stderr
    assert (out / "run.json").read_text() == before


def test_too_little_text_is_one_sentence_and_leaves_the_folder_free(tmp_path):
    file = tmp_path / "short.txt"
    file.write_text("too short")
    done = train("--data", file, "--cache", tmp_path / "cache", "--out", tmp_path / "run", *SMALL)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "tokens and one step takes 128 (2 replicas x 1 micro-batches x 2 sequences x 32 tokens)" in done.stderr
    assert not (tmp_path / "run").exists()
