"""Gloo ranks for tests: `@ranks(2)` runs a test on each of two ranks, `run_ranks` calls a function on new ones."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import inspect
import logging
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

IDLE_SECONDS = 60.0
"""Ranks hang that have not used a second of CPU for so long, which is more than anything else waits for."""

TEST_SECONDS = 900.0
"""The longest that a test may take on ranks that work: most need a second, but cores may be shared by many."""

_STACK_SIGNAL = signal.SIGUSR1
_STACK_SECONDS = 10.0  # that a rank has to write its stack
_shared = Path()
"""On a rank, the folder that all ranks see."""


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message names it and carries its traceback."""


def ranks(*world_sizes: int, seconds: float = TEST_SECONDS, backend: str = "gloo") -> Callable[..., Any]:
    """The decorated test runs on each of `world_size` ranks, once for each of `world_sizes`.

    Its arguments, from `pytest.mark.parametrize` or fixtures, are pickled; `tmp_path` is a folder that all ranks see.
    Ranks have a process group, the seed 0 and no statistics. They are started with a module's first test and kept for
    its others of the same world size; where a test fails they are ended, and the next test starts new ones. A test
    fails with the traceback of the rank that failed first; or with the stacks of those that hang, where no rank has
    used the CPU for a minute, or after `seconds`.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def on_each_rank(world_size: int = world_sizes[0], **arguments: Any) -> None:
            __tracebackhide__ = True
            on_ranks(world_size, function, seconds=seconds, backend=backend, **arguments)

        on_each_rank.on_rank = function
        if len(world_sizes) == 1:
            return on_each_rank
        signature = inspect.signature(function)
        world_size = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)
        on_each_rank.__signature__ = signature.replace(parameters=[*signature.parameters.values(), world_size])
        return pytest.mark.parametrize("world_size", world_sizes)(on_each_rank)

    return register


def on_ranks(
    world_size: int,
    function: Callable[..., Any],
    *,
    seconds: float = TEST_SECONDS,
    backend: str = "gloo",
    **arguments: Any,
) -> list[Any]:
    """What `function(**arguments)` returns on the ranks that a module's tests share; the test fails as with `ranks`."""
    __tracebackhide__ = True
    started = _ranks_of(function.__module__, world_size, backend, seconds)
    try:
        return started.call(_run, function.__module__, function.__qualname__, arguments, seconds=seconds)
    except RankError as error:
        started.kill()
        pytest.fail(str(error), pytrace=False)


def shared_folder(name: str | Path) -> Path:
    """On a rank: a folder that all ranks see, as long as they live."""
    folder = _shared / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = TEST_SECONDS,
    initialize: bool = True,
    environment: dict[str, str] | None = None,
    preloaded: bool = True,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes joined by gloo; return each rank's value, in rank order.

    `fn`, `args` and the values are pickled, so `fn` lives at the top level of a module. Ranks see the variables
    that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and `environment` on top of
    them, before `fn`'s module is imported. Each runs on one thread. With `initialize=False` no process group is
    made, for a `fn` that makes its own (`launch_from_torch`). `timeout` is in seconds; ranks that hang are ended
    sooner, as under `ranks`.
    Ranks are forks of a process that has imported Colossal-AI and its plugins once for the whole session, unless a
    GPU is there; with `preloaded=False`, for a `fn` or `environment` that changes what gets imported, they import anew.

    Raises RankError when a rank raises, dies or is late, with the traceback of the rank that raised first, or with the
    stacks of those that are late; the other ranks are killed before it is raised.
    """
    started = RankProcesses(world_size, "gloo" if initialize else None, timeout, environment, preloaded)
    try:
        return started.call(fn, *args, seconds=timeout)
    finally:
        started.kill()


def rank_context(preloaded: bool = True) -> multiprocessing.context.BaseContext:
    """What starts the processes of ranks; `preloaded` as in `run_ranks`."""
    if not preloaded or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])  # heard by the first rank alone, which starts the server
    return context


class RankProcesses:
    """Processes that call what they are told, together."""

    def __init__(
        self,
        world_size: int,
        backend: str | None,
        timeout: float,
        environment: dict[str, str] | None = None,
        preloaded: bool = True,
    ) -> None:
        context = rank_context(preloaded)
        # The parent holds the store's socket, so there is no free port for another process to take in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._folder = tempfile.TemporaryDirectory()
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        try:
            for rank in range(world_size):
                pipe, theirs = context.Pipe()
                variables = _torchrun_variables(rank, world_size, self._store.port) | (environment or {})
                call = (theirs, variables, backend, timeout, self._folder.name)
                process = context.Process(target=_rank_main, args=call)
                process.start()
                theirs.close()
                self._processes.append(process)
                self._pipes.append(pipe)
        except BaseException:
            self.kill()
            raise

    def call(self, fn: Callable[..., Any], *args: Any, seconds: float) -> list[Any]:
        """What `fn(*args)` returns on each rank; RankError as in `run_ranks`, after which the ranks are of no use."""
        call = pickle.dumps((fn, args))
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a rank that has ended has sent why, or its end is seen below
                pipe.send_bytes(call)
        start = time.monotonic()
        values: dict[int, Any] = {}
        while late := [rank for rank in range(len(self._pipes)) if rank not in values]:
            used, left = self._cpu_seconds(), start + seconds - time.monotonic()
            answers = self._answers(late, min(left, IDLE_SECONDS))
            if any(not passed for _, _, passed, _ in answers):
                answers += self._answers(late, 1.0)  # others may have failed of it, or before
                _, rank, _, why = min(answer for answer in answers if not answer[2])
                raise RankError(f"rank {rank} {why}")
            if not answers and (left <= IDLE_SECONDS or self._cpu_seconds() < used + 1):
                where = "".join(f"\nrank {rank} was in\n{stack}" for rank, stack in self._where(late).items())
                raise RankError(
                    f"rank(s) {late} did not finish within {min(seconds, time.monotonic() - start):.0f} s{where}"
                )
            values |= {rank: value for _, rank, _, value in answers}
        return [values[rank] for rank in range(len(values))]

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes.clear()
        self._folder.cleanup()

    @property
    def alive(self) -> bool:
        return bool(self._processes)

    def _cpu_seconds(self) -> float:
        """What the ranks that live have used."""
        total = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(psutil.Process(process.pid).cpu_times()[:2])
        return total

    def _answers(self, of: Iterable[int], timeout: float) -> list[tuple[float, int, bool, Any]]:
        """What ranks have sent: when, which rank, whether it passed, and its value or traceback."""
        pipes = {self._pipes[rank]: rank for rank in of if not self._pipes[rank].closed}
        answers = []
        for pipe in wait(list(pipes), timeout=max(0.0, timeout)):
            try:
                when, passed, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                when, passed, value = -math.inf, False, "died without a Python traceback"
            if not passed:
                pipe.close()
            answers.append((when, pipes[pipe], passed, value))
        return answers

    def _where(self, late: list[int]) -> dict[int, str]:
        """The stacks of ranks, those that wait in C included."""
        files = {rank: _stack_file(self._folder.name, rank) for rank in late}
        for rank, file in files.items():
            if self._processes[rank].is_alive() and file.exists():
                os.kill(self._processes[rank].pid, _STACK_SIGNAL)
        before, found = None, dict.fromkeys(late, "")
        deadline = time.monotonic() + _STACK_SECONDS
        while (found != before or not all(found.values())) and time.monotonic() < deadline:
            time.sleep(0.5)  # a stack is written line by line
            before, found = found, {rank: file.read_text() if file.exists() else "" for rank, file in files.items()}
        return {rank: stack or "(its start)" for rank, stack in found.items()}


_module = ""
_started: dict[tuple[int, str], RankProcesses] = {}
"""The ranks of `_module`: a module's caches save time, and what it leaves behind shall not reach another module."""


def _ranks_of(module: str, world_size: int, backend: str, seconds: float) -> RankProcesses:
    global _module
    if module != _module:
        _end_ranks()
        _module = module
    found = _started.get((world_size, backend))
    if found is None or not found.alive:
        found = _started[world_size, backend] = RankProcesses(world_size, backend, seconds)
    return found


@atexit.register
def _end_ranks() -> None:
    while _started:
        _started.popitem()[1].kill()


def _run(module: str, name: str, arguments: dict[str, Any]) -> Any:
    """On a rank: call a function that `ranks` may decorate."""
    from fp8booster import comm

    function = getattr(import_module(module), name)
    logging.disable(logging.WARNING)
    torch.manual_seed(0)
    comm.reset_statistics()
    return getattr(function, "on_rank", function)(**arguments)


def _torchrun_variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
    }


def _stack_file(folder: str, rank: int) -> Path:
    return Path(folder) / f"stack of rank {rank}"


def _rank_main(pipe: Connection, variables: dict[str, str], backend: str | None, timeout: float, folder: str) -> None:
    global _shared
    _shared = Path(folder)
    os.environ.update(variables)
    rank = int(variables["RANK"])
    try:
        # kept open: the parent asks by a signal where this rank is
        faulthandler.register(_STACK_SIGNAL, file=_stack_file(folder, rank).open("w"), all_threads=False)
        torch.set_num_threads(1)
        # here, for what it imports reads the environment, as Triton does
        from fp8booster.kernels.instructions import multiply_bf16_in_fp32

        multiply_bf16_in_fp32()
        if backend is not None:
            if backend == "nccl":
                torch.cuda.set_device(rank)
            dist.init_process_group(backend, init_method="env://", timeout=timedelta(seconds=timeout))
        while True:
            try:
                call = pipe.recv_bytes()
            except EOFError:  # the parent is gone
                return
            # Unpickled only now, so that the module of `fn` is imported under `variables`.
            fn, args = pickle.loads(call)
            # Plain bytes: a tensor would otherwise be sent as shared memory that ends with this process.
            pipe.send_bytes(pickle.dumps((time.monotonic(), True, fn(*args))))
    except BaseException:  # whatever ends a rank is the parent's to report
        why = f"of {variables['WORLD_SIZE']} failed:\n{traceback.format_exc()}"
        pipe.send_bytes(pickle.dumps((time.monotonic(), False, why)))
