"""A rank's process: `python -m fp8booster.cli.train.worker` reads its task from standard input and trains."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import pickle
import sys
import threading
import time
import warnings

from fp8booster.training.ranks import StopRequest

from .events import COMMAND_VARIABLE, Events
from .task import Task

_LOOK = 1.0  # seconds between looks whether the command is there


def end_with_the_command() -> None:
    """End this process when the command that started it is gone: a rank that waits for another would stay for good."""
    command = int(os.environ[COMMAND_VARIABLE])  # not the parent of now: the command may have gone since

    def watch() -> None:
        while os.getppid() == command:
            time.sleep(_LOOK)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    """Train; returns the exit status. What goes wrong is sent to the command as a sentence."""
    faulthandler.enable()
    end_with_the_command()
    stop = StopRequest()
    events = Events()
    try:
        task: Task = pickle.load(sys.stdin.buffer)
        with warnings.catch_warnings():
            # colossalai advertises tensornvme and apex, which training does not need
            warnings.filterwarnings("ignore", message="Please install")
            from .loop import train

        train(task, events, lambda: stop.wanted)
    except Exception as error:
        events.send_error(error)
        return 1
    return 0


if __name__ == "__main__":
    status = main()
    with contextlib.suppress(OSError):  # the log's disk may be full
        sys.stdout.flush()
        sys.stderr.flush()
    # The run is over and its files are closed. A regular exit now and then aborts in the threads of process groups
    # that colossalai's objects still hold, which would turn a finished run into a failed one.
    os._exit(status)
