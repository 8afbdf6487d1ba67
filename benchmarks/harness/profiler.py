"""The profiler of GPUs serves one process of a machine at a time: whoever comes second sees no kernels, or some."""

from __future__ import annotations

import fcntl
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def lock_file() -> Path:
    """What processes of this user wait for each other by."""
    return Path(tempfile.gettempdir()) / f"fp8booster-profiler-{os.getuid()}.lock"


@contextmanager
def profiler_turn() -> Iterator[None]:
    """Have the profiler alone among the processes that ask here; reports on stderr where it waits."""
    with lock_file().open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.stderr.write("waiting for the profiler, which another process holds\n")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
