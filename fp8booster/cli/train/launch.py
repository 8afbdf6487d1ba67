"""Start the worker processes of one run, pass on what they tell, and end them in an orderly way."""

from __future__ import annotations

import json
import math
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from .events import EVENTS_VARIABLE
from .kills import MemoryKills
from .options import TrainOptions
from .task import Task

_POLL = 0.2  # seconds between looks at the processes
_GRACE = 10.0  # seconds that the other ranks have to end after one failed
_LAUNCHER_SERVES = "TORCHELASTIC_USE_AGENT_STORE"  # in torch's environment: no rank serves the store itself
_LOG_TAIL = 3  # lines of a log that an error message quotes


class Interrupts:
    """SIGINT and SIGTERM while a run lasts: the first asks the workers to save and stop, the second ends them."""

    def __init__(self) -> None:
        self.count = 0
        self.signal = 0

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
        self.signal = number


@dataclass
class Worker:
    """One rank's process."""

    rank: int
    process: subprocess.Popen
    log: Path


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
    events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
    workers = [_start(environment, task, events) for environment in _environments(task.options.nproc, store)]
    kills = MemoryKills.now()
    try:
        return _watch(workers, events, tell, interrupts, kills)
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


def _start(environment: dict[str, str], task: Task, events: queue.Queue) -> Worker:
    rank = int(environment["RANK"])
    log = task.logs / f"rank-{rank}.log"
    reader, writer = os.pipe()
    with log.open("ab") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "fp8booster.cli.train.worker"],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=stream,
            env={**environment, EVENTS_VARIABLE: str(writer)},
            pass_fds=[writer],
            start_new_session=True,  # Ctrl-C reaches the workers once, from here
        )
    os.close(writer)
    pickle.dump(task, process.stdin)
    process.stdin.close()
    threading.Thread(target=_read, args=(reader, rank, events), daemon=True).start()
    return Worker(rank, process, log)


def _read(descriptor: int, rank: int, events: queue.Queue) -> None:
    with os.fdopen(descriptor) as stream:
        for line in stream:
            events.put((rank, json.loads(line)))


def _watch(
    workers: list[Worker],
    events: queue.Queue,
    tell: Callable[[dict[str, Any]], None],
    interrupts: Interrupts,
    kills: MemoryKills,
) -> Outcome:
    outcome = Outcome(finished=False)
    errors: list[dict[str, Any]] = []
    passed_on = 0
    deadline = math.inf
    while True:
        # Looked at before the queue: what a process told before it ended is then read below.
        states = [worker.process.poll() for worker in workers]
        try:
            rank, event = events.get(timeout=_POLL)
        except queue.Empty:
            if None not in states or time.monotonic() > deadline:
                break
        else:
            match event["kind"]:
                case "error":
                    errors.append(event)
                case "start":
                    outcome.step = event["done"]
                case "step":
                    outcome.step, outcome.unsaved = event["step"], outcome.unsaved + 1
                case "checkpoint":
                    outcome.checkpoint, outcome.unsaved = event["folder"], 0
                case "done":
                    outcome.finished = True
            if rank == workers[0].rank:
                tell(event)
        if passed_on < interrupts.count:
            number = signal.SIGTERM if passed_on == 0 else signal.SIGKILL
            passed_on = interrupts.count
            for worker in workers:
                worker.process.send_signal(number)
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
        raise ChildProcessError(f"{error['message']} (the traceback is in {workers[0].log.parent})")
    for worker in workers:
        code = worker.process.poll()
        if code not in (0, None):
            ending = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
            lines = worker.log.read_text(errors="replace").splitlines()[-_LOG_TAIL:]
            raise ChildProcessError(f"Rank {worker.rank} {ending}; its log {worker.log} ends: {' | '.join(lines)}")
