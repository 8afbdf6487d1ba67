from __future__ import annotations

import errno
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError

from fp8booster.cli.train import loop, rank
from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.launch import Task
from fp8booster.cli.train.options import TrainOptions


@pytest.fixture
def told(monkeypatch, tmp_path):
    """`told(error)`: the content of the error file of a rank that ends with an error."""
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
    monkeypatch.setattr(rank, "_end_with_the_command", lambda: None)

    def end_with(error: BaseException) -> dict[str, Any]:
        def fail() -> None:
            raise error

        monkeypatch.setattr(rank, "train_rank", fail)
        assert rank.main() == 1
        return json.loads(file.read_text())

    return end_with


class FullDisk:
    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_is_told_where_its_log_is_on_the_full_disk(told, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    found = told(OSError(errno.ENOSPC, "No space left on device", "weights.bin"))
    assert found["expected"]
    assert found["message"].startswith("The disk took no more ([Errno 28] No space left on device: 'weights.bin'")
    assert "make room and --resume the run" in found["message"]


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/3"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
    ],
)
def test_a_full_disk_is_told_by_whatever_package_writes(told, error) -> None:
    found = told(error)
    assert found["expected"]
    assert found["message"].startswith("The disk took no more (")
    assert "\n" not in found["message"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no file that takes nothing")
@pytest.mark.parametrize("numel", [10, 100_000])  # the larger is not taken while the file is open, and not as it closes
def test_a_full_disk_is_told_of_what_torch_raises_today(told, numel) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.save({"weight": torch.zeros(numel)}, "/dev/full")
    found = told(raised.value)
    assert found["expected"]
    assert found["message"].startswith("The disk took no more (")


def test_other_errors_keep_their_words(told) -> None:
    found = told(RuntimeError("first\nsecond"))
    assert (found["message"], found["expected"]) == ("RuntimeError: first", False)
    assert (
        told(PermissionError(errno.EACCES, "Permission denied", "a"))["message"] == "[Errno 13] Permission denied: 'a'"
    )


def test_a_rank_that_fails_reports_before_it_leaves_the_others(monkeypatch, tmp_path) -> None:
    left = []

    class Failing:
        def __init__(self, *_: object) -> None: ...

        def run(self) -> None:
            raise OSError("a disk")

    monkeypatch.setattr(loop, "Trainer", Failing)
    monkeypatch.setattr(loop, "join_ranks", lambda *_: None)
    monkeypatch.setattr(loop.dist, "get_world_size", lambda *_: 1)
    monkeypatch.setattr(loop.dist, "destroy_process_group", lambda: left.append(True))
    tokens = TokenFile(tmp_path, "", "", 300, 1)
    task = Task(options=TrainOptions(), precision="bf16", tokens=tokens, resume=None)
    with pytest.raises(OSError, match="a disk"):
        loop.train(task, print, lambda: False)
    assert not left
