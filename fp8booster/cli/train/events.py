"""What a worker process tells the command through a pipe."""

from __future__ import annotations

import errno
import os
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from fp8booster.reading import first_line

EVENTS_VARIABLE = "FP8BOOSTER_TRAIN_EVENTS"
"""Environment variable with the file descriptor that a worker writes to."""

USER_ERRORS = (ValueError, TypeError, OSError)
"""What the package raises when it is used wrongly, with a sentence that says what to do; others are defects."""


class Events:
    """The worker's end of the pipe."""

    def __init__(self) -> None:
        self._pipe = Connection(int(os.environ[EVENTS_VARIABLE]), readable=False)

    def send(self, kind: str, **values: Any) -> None:
        """Send one event.

        Kinds: "status" (text), "notice" (text, a sentence to keep), "start" (done, steps), "step" (a line of
        metrics), "checkpoint" (folder, step), "stopped" (step), "done", "error" (message, expected).
        """
        self._pipe.send({"kind": kind, **values})

    def send_error(self, error: BaseException) -> None:
        """Send what ended the worker as a sentence; the traceback goes to standard error, which is the log."""
        expected = isinstance(error, USER_ERRORS) or _disk_is_full(error)
        self.send("error", message=describe(error), expected=expected)
        with suppress(OSError):  # the log's own disk may be full
            traceback.print_exception(error)


def describe(error: BaseException) -> str:
    """An error as one sentence for the user."""
    name = type(error).__name__
    if name == "OutOfMemoryError":
        return (
            "A GPU ran out of memory; lower --batch or --sequence, add --checkpointing, or use more processes "
            f"({str(error).partition('. ')[0]})."
        )
    if _disk_is_full(error):
        return (
            f"The disk took no more ({first_line(error)}); make room and --resume the run, whose checkpoints of before "
            "are whole."
        )
    if isinstance(error, USER_ERRORS):
        return str(error)
    return f"{name}: {first_line(error)}"


def _disk_is_full(error: BaseException) -> bool:
    """Whether a write failed for want of room, by Python, by safetensors or by torch."""
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return any(words in str(error) for words in _FULL)


_FULL = ("No space left on device", "Disk quota exceeded", "File too large", "PytorchStreamWriter failed writing")
