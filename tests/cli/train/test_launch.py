from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import ProcessFailure

from fp8booster.cli.train import launch
from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.errors import OutOfMemory
from fp8booster.cli.train.launch import Task
from fp8booster.cli.train.options import TrainOptions

KILLED = (-signal.SIGKILL, None)
LOST = (1, {"message": "RuntimeError: Connection closed by peer", "expected": False, "time": 2.5})
WRONG = (1, {"message": "give another --lr.", "expected": True, "time": 2.0})
DEFECT = (1, {"message": "KeyError: 3", "expected": False, "time": 2.25})
NO_ROOM = (1, {"message": "A GPU ran out of memory", "expected": False, "time": 1.0, "gpu_memory": 80})


@pytest.mark.parametrize(
    ("ends", "kind", "says"),
    [
        ([LOST, WRONG], ValueError, r"^give another --lr\.$"),
        ([LOST, KILLED], ChildProcessError, r"^Rank 1 was ended by signal SIGKILL\. .* --resume the run\.$"),
        ([LOST, DEFECT], ChildProcessError, r"^KeyError: 3 \(the traceback is in .*fp8/logs\)$"),
        ([NO_ROOM, LOST], OutOfMemory, r"^A GPU ran out of memory \(the traceback is in .*fp8/logs\)$"),
        (
            [(-signal.SIGTERM, None)],
            ChildProcessError,
            r"^Rank 0 was ended by signal SIGTERM; its log .* ends: b \| c \| d$",
        ),
        ([(3, None)], ChildProcessError, r"^Rank 0 ended with code 3; its log"),
    ],
)
def test_the_first_cause_is_told(tmp_path: Path, ends: list, kind: type, says: str) -> None:
    tokens = TokenFile(tmp_path, "", "", 300, 1)
    task = Task(options=TrainOptions(out=str(tmp_path)), precision="fp8", tokens=tokens, resume=None)
    task.log(0).parent.mkdir(parents=True)
    task.log(0).write_text("a\nb\nc\nd\n")
    failures = {}
    for rank, (code, told) in enumerate(ends):
        file = tmp_path / f"{rank}.json"
        if told is not None:
            file.write_text(json.dumps({**told, "timestamp": int(told["time"])}))
        failures[rank] = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file=str(file))
    error = launch._cause(failures, task)
    assert type(error) is kind
    assert re.search(says, str(error))
    if kind is OutOfMemory:
        assert (error.gpu_memory, error.task) == (80, task)
