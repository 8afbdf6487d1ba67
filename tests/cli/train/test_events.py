from __future__ import annotations

import errno
import multiprocessing
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from fp8booster.cli.train import loop
from fp8booster.cli.train.events import EVENTS_VARIABLE, Events
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.task import Task
from fp8booster.cli.train.tokens import TokenFile


@pytest.fixture
def sent(monkeypatch):
    """`sent(error)`: the event that comes out of the pipe when a worker meets an error."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    monkeypatch.setenv(EVENTS_VARIABLE, str(os.dup(writer.fileno())))
    events = Events()

    def send(error: BaseException) -> dict:
        events.send_error(error)
        return reader.recv()

    yield send
    events._pipe.close()


class FullDisk:
    def write(self, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_an_error_is_told_where_its_log_is_on_the_full_disk(sent, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stderr", FullDisk())
    event = sent(OSError(errno.ENOSPC, "No space left on device", "weights.bin"))
    assert event["expected"]
    assert event["message"].startswith("The disk took no more ([Errno 28] No space left on device: 'weights.bin'")
    assert "make room and --resume the run" in event["message"]


@pytest.mark.parametrize(
    "error",
    [
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("[enforce fail at inline_container.cc:862] . PytorchStreamWriter failed writing file data/3"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
    ],
)
def test_a_full_disk_is_told_by_whatever_package_writes(sent, error) -> None:
    event = sent(error)
    assert event["expected"]
    assert event["message"].startswith("The disk took no more (")
    assert "\n" not in event["message"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no file that takes nothing")
@pytest.mark.parametrize("numel", [10, 100_000])  # the larger is not taken while the file is open, and not as it closes
def test_a_full_disk_is_told_of_what_torch_raises_today(sent, numel) -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.save({"weight": torch.zeros(numel)}, "/dev/full")
    event = sent(raised.value)
    assert event["expected"]
    assert event["message"].startswith("The disk took no more (")


def test_other_errors_keep_their_words(sent) -> None:
    assert sent(RuntimeError("first\nsecond")) == {"kind": "error", "message": "RuntimeError: first", "expected": False}
    assert (
        sent(PermissionError(errno.EACCES, "Permission denied", "a"))["message"] == "[Errno 13] Permission denied: 'a'"
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
        loop.train(task, None, lambda: False)
    assert not left
