"""Errors of use, and of the machine, as sentences."""

from __future__ import annotations

import errno
from typing import Any

from fp8booster.reading import first_line

USER_ERRORS = (ValueError, TypeError, OSError)
"""Exceptions of wrong use, each with a sentence that says what to do; others are defects."""

_FULL_DISK = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "PytorchStreamWriter failed writing",
    "iostream error",  # torch, of a file that it writes
)


class OutOfMemory(ChildProcessError):
    """A GPU has too little memory for a run."""

    def __init__(self, message: str, gpu_memory: int, task: Any) -> None:
        """`gpu_memory` is the GPU's, in bytes; `task` is the `launch.Task` that wants it."""
        super().__init__(message)
        self.gpu_memory, self.task = gpu_memory, task


def describe(error: BaseException) -> str:
    """Return an error as one sentence for the user."""
    if _is_out_of_memory(error):
        return (
            "A GPU ran out of memory; lower --batch or --sequence, add --checkpointing, or use more processes "
            f"({str(error).partition('. ')[0]})."
        )
    if (refused := refused_write(error)) is not None:
        return (
            f"The disk took no more ({first_line(refused)}); make room and --resume the run, whose checkpoints of "
            "before are whole."
        )
    if isinstance(error, USER_ERRORS):
        return str(error)
    return f"{type(error).__name__}: {first_line(error)}"


def _is_out_of_memory(error: BaseException) -> bool:
    return type(error).__name__ == "OutOfMemoryError"  # torch's, which the command does not import for its --help


def exhausted_memory(error: BaseException) -> int | None:
    """Return the bytes of this rank's GPU where the error is that they did not suffice."""
    if not _is_out_of_memory(error):
        return None
    import torch

    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def refused_write(error: BaseException | None) -> BaseException | None:
    """Return the error of Python, safetensors or torch that a write failed for want of room; None where there is none.

    It is the error or one that it arose from: torch fails once more as it closes a file that it could not write.
    """
    while error is not None:
        if isinstance(error, OSError):
            full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        else:
            # torch and safetensors raise errors without errno
            full = any(words in str(error) for words in _FULL_DISK)
        if full:
            return error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return None
