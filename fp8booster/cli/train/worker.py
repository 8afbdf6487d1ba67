"""A rank's process: `python -m fp8booster.cli.train.worker` reads its task from standard input and trains."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import warnings

from .events import Events
from .task import Task


class StopRequest:
    """Set by SIGTERM or SIGINT: save after the step at hand and end."""

    def __init__(self) -> None:
        self.wanted = False
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: object) -> None:
        self.wanted = True


def main() -> int:
    """Train; returns the exit status. What goes wrong is sent to the command as a sentence."""
    faulthandler.enable()
    stop = StopRequest()
    events = Events()
    try:
        task = Task.from_json(sys.stdin.read())
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
    sys.stdout.flush()
    sys.stderr.flush()
    # The run is over and its files are closed. A regular exit now and then aborts in the threads of process groups
    # that colossalai's objects still hold, which would turn a finished run into a failed one.
    os._exit(status)
