"""What a worker process tells the command through a pipe."""

from __future__ import annotations

import errno
import os
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from fp8booster.reading import first_line

if TYPE_CHECKING:
    from .task import Task

EVENTS_VARIABLE = "FP8BOOSTER_TRAIN_EVENTS"
"""Environment variable with the file descriptor that a worker writes to."""

COMMAND_VARIABLE = "FP8BOOSTER_TRAIN_COMMAND"
"""Environment variable with the process id of the command that started a worker."""

USER_ERRORS = (ValueError, TypeError, OSError)
"""What the package raises when it is used wrongly, with a sentence that says what to do; others are defects."""


class OutOfMemory(ChildProcessError):
    """What a run wants does not fit on a GPU."""

    task: Task
    """What was to be done."""

    def __init__(self, message: str, gpu_memory: int) -> None:
        """`gpu_memory` is the GPU's, in bytes."""
        super().__init__(message)
        self.gpu_memory = gpu_memory


class Events:
    """The worker's end of the pipe."""

    def __init__(self) -> None:
        self._pipe = Connection(int(os.environ[EVENTS_VARIABLE]), readable=False)

    def send(self, kind: str, **values: Any) -> None:
        """Send one event.

        Kinds: "status" (text), "notice" (text, a sentence to keep), "start" (done, steps), "step" (a line of
        metrics), "checkpoint" (folder, step), "stopped" (step), "done", "error" (message, expected, and where a GPU
        had no room, gpu_memory: its bytes).
        """
        self._pipe.send({"kind": kind, **values})

    def send_error(self, error: BaseException) -> None:
        """Send what ended the worker as a sentence; the traceback goes to standard error, which is the log."""
        expected = isinstance(error, USER_ERRORS) or _refused_write(error) is not None
        memory = _exhausted_memory(error)
        exhausted = {} if memory is None else {"gpu_memory": memory}
        self.send("error", message=describe(error), expected=expected, **exhausted)
        with suppress(OSError):  # the log's own disk may be full
            traceback.print_exception(error)


def describe(error: BaseException) -> str:
    """An error as one sentence for the user."""
    if _is_out_of_memory(error):
        return (
            "A GPU ran out of memory; lower --batch or --sequence, add --checkpointing, or use more processes "
            f"({str(error).partition('. ')[0]})."
        )
    if (refused := _refused_write(error)) is not None:
        return (
            f"The disk took no more ({first_line(refused)}); make room and --resume the run, whose checkpoints of "
            "before are whole."
        )
    if isinstance(error, USER_ERRORS):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _is_out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch's, which the command does not import for its --help


def _exhausted_memory(error: BaseException) -> int | None:
    """Bytes of this rank's GPU, where the error is that they did not suffice."""
    if not _is_out_of_memory(error):
        return None
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _refused_write(error: BaseException | None) -> BaseException | None:
    """What says that a write failed for want of room, by Python, by safetensors or by torch; None where nothing does.

    It is the error or one that it arose from: torch fails once more as it closes a file that it could not write.
    """
    while error is not None:
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        else:
            full = any(words in str(error) for words in _FULL)
        if full:
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None


_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "PytorchStreamWriter failed writing",
    "iostream error",  # torch, of a file that it writes
)
