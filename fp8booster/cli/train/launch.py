"""Start the worker processes of one run, pass on what they tell, and end them in an orderly way."""

from __future__ import annotations

import math
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .events import COMMAND_VARIABLE, EVENTS_VARIABLE, OutOfMemory
from .kills import MemoryKills
from .options import TrainOptions
from .task import Task

_POLL = 0.2  # seconds between looks at the processes
_GRACE = 10.0  # seconds that the other ranks have to end after one failed
_LAUNCHER_SERVES = "TORCHELASTIC_USE_AGENT_STORE"  # in torch's environment: no rank serves the store itself
_LOG_TAIL = 3  # lines of a log that an error message quotes


class Interrupts:
    """SIGINT and SIGTERM while a run lasts: the first asks the workers to save and stop, the second ends them."""

    count = 0

    @contextmanager
    def watched(self):
        """Count signals instead of dying of them."""
        former = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield self
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1


class Worker:
    """One rank's process, and the pipe in which it tells what happens."""

    def __init__(self, environment: dict[str, str], task: Task) -> None:
        self.rank = int(environment["RANK"])
        self.log = task.logs / f"rank-{self.rank}.log"
        self.events, writer = multiprocessing.Pipe(duplex=False)
        with self.log.open("ab") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fp8booster.cli.train.worker"],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=stream,
                env={**environment, EVENTS_VARIABLE: str(writer.fileno()), COMMAND_VARIABLE: str(os.getpid())},
                pass_fds=[writer.fileno()],
                start_new_session=True,  # Ctrl-C reaches the workers once, from here
            )
        writer.close()
        pickle.dump(task, self.process.stdin)
        self.process.stdin.close()

    def ending(self) -> str | None:
        """How it ended, in a sentence with the end of its log; None while it runs, or where it ended well."""
        code = self.process.poll()
        if not code:
            return None
        how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        lines = self.log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
        return f"Rank {self.rank} {how}; its log {self.log} ends: {' | '.join(lines)}"


@dataclass
class Outcome:
    """How one run ended."""

    finished: bool
    """Whether it reached its last step; otherwise it was interrupted."""
    checkpoint: str | None = None
    """The newest checkpoint written."""
    step: int = 0
    """The last step taken."""
    unsaved: int = 0
    """Steps taken since the newest checkpoint, or since the run went on from one."""

    def note(self, event: dict[str, Any]) -> None:
        """Take account of an event (events.Events.send)."""
        match event["kind"]:
            case "start":
                self.step = event["done"]
            case "step":
                self.step, self.unsaved = event["step"], self.unsaved + 1
            case "checkpoint":
                self.checkpoint, self.unsaved = event["folder"], 0
            case "done":
                self.finished = True


def is_launched() -> bool:
    """Whether this process is one rank that torchrun, `colossalai run` or the like has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main() -> bool:
    """Whether this process speaks for the run: rank 0, or the one that starts all ranks."""
    return os.environ.get("RANK", "0") == "0"


def ranks(options: TrainOptions) -> int:
    """How many processes train together."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else options.nproc


def run_workers(
    task: Task, store: dist.TCPStore | None, tell: Callable[[dict[str, Any]], None], interrupts: Interrupts
) -> Outcome:
    """Do a task in fresh processes and return how it ended; `tell` gets every event of rank 0.

    Without torchrun all ranks of this machine are started here; under it, the one that this process stands for. They
    meet at the store of `serve_store`. Logs go to the task's folder. Raises ValueError with the worker's own sentence
    when its input was bad, ChildProcessError when it failed in another way.
    """
    task.logs.mkdir(parents=True, exist_ok=True)
    workers = [Worker(environment, task) for environment in _environments(task.options.nproc, store)]
    kills = MemoryKills.now()
    try:
        return _watch(workers, tell, interrupts, kills)
    except OutOfMemory as error:
        error.task = task
        raise
    finally:
        for worker in workers:
            worker.process.kill()
            worker.process.wait()


def serve_store() -> dist.TCPStore | None:
    """The store at which workers meet; None where the launcher or another rank's command serves it.

    It lives here, so that there is no free port for another program to take in between, and all runs of a command use
    it: each adds its precision to its keys (`training.ranks.join_ranks`).
    """
    if not is_launched():
        return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    if not is_main() or os.environ.get(_LAUNCHER_SERVES) == "True":
        return None
    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=True, wait_for_workers=False
    )


def _environments(count: int, store: dist.TCPStore | None) -> list[dict[str, str]]:
    if is_launched():
        return [{**os.environ, _LAUNCHER_SERVES: "True"}]
    shared = {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count)),
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        _LAUNCHER_SERVES: "True",
    }
    if not torch.cuda.is_available() and sys.platform == "linux":
        # gloo would look up the host's name, which need not resolve
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


def _watch(
    workers: list[Worker], tell: Callable[[dict[str, Any]], None], interrupts: Interrupts, kills: MemoryKills
) -> Outcome:
    outcome = Outcome(finished=False)
    errors: list[dict[str, Any]] = []
    listening = {worker.events: worker for worker in workers}
    passed_on = 0
    deadline = math.inf
    while listening and time.monotonic() < deadline:
        ready = wait(list(listening), _POLL)
        for pipe in ready:
            try:
                event = pipe.recv()
            except (EOFError, OSError):  # its end, in the middle of an event where it was killed
                listening.pop(pipe).process.wait()
                continue
            outcome.note(event)
            if event["kind"] == "error":
                errors.append(event)
            if listening[pipe] is workers[0]:
                tell(event)
        if passed_on < interrupts.count:
            number = signal.SIGTERM if passed_on == 0 else signal.SIGKILL
            passed_on = interrupts.count
            for worker in workers:
                worker.process.send_signal(number)
        states = [worker.process.poll() for worker in workers]
        if not ready and None not in states:  # something that a worker started holds its pipe
            break
        if deadline == math.inf and any(state not in (None, 0) for state in states):
            deadline = time.monotonic() + _GRACE
    if outcome.finished or not interrupts.count:
        _raise_for(workers, errors, kills)
    return outcome


def _raise_for(workers: list[Worker], errors: list[dict[str, Any]], kills: MemoryKills) -> None:
    """Raise for what went wrong first: a user's mistake, a killed rank, another error, a rank that said nothing."""
    for error in errors:
        if error["expected"]:
            raise ValueError(error["message"])
    for worker in workers:
        if worker.process.poll() == -signal.SIGKILL:
            raise ChildProcessError(
                f"Rank {worker.rank} was ended by signal SIGKILL, {MemoryKills.now().explain(kills)}."
            )
    for error in errors:
        message = f"{error['message']} (the traceback is in {workers[0].log.parent})"
        if "gpu_memory" in error:
            raise OutOfMemory(message, error["gpu_memory"])
        raise ChildProcessError(message)
    for worker in workers:
        if (ending := worker.ending()) is not None:
            raise ChildProcessError(ending)
