"""A rank's process: `python -m fp8booster.cli.train.rank` trains the task in its argument."""

from __future__ import annotations

import json
import os
import pickle
import sys
import threading
import time
import traceback
import warnings
from contextlib import suppress
from typing import TextIO

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

from fp8booster.training.ranks import StopRequest

from .errors import USER_ERRORS, describe, exhausted_memory, refused_write
from .launch import Task
from .progress import make_display

_LOOK = 1.0  # seconds between looks whether the command is there


class ErrorFile(ErrorHandler):
    """Write what ended a rank as a sentence to the file in which the elastic launcher looks."""

    def record_exception(self, e: BaseException) -> None:
        """Write the sentence, whether its cause is the user's or the machine's, and of a GPU without room its size."""
        # the launcher's process decides by it whether to show a sentence or a log
        told = {
            "message": describe(e),
            "expected": isinstance(e, USER_ERRORS) or refused_write(e) is not None,
            "timestamp": int(time.time()),  # which the launcher reads
            "time": time.time(),
        }
        if (memory := exhausted_memory(e)) is not None:
            told["gpu_memory"] = memory
        self._write_error_file(os.environ["TORCHELASTIC_ERROR_FILE"], json.dumps(told))


def train_rank() -> None:
    """Train the task. What libraries print goes to the rank's log, which leaves the console to rank 0's display."""
    stop = StopRequest()  # before the imports below, which take seconds
    rank = int(os.environ["RANK"])
    task: Task = pickle.loads(bytes.fromhex(sys.argv[1]))
    console = _log_streams(task, rank)
    with warnings.catch_warnings():
        # colossalai advertises tensornvme and apex, which training does not need
        warnings.filterwarnings("ignore", message="Please install")
        from .loop import train

    if rank > 0:
        # one rank speaks for all, or each line would come as often as there are ranks
        train(task, lambda kind, **values: None, lambda: stop.wanted)
        return
    with make_display(task.options.progress, task.precision, console) as display:
        train(task, display.show, lambda: stop.wanted)


def _log_streams(task: Task, rank: int) -> TextIO:
    """Send standard output and standard error to the rank's log; return what standard error was."""
    # libraries in C++ write to the descriptors, past Python's streams
    console = os.fdopen(os.dup(2), "w", buffering=1)
    with task.log(rank).open("ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    return console


def _end_with_the_command() -> None:
    """End this process when the command that started it is gone: a rank that waits for another would stay for good."""
    command = os.getppid()

    def watch() -> None:
        while os.getppid() == command:
            time.sleep(_LOOK)
        # not `sys.exit`, which ends this thread alone
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Train; return the exit status."""
    _end_with_the_command()
    try:
        record(train_rank, ErrorFile())()
    except Exception:
        with suppress(OSError):  # the log's disk may be full
            traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    # The run is over and its files are closed. A regular exit now and then aborts in the threads of process groups
    # that colossalai's objects still hold, which would turn a finished run into a failed one.
    os._exit(status)
