"""Start the ranks of one run with torch's elastic launcher, and turn what ends them into an exception."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed.elastic.multiprocessing import (
    DefaultLogsSpecs,
    PContext,
    ProcessFailure,
    SignalException,
    start_processes,
)

from .data import TokenFile
from .errors import OutOfMemory
from .options import TrainOptions

_POLL = 0.1  # seconds between looks at the processes
_LAUNCHER_SERVES = "TORCHELASTIC_USE_AGENT_STORE"  # in torch's environment: no rank serves the store itself
_STOPPING = "Stopping: the step at hand is taken and saved first. Once more ends the run at once, without them."
_LOG_TAIL = 3  # lines of a log that an error message quotes


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run in one precision, as its ranks get it."""

    options: TrainOptions
    """Resolved."""
    precision: str
    """"bf16" or "fp8"."""
    tokens: TokenFile
    resume: str | None
    """Checkpoint to continue from."""
    about: dict[str, Any] = field(default_factory=dict)
    """Facts that rank 0 keeps beside the options in the run's folder, once all ranks are ready; empty: nothing."""
    trial: bool = False
    """Take the steps and save nothing."""

    @property
    def folder(self) -> Path:
        """The folder of this precision's files."""
        return Path(self.options.out) / self.precision

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def result(self) -> Path:
        """The file that is there once the run has taken its last step."""
        return self.folder / "result.json"

    def log(self, rank: int) -> Path:
        return self.folder / "logs" / f"rank-{rank}.log"


def is_launched() -> bool:
    """Tell whether this process is one rank that torchrun, `colossalai run` or the like has started."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def is_main() -> bool:
    """Tell whether this process speaks for the run: rank 0, or the one that starts all ranks."""
    return os.environ.get("RANK", "0") == "0"


def ranks(options: TrainOptions) -> int:
    """Return how many processes train together."""
    return int(os.environ["WORLD_SIZE"]) if is_launched() else options.nproc


def run_ranks(task: Task, store: dist.TCPStore | None) -> bool:
    """Train in fresh processes; return True at the last step, False where a signal stopped the run.

    Without torchrun all ranks of this machine are started here; under it, the one that this process stands for. The
    first SIGINT or SIGTERM lets them save and stop, which is told at once; the second ends them, as the first does a
    trial.

    Args:
        store: of `serve_store`.

    Raises:
        ValueError: a rank's own sentence about its input.
        ChildProcessError: it failed in another way.
    """
    task.log(0).parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(logging.CRITICAL)
    # torch's launcher counts processes of this machine, not ranks of the run
    environments = dict(enumerate(_environments(task.options.nproc, store)))
    program = ("-m", "fp8booster.cli.train.rank", pickle.dumps(task).hex())
    # not `elastic_launch`, whose agent gives ranks 30 s to save after a signal, and logs what it does to the console
    with tempfile.TemporaryDirectory() as error_files, _signals_restored():
        arguments = dict.fromkeys(environments, program)
        context = start_processes("train", sys.executable, arguments, environments, DefaultLogsSpecs(error_files))
        try:
            signalled, failures = _wait(context, task.trial)
        finally:
            # where this process fails, ranks would train on without it
            context.close(signal.SIGKILL)
            Console(stderr=True).show_cursor()  # which the bar of a rank that was killed has hidden
    if failures and not (signalled and all(failure.exitcode < 0 for failure in failures.values())):
        raise _cause({int(environments[place]["RANK"]): failure for place, failure in failures.items()}, task)
    return not failures and task.result.exists()


def serve_store() -> dist.TCPStore | None:
    """Serve the store at which ranks meet; return None where the launcher or another rank's command serves it.

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
        # of the launcher's variables ranks inherit the rest
        return [{"RANK": os.environ["RANK"], _LAUNCHER_SERVES: "True"}]
    shared = {
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        _LAUNCHER_SERVES: "True",
    }
    # each rank would take all cores, and all ranks wait for each other's threads
    defaults = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // count))}
    if not torch.cuda.is_available() and sys.platform == "linux":
        defaults["GLOO_SOCKET_IFNAME"] = "lo"  # gloo would look up the host's name, which need not resolve
    shared |= {name: value for name, value in defaults.items() if name not in os.environ}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]


@contextmanager
def _signals_restored() -> Iterator[None]:
    """Set signals back, of which the elastic launcher makes exceptions."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _wait(context: PContext, trial: bool) -> tuple[bool, dict[int, ProcessFailure]]:
    """Wait for the ranks' end; return whether a signal came, and how ranks failed."""
    try:
        return False, context.wait(period=_POLL).failures
    except SignalException:
        if trial:
            context.close(signal.SIGKILL)
            return True, context.wait().failures
        if is_main():
            # from here, for a rank hears of the signal when its product or its collective ends; over the bar's line
            erase = "\r\x1b[2K" if sys.stderr.isatty() else ""
            sys.stderr.write(f"{erase}{_STOPPING}\n")
            sys.stderr.flush()
        # ranks save after the step at hand, and end by themselves
        for pid in context.pids().values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
    try:
        # not `close`, which kills ranks that need longer to save than it waits
        return True, context.wait(period=_POLL).failures
    except SignalException:
        context.close(signal.SIGKILL)
        return True, context.wait().failures


def _cause(failures: Mapping[int, ProcessFailure], task: Task) -> Exception:
    """Return what went wrong first: a user's mistake, a killed rank, another error, a rank that said nothing."""
    # ranks that lost their peer say so too; the earliest has the cause
    told = [failure.error_file_data for failure in failures.values() if "expected" in failure.error_file_data]
    told.sort(key=lambda error: error["time"])  # the launcher's own stamp is of whole seconds
    for error in told:
        if error["expected"]:
            return ValueError(error["message"])
    # before other errors: those of its peers tell of a lost connection
    for rank, failure in failures.items():
        if failure.exitcode == -signal.SIGKILL:
            return ChildProcessError(
                f"Rank {rank} was ended by signal SIGKILL. The kernel sends it where memory runs out (look at dmesg): "
                "then lower --batch or --sequence. --resume the run."
            )
    for error in told:
        message = f"{error['message']} (the traceback is in {task.log(0).parent})"
        if "gpu_memory" in error:
            return OutOfMemory(message, error["gpu_memory"], task)
        return ChildProcessError(message)
    rank, failure = next(iter(failures.items()))
    code = failure.exitcode
    how = f"was ended by signal {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
    log = task.log(rank)
    lines = log.read_text(errors="replace").splitlines()[-_LOG_TAIL:] if log.exists() else ()
    return ChildProcessError(f"Rank {rank} {how}; its log {log} ends: {' | '.join(lines)}")
