"""Many runs on few GPUs: some at once, each in processes of its own, until all have ended or time is up."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.host import Host
from benchmarks.training.launch import ending_of, meeting_at, start_host
from benchmarks.training.runs import Run

_POLL = 0.1  # seconds between looks at the processes


class Place:
    """The processes of one run at a time."""

    def __init__(self, ranks: int, gpus: Sequence[str] | None, worker: str) -> None:
        """`gpus`: one for each rank, as CUDA_VISIBLE_DEVICES names them; None on the CPU."""
        place = {"GLOO_SOCKET_IFNAME": "lo"} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        # as torchrun does: many processes share the cores
        self.environment = {"OMP_NUM_THREADS": "1"} | place
        """Variables of its processes."""
        self.ranks = ranks
        """Processes of a run."""
        self._worker = worker
        self._hosts: list[Host] = []
        self._statuses: dict[int, int] = {}
        self._server: dist.TCPStore | None = None
        self._ends_at = self._limit_s = 0.0
        self.run: Run | None = None
        """The one that is trained here."""

    def begin(self, run: Run, task: dict[str, Any]) -> None:
        """Train a run; none is under way here."""
        self.run = run
        run.folder.stop.unlink(missing_ok=True)
        self._statuses = {}
        self._limit_s = task["limit_s"]
        self._ends_at = time.monotonic() + self._limit_s
        if not self._hosts or not all(host.alive for host in self._hosts):
            self.close()
            self._hosts = [start_host(self._worker, self.environment) for _ in range(self.ranks)]
        self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        shared = meeting_at("127.0.0.1", self._server.port) | {
            "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks),
        }
        for rank, host in enumerate(self._hosts):
            self._failed(rank).unlink(missing_ok=True)
            self._log(rank).touch()
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            host.begin(
                task | {"failed": str(self._failed(rank)), "log": str(self._log(rank)), "environment": shared | own}
            )

    def ended(self) -> tuple[bool, str | None]:
        """Return whether the run's processes have ended, and the reason if it failed."""
        for rank, host in enumerate(self._hosts):
            if rank not in self._statuses and (status := host.ended(0)) is not None:
                self._statuses[rank] = status
        failed = any(status != 0 for status in self._statuses.values())
        late = time.monotonic() > self._ends_at
        if failed or late:
            self.close()  # the others may wait for it in a collective
            return True, self._reason() if failed else f"not done within {self._limit_s:g} s"
        return len(self._statuses) == self.ranks, None

    def close(self) -> None:
        """End its processes."""
        for host in self._hosts:
            host.kill()
        self._hosts = []

    def _reason(self) -> str:
        """Return why the first rank failed, from which the failures of others follow."""
        written = {rank: file for rank in range(self.ranks) if (file := self._failed(rank)).exists()}
        # a rank that another's failure ends writes a reason; what ends one without came first
        silent = [rank for rank, status in self._statuses.items() if status != 0 and rank not in written]
        first = silent[0] if silent else min(written, key=lambda rank: written[rank].stat().st_mtime_ns)
        # a full disk leaves the file empty
        reason = written[first].read_text() if first in written else ""
        return reason or ending_of(first, self._statuses.get(first, 1), self._log(first))

    def _failed(self, rank: int) -> Path:
        return self.run.folder.path / f"rank-{rank}.failed"

    def _log(self, rank: int) -> Path:
        return self.run.folder.path / f"rank-{rank}.log"


def places(count: int | None, ranks: int, device: str, worker: str = "benchmarks.training.learner") -> list[Place]:
    """The places where runs train: `count` at once, or as many as there are GPUs for, `ranks` processes each.

    Raises:
        ValueError: a run wants more GPUs than there are.
    """
    if device == "cpu":
        return [Place(ranks, None, worker) for _ in range(count or 1)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    if ranks > len(names):
        raise ValueError(f"--processes is {ranks}, and there are {len(names)} GPUs; give at most as many")
    several = count or len(names) // ranks
    return [
        Place(ranks, [names[(place * ranks + rank) % len(names)] for rank in range(ranks)], worker)
        for place in range(several)
    ]


def work_off(
    runs: Sequence[Run],
    at: Sequence[Place],
    *,
    until: float,
    limit_s: float,
    saves: bool,
    before_run: Callable[[Run], None],
    after_run: Callable[[Run, str | None], None],
) -> None:
    """Train the runs that have not ended, as many at once as there are places.

    Args:
        runs: in the order in which they begin, or go on.
        at: closed when this returns.
        until: seconds since the epoch when runs save and end, and no further one begins.
        limit_s: seconds after which a run has failed.
        saves: the runs' folders stay, so that a run saves before it evaluates, and all do on SIGTERM. A second one
            ends them at once, as does the first where this is false.
        before_run: told of each.
        after_run: is told of each, and why it failed, where it did.

    Raises:
        ValueError: a folder holds another run, or another command is in it.
    """
    stopping = False

    def stop(*_: object) -> None:
        nonlocal stopping
        if stopping or not saves:
            sys.exit(143)  # so that the hosts are ended with it
        stopping = True

    with ExitStack() as held:
        for run in runs:
            held.enter_context(run.folder.locked())
            run.folder.claim(run.variant.engine, run.job, at[0].ranks)
        waiting = deque(run for run in runs if run.folder.end() is None)
        held.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, stop))
        for place in at:
            held.callback(place.close)
        while True:
            for place in at:
                if place.run is None and waiting and not stopping and time.time() < until:
                    run = waiting.popleft()
                    before_run(run)
                    task = {"job": run.job.as_record(), "folder": str(run.folder.path.resolve()), "saves": saves}
                    place.begin(run, task | {"engine": run.variant.engine, "until": until, "limit_s": limit_s})
                if place.run is not None and stopping:
                    place.run.folder.stop.touch()
            if all(place.run is None for place in at):
                return
            for place in at:
                if place.run is not None and (outcome := place.ended())[0]:
                    run, place.run = place.run, None
                    run.folder.stop.unlink(missing_ok=True)
                    after_run(run, outcome[1])
            time.sleep(_POLL)
