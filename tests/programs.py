"""Programs of this Python as forks of the process that ranks are forked from, and the programs they start as theirs.

A program that a test starts so is spared its imports, which take longer than what most tests look at. All else is as in
a process of its own: arguments, environment, streams, signals, exit status.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import resource
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from tests.distributed import TEST_SECONDS, rank_context

REPOSITORY = Path(__file__).parents[1]


class Program:
    """`python -m module *arguments` in the repository's root, asked as a `subprocess.Popen`."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        environment: Mapping[str, str] = os.environ,
        largest_file: int | None = None,
    ) -> None:
        """`largest_file` is in bytes: what the program may write to one file."""
        self._folder = tempfile.TemporaryDirectory()
        self._streams = [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        given = [module, *map(str, arguments)]
        limits = resource.RLIM_INFINITY if largest_file is None else largest_file
        names = [str(stream) for stream in self._streams]
        self._process = rank_context().Process(target=_begin, args=(given, dict(environment), names, limits))
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def stderr(self) -> str:
        """What it has written so far."""
        return self._streams[1].read_text() if self._streams[1].exists() else ""

    @property
    def returncode(self) -> int | None:
        """Negative: the signal that ended it; None while it runs."""
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float = TEST_SECONDS) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            self.kill()
            raise subprocess.TimeoutExpired(self.pid, timeout, stderr=self.stderr)
        return self.returncode

    def communicate(self, timeout: float = TEST_SECONDS) -> tuple[str, str]:
        """Standard output and standard error, when it has ended."""
        self.wait(timeout)
        return self._streams[0].read_text(), self.stderr


def run_program(module: str, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """What came of a `Program`."""
    program = Program(module, *arguments, **options)
    said, errors = program.communicate()
    return subprocess.CompletedProcess([module, *arguments], program.returncode, said, errors)


def _begin(arguments: list[str], environment: dict[str, str], streams: list[str], largest_file: int) -> NoReturn:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    files = [os.devnull, *streams]
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    if not torch.cuda.is_available():  # which does not outlive a fork
        subprocess.Popen = _ForkingPopen
    os.chdir(REPOSITORY)
    _become(arguments, environment)


class _ForkingPopen(subprocess.Popen):
    """`python -m ...` is a fork of this process; other programs are as ever."""

    def _execute_child(self, *arguments: Any) -> None:
        given = _CHILD.bind(self, *arguments).arguments
        program = [word for word in given["args"] if word != "-u"]
        if program[:2] != [sys.executable, "-m"]:
            super()._execute_child(*arguments)
            return
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            if given["start_new_session"]:
                os.setsid()
            for number, end in enumerate(("p2cread", "c2pwrite", "errwrite")):
                if given[end] != -1:
                    os.dup2(given[end], number)
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2 and int(name) not in given["pass_fds"]:
                    with contextlib.suppress(OSError):  # it listed them
                        os.close(int(name))
            if given["cwd"] is not None:
                os.chdir(given["cwd"])
            _become(program[2:], given["env"] or dict(os.environ))
        self._child_created = True
        self._close_pipe_fds(
            *(given[end] for end in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite"))
        )


_CHILD = inspect.signature(subprocess.Popen._execute_child)


def _become(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    """Run `python -m *arguments` in this process, and end it."""
    for number in (signal.SIGINT, signal.SIGTERM):  # as after exec
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115  (as long as the process)
    sys.argv = arguments
    code: Any = 1
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*found in sys.modules")  # it is imported already
            runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
    finally:
        if isinstance(code, str):
            sys.stderr.write(code + "\n")
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else int(code is not None))
