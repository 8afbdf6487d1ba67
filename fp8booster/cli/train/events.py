"""What a worker process tells the command: one JSON object a line, through a pipe."""

from __future__ import annotations

import json
import os
import traceback
from typing import Any, TextIO

EVENTS_VARIABLE = "FP8BOOSTER_TRAIN_EVENTS"
"""Environment variable with the file descriptor that a worker writes to."""

USER_ERRORS = (ValueError, TypeError, OSError)
"""Errors whose message is a sentence for the user. Others carry their traceback to the log."""


class Events:
    """The worker's end of the pipe."""

    def __init__(self) -> None:
        self._stream: TextIO = os.fdopen(int(os.environ[EVENTS_VARIABLE]), "w", buffering=1)

    def send(self, kind: str, **values: Any) -> None:
        """Send one event.

        Kinds: "status" (text), "notice" (text, a sentence to keep), "start" (done, steps), "step" (a line of
        metrics), "checkpoint" (folder, step), "stopped" (step), "done", "error" (message, expected).
        """
        self._stream.write(json.dumps({"kind": kind, **values}) + "\n")

    def send_error(self, error: BaseException) -> None:
        """Send what ended the worker as a sentence; the traceback goes to standard error, which is the log."""
        traceback.print_exception(error)
        self.send("error", message=describe(error), expected=isinstance(error, USER_ERRORS))


def describe(error: BaseException) -> str:
    """An error as one sentence for the user."""
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return (
            "A GPU ran out of memory; lower --batch or --sequence, add --checkpointing, or use more processes "
            f"({str(error).partition('. ')[0]})."
        )
    if isinstance(error, USER_ERRORS):
        return str(error)
    return f"{name}: {(str(error).splitlines() or ['no message'])[0]}"
