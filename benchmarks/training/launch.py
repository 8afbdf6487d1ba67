"""Processes for the engines: torchrun for the whole command, and fresh ones for each engine's turn.

Under torchrun every rank runs the command, and its process has a host (`host.py`) that forks one for it in each turn.
Those of one turn meet at a store of their own. If one fails or is late, the others, which may wait for it in a
collective, are ended too, and the next engine has its turn.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.environment import REPOSITORY
from benchmarks.training.host import Host

_POLL = 0.2  # seconds between looks at the other ranks
_LOG_LINES = 1  # of a log that a reason quotes
CPU_PROCESSES = 2


def is_launched() -> bool:
    """Tell whether torchrun, or srun with the same variables, has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_torchrun(module: str, arguments: Sequence[str], *, processes: int | None, device: str) -> int:
    """Run this command again, under torchrun on this machine; returns its exit status.

    Args:
        module: as `python -m` takes it.
        arguments: of the command.
        processes: one for each rank; None: one a GPU, or 2 without GPUs.
        device: "cuda" or "cpu".
    """
    count = processes or (torch.cuda.device_count() if device == "cuda" else CPU_PROCESSES)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    environment = dict(os.environ)
    if device == "cpu":
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look up the host's name
    return subprocess.call(
        [sys.executable, *torchrun, "--nproc-per-node", str(count), "-m", module, *arguments], env=environment
    )


def start_host(worker: str, environment: Mapping[str, str] = MappingProxyType({})) -> Host:
    """A host of the module `worker`, with variables of its own."""
    # it must find what this process has found, whatever the folder it was started in
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    # torch asks the driver alone whether there are GPUs, so that CUDA does not begin before a fork
    without_cuda = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    return Host(worker, os.environ | {"PYTHONPATH": path} | without_cuda | environment)


def meeting_at(address: str, port: int | str) -> dict[str, str]:
    """The variables by which ranks meet at a store that a command serves."""
    return {"MASTER_ADDR": address, "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}


def ending_of(rank: int, code: int, log: Path) -> str:
    """Say how a rank's process ended that did not say why."""
    how = f"by signal {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
    lines = log.read_text(errors="replace").strip().splitlines()[-_LOG_LINES:]
    return f"rank {rank} ended {how}" + (f": {' '.join(lines)}" if lines else "")


@dataclass(frozen=True)
class Turn:
    """The outcome of one turn of an engine."""

    outcome: dict[str, Any] | None
    """Rank 0's `measure.Outcome`, on every rank; None if the turn failed."""

    reason: str | None
    """Why it failed."""


class Crew:
    """This rank among those that torchrun started; all of them call the same functions in the same order."""

    def __init__(self, worker: str = "benchmarks.training.worker") -> None:
        """`worker`: the module of the host."""
        self._worker = worker
        self._host: Host | None = None
        self._store, self.rank, self.size = next(dist.rendezvous("env://"))
        self._store.set_timeout(timedelta(hours=2))  # one machine may still prepare the text
        self._turns = 0
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the host is ended with it

    def take_turn(self, task: dict[str, Any], *, limit_s: float, log: Path | None) -> Turn:
        """Do a task (`worker.run`) in one process for each rank.

        Args:
            task: with the engine, the job and where a trace goes.
            limit_s: seconds after which the turn has failed.
            log: folder for what they print; None throws it away.
        """
        turn = f"turn {self._turns}"
        self._turns += 1
        server = None
        if self.rank == 0:
            server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self._store.set(f"{turn}/place", f"{_address()} {server.port}")
        place = self._store.get(f"{turn}/place").decode()
        with tempfile.TemporaryDirectory() as folder:
            verdict = self._run(task, turn, place, Path(folder), limit_s, log)
        self._store.set(f"{turn}/verdict {self.rank}", json.dumps(verdict))
        verdicts = [json.loads(self._store.get(f"{turn}/verdict {rank}").decode()) for rank in range(self.size)]
        del server
        failed = [each for each in verdicts if "failed" in each]
        if failed:  # the others follow from the first
            return Turn(None, min(failed, key=lambda each: each["at"])["failed"])
        return Turn(verdicts[0], None)

    def close(self) -> None:
        """End the host, and wait until every rank is done with the store, which rank 0 may hold."""
        self._end_host()
        self._store.set(f"left {self.rank}", "")
        if self.rank == 0:
            self._store.wait([f"left {rank}" for rank in range(self.size)])

    def _run(
        self, task: dict[str, Any], turn: str, place: str, folder: Path, limit_s: float, log: Path | None
    ) -> dict[str, Any]:
        """This rank's outcome, or why it failed and when."""
        outcome = folder / "outcome.json"
        address, port = place.split()
        printed = (log or folder) / f"{task['engine']}-{turn.replace(' ', '-')}-rank-{self.rank}.log"
        printed = printed.resolve()
        printed.parent.mkdir(parents=True, exist_ok=True)
        printed.touch()
        meeting = meeting_at(address, port)
        status, reason = None, None
        try:
            self._live_host().begin(
                task | {"outcome": str(outcome), "limit_s": limit_s, "log": str(printed), "environment": meeting}
            )
            status, reason = self._watch(turn, limit_s)
        except BrokenPipeError:
            reason = "its host has died"
        finally:
            if status is None:
                self._end_host()
        if outcome.exists() and (found := _read(outcome)) is not None:
            verdict = found
        else:
            verdict = {"failed": reason or ending_of(self.rank, status, printed), "at": time.time()}
        if "failed" in verdict:
            self._store.set(f"{turn}/failed", "")
        return verdict

    def _live_host(self) -> Host:
        """The host; a new one at first, and where the last one was ended."""
        if self._host is None or not self._host.alive:
            self._end_host()
            self._host = start_host(self._worker)
        return self._host

    def _end_host(self) -> None:
        if self._host is not None:
            self._host.kill()
            self._host = None

    def _watch(self, turn: str, limit_s: float) -> tuple[int | None, str | None]:
        """Wait for the task; its exit status, or None and the reason why it is to be ended."""
        deadline = time.monotonic() + limit_s
        while (status := self._host.ended(_POLL)) is None:
            if time.monotonic() > deadline:
                return None, f"it did not finish within {limit_s:g} s"
            if self._store.check([f"{turn}/failed"]):
                return None, "another rank failed"
        return status, None


def _address() -> str:
    """Return the address of this machine; torchrun's rank 0 need not be on the machine that MASTER_ADDR names."""
    one_machine = os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]
    return "127.0.0.1" if one_machine else socket.gethostname()


def _read(outcome: Path) -> dict[str, Any] | None:
    """The outcome; None where the child was ended while it wrote."""
    try:
        return json.loads(outcome.read_text())
    except json.JSONDecodeError:
        return None
