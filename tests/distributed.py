"""Start gloo ranks for a test: `run_ranks` for one function, `check_ranks` for many checks in one start."""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

_PRELOADED = (
    "fp8booster.plugins",
    "colossalai.booster.plugin",
    "colossalai.shardformer.policies.llama",
    "transformers.models.llama.modeling_llama",
)
"""What takes a rank 7 to 10 s to import; the first of them mends colossalai before it is imported."""

CHECK_SECONDS = 240.0
"""The longest that one check, or the start of the ranks, may take."""

AHEAD_SECONDS = 60.0
"""How long the other ranks may take to end a check that one rank has passed: ranks go through it together."""

FAILED_SECONDS = 15.0
"""How long they may take once one rank has failed it, for which they may be waiting in vain."""

_STACK_SIGNAL = signal.SIGUSR1
_parent: Connection | None = None
"""On a rank, who started it."""


class RankError(RuntimeError):
    """A rank raised, died or did not finish in time; the message names it and carries its traceback."""


class Outcomes(dict[str, "str | None"]):
    """What one rank found: a check's name to None or to what went wrong; `missing` of those that did not run."""

    missing = "not run"

    def __missing__(self, name: str) -> str:
        return self.missing


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    initialize: bool = True,
    environment: dict[str, str] | None = None,
    preloaded: bool = False,
) -> list[Any]:
    """Call `fn(*args)` in `world_size` new processes joined by gloo; return each rank's value, in rank order.

    `fn`, `args` and the values are pickled, so `fn` lives at the top level of a module. Ranks see the variables
    that torchrun sets (RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT, ...) and `environment` on top of
    them, before `fn`'s module is imported. Each runs on one thread. With `initialize=False` no process group is
    made, for a `fn` that makes its own (`launch_from_torch`). `timeout` is in seconds, start-up included.
    With `preloaded` the ranks are forks of a process that has imported Colossal-AI and its plugins once for the whole
    session, for a `fn` whose subject is not what gets imported; a process with a GPU is never forked.

    Raises RankError when a rank raises, dies or is late, with the traceback of the rank that raised first, or with the
    stacks of those that are late; the other ranks are killed before it is raised.
    """
    ranks = _Ranks(fn, world_size, args, timeout, initialize, environment, preloaded)
    try:
        return ranks.values(timeout)
    finally:
        ranks.kill()


def check_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    seconds: float = CHECK_SECONDS,
    ahead_seconds: float = AHEAD_SECONDS,
    failed_seconds: float = FAILED_SECONDS,
    initialize: bool = False,
    environment: dict[str, str] | None = None,
    preloaded: bool = True,
) -> list[Outcomes]:
    """As `run_ranks`, for a `fn` that calls `run_each`; returns what each rank found.

    Ranks go on after a check that failed, unless another rank hangs in it for `failed_seconds`. Where ranks hang for
    `ahead_seconds` in a check that another has passed, or all of them for `seconds`, they are killed, and that
    check's outcome is the stack of each that hung.
    """
    ranks = _Ranks(fn, world_size, args, seconds, initialize, environment, preloaded)
    try:
        return ranks.outcomes(seconds, ahead_seconds, failed_seconds)
    finally:
        ranks.kill()


def run_each(checks: Mapping[str, Callable[[], object]], prepare: Callable[[], object]) -> None:
    """On a rank: run checks one after the other, with all ranks, and report to `check_ranks`; `prepare` before each."""
    assert _parent is not None
    _send("names", list(checks))
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
    for number, (name, function) in enumerate(checks.items()):
        outcome = None
        try:
            prepare()
            function()
        except (Exception, pytest.fail.Exception):
            outcome = traceback.format_exc()
        _send("check", (name, outcome))
        # not by a collective, which might meet one that a failed check left
        store.set(f"check {number}, rank {rank}", "")
        others = [f"check {number}, rank {other}" for other in range(dist.get_world_size())]
        store.wait(others, timedelta(days=1))  # the parent ends it


def judge(outcomes: list[Outcomes], name: str) -> None:
    """Fail as the ranks did in a check; what a rank raised comes before where others hung."""
    wrong = {rank: outcome[name] for rank, outcome in enumerate(outcomes) if outcome[name] is not None}
    first = sorted(wrong, key=lambda rank: (not wrong[rank].startswith("Traceback"), rank))
    if wrong:
        pytest.fail("\n".join(f"rank {rank}: {wrong[rank]}" for rank in first), pytrace=False)


def rank_context(preloaded: bool = False) -> multiprocessing.context.BaseContext:
    """What starts the processes of ranks; `preloaded` as in `run_ranks`."""
    if not preloaded or torch.cuda.is_available():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(_PRELOADED))  # heard by the first rank alone, which starts the server
    return context


class _Ranks:
    """Processes that are at work, and what they have sent."""

    def __init__(
        self,
        fn: Callable[..., Any],
        world_size: int,
        args: tuple[Any, ...],
        timeout: float,
        initialize: bool,
        environment: dict[str, str] | None,
        preloaded: bool,
    ) -> None:
        context = rank_context(preloaded)
        # The parent holds the store's socket, so there is no free port for another process to take in between.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory()
        self._processes, self._pipes = [], {}
        self._values: dict[int, Any] = {}
        try:
            for rank in range(world_size):
                receiver, sender = context.Pipe(duplex=False)
                variables = _torchrun_variables(rank, world_size, self._store.port) | (environment or {})
                call = (sender, variables, initialize, timeout, self._stack_file(rank), pickle.dumps((fn, args)))
                process = context.Process(target=_rank_main, args=call)
                process.start()
                sender.close()
                self._processes.append(process)
                self._pipes[receiver] = rank
        except BaseException:
            self.kill()
            raise

    def values(self, timeout: float) -> list[Any]:
        """What `fn` returned on each rank."""
        deadline = time.monotonic() + timeout
        while self._pipes:
            if not self._receive(deadline - time.monotonic()):
                late = sorted(self._pipes.values())
                where = "".join(f"\nrank {rank} was in\n{stack}" for rank, stack in self._where(late).items())
                raise RankError(f"rank(s) {late} did not finish within {timeout:g} s{where}")
        return [self._values[rank] for rank in range(len(self._processes))]

    def outcomes(self, seconds: float, ahead_seconds: float, failed_seconds: float) -> list[Outcomes]:
        """What each rank found in its checks."""
        self._names: list[str] = []
        self._found = [Outcomes() for _ in self._processes]
        patience = seconds
        while self._pipes:
            if not self._receive(patience):
                self._give_up(patience)
                break
            furthest = max(self._found, key=len)
            together = all(len(found) == len(furthest) for found in self._found)
            failed = any(next(reversed(found.values()), None) is not None for found in self._found)
            patience = seconds if together else failed_seconds if failed else ahead_seconds
        return self._found

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._stacks.cleanup()

    def _give_up(self, seconds: float) -> None:
        done = min(map(len, self._found))
        late = [rank for rank, found in enumerate(self._found) if len(found) == done]
        stacks = self._where(late)
        if not self._names or done == len(self._names):
            raise RankError(f"rank(s) {late} hung for {seconds:g} s outside of checks, in\n{stacks[late[0]]}")
        name = self._names[done]
        for rank, found in enumerate(self._found):
            if rank in stacks:
                found[name] = f"hung for {seconds:g} s in\n{stacks[rank]}"
            found.missing = f"not run: {name} hung on rank(s) {late}"

    def _receive(self, timeout: float) -> bool:
        """Take in what ranks have sent; False where nothing came in time."""
        ready = wait(list(self._pipes), timeout=max(0.0, timeout))
        failures: list[tuple[float, int, str]] = []
        for pipe in ready:
            self._take(pipe, failures)
        if failures:  # others may have failed of it, or before
            for pipe in wait(list(self._pipes), timeout=1.0):
                self._take(pipe, failures)
            _, rank, why = min(failures)
            raise RankError(f"rank {rank} {why}")
        return bool(ready)

    def _take(self, pipe: Connection, failures: list[tuple[float, int, str]]) -> None:
        rank = self._pipes[pipe]
        try:
            when, kind, value = pickle.loads(pipe.recv_bytes())
        except EOFError:
            when, kind, value = -math.inf, "failed", "died without a Python traceback"
        if kind == "names":
            self._names = value
        elif kind == "check":
            name, outcome = value
            self._found[rank][name] = outcome
        else:
            del self._pipes[pipe]
            if kind == "failed":
                failures.append((when, rank, value))
            else:
                self._values[rank] = value

    def _stack_file(self, rank: int) -> str:
        return str(Path(self._stacks.name) / str(rank))

    def _where(self, ranks: list[int]) -> dict[int, str]:
        """The stacks of ranks, those that wait in C included."""
        for rank in ranks:
            if self._processes[rank].is_alive() and Path(self._stack_file(rank)).exists():
                os.kill(self._processes[rank].pid, _STACK_SIGNAL)
        time.sleep(0.5)
        stacks = {}
        for rank in ranks:
            file = Path(self._stack_file(rank))
            stacks[rank] = (file.read_text() if file.exists() else "") or "(its start)"
        return stacks


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


def _rank_main(
    sender: Connection, variables: dict[str, str], initialize: bool, timeout: float, stacks: str, call: bytes
) -> None:
    global _parent
    _parent = sender
    os.environ.update(variables)
    try:
        # kept open: the parent asks by a signal where this rank is
        faulthandler.register(_STACK_SIGNAL, file=open(stacks, "w"), all_threads=False)  # noqa: SIM115
        torch.set_num_threads(1)
        if initialize:
            dist.init_process_group("gloo", init_method="env://", timeout=timedelta(seconds=timeout))
        # Unpickled only now, so that the module of `fn` is imported under `variables`.
        fn, args = pickle.loads(call)
        _send("value", fn(*args))
    except BaseException:  # whatever ends a rank is the parent's to report
        _send("failed", f"of {variables['WORLD_SIZE']} failed:\n{traceback.format_exc()}")


def _send(kind: str, value: Any) -> None:
    # Plain bytes: a tensor would otherwise be sent as shared memory that ends with this process.
    _parent.send_bytes(pickle.dumps((time.monotonic(), kind, value)))
