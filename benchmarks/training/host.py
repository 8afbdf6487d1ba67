"""A process that imports what takes seconds once, and forks one of its own for each task.

So every turn has a fresh process, without state or memory of the turns before, and none waits for imports. What it
forks from has not touched a GPU, for CUDA does not outlive a fork, and has not imported what an engine changes. Where
an import did touch one, the process does one task itself and ends.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

Task = dict[str, Any]
"""Plain values. "log" is the file that takes what the task prints, "environment" variables that are set before it."""


class Host:
    """The process, as the one that started it sees it."""

    def __init__(self, module: str, environment: dict[str, str]) -> None:
        """Start `python -m module`, which calls `serve`."""
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # a group, so that what it has forked can be ended with it
        )

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def begin(self, task: Task) -> None:
        """Give it a task; the one before has ended.

        Raises:
            BrokenPipeError: it has died.
        """
        self._process.stdin.write((json.dumps(task) + "\n").encode())
        self._process.stdin.flush()

    def ended(self, seconds: float) -> int | None:
        """Wait so long; the task's exit status, negative the signal that ended it, or None while it runs."""
        ready, _, _ = select.select([self._process.stdout], [], [], seconds)
        if not ready:
            return None
        line = self._process.stdout.readline()
        return int(line) if line else self._process.wait()

    def kill(self) -> None:
        """End it, and its task."""
        with suppress(ProcessLookupError):  # gone already
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        with suppress(BrokenPipeError):  # what it did not read
            self._process.stdin.close()


def serve(
    do: Callable[[Task], int], *, preload: Sequence[str] = (), may_fork: Callable[[], bool] = lambda: True
) -> None:
    """Do the tasks that come on standard input, one a line, each in a fork; say on standard output how each ended.

    Args:
        do: takes a task and returns its exit status.
        preload: modules to import first, those of them that are installed.
        may_fork: whether what was imported leaves a fork of use.
    """
    ended = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    for name in preload:
        if find_spec(name.partition(".")[0]) is not None:
            import_module(name)
    sys.stdout.flush()  # so that a fork does not say it again
    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        forks = may_fork()
        child = os.fork() if forks else 0
        if child == 0:
            if forks:
                ended.close()  # so that it closes with this process, whether a task still runs or not
            _do(task, do)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=ended, flush=True)


def _do(task: Task, do: Callable[[Task], int]) -> NoReturn:
    """Do the task, and end this process."""
    status = 1
    try:
        printed = os.open(Path(task["log"]), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        os.environ |= task["environment"]
        status = do(task)
    except BaseException as error:
        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # without the orderly exit of process groups, which may hang where another rank has failed
        os._exit(status)


def _end_with_parent() -> None:
    """Standard input brings nothing while a task runs; it closes when the process that gave the task is gone."""
    os.read(0, 1)
    os._exit(1)
