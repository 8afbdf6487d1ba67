"""Faults of `fp8booster train` as a person starts it: it ends in time, names the rank, and leaves no process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.faults.disks import leave_room, small_disk
from tests.faults.runs import Reference, went_on
from tests.faults.subjects import SAVED, Place, Subject, checkpoints_of

REPOSITORY = Path(__file__).parents[2]
LATEST = 240.0  # seconds that the whole command may take on a busy machine
SECOND_SAVE = f"step-{2 * SAVED:08d}"
OF_STEPS = ("all_to_all_single", "reduce_scatter_tensor", "batch_isend_irecv")
"""Collectives that no save has."""


def environment_of_command() -> dict[str, str]:
    """Return the variables by which a command and its ranks read `site/`."""
    paths = [str(REPOSITORY / "tests" / "faults" / "site"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NO_COLOR": "1", "OMP_NUM_THREADS": "1"}


def resume(
    out: Path, *options: str, harm: tuple[int, int, int] | None = None, at_file: bool = True
) -> subprocess.Popen:
    """Start the command on a run.

    Args:
        harm: rank, signal, and the number of the file event from the second save on, or of the collective.
        at_file: it is the former.
    """
    environment = environment_of_command()
    if harm is not None:
        place = [SECOND_SAVE, str(out)] if at_file else ["", ""]
        environment["FP8BOOSTER_FAULT"] = ",".join([*map(str, harm), *place])
    return subprocess.Popen(
        [sys.executable, "-m", "fp8booster", "train", "--resume", str(out), "--progress", "lines", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def ended(process: subprocess.Popen, wanted: str, code: int = 2) -> str:
    """What the command said; it ended with the code, said what is wanted, and left no rank."""
    try:
        said, _ = process.communicate(timeout=LATEST)
    finally:
        process.kill()
    assert process.returncode == code, f"exit status {process.returncode}: {said[-300:]}"
    assert wanted in said, said[-300:]
    assert "Traceback" not in said, said[-600:]
    return said


def assert_nobody_is_left(ranks: list[psutil.Process], patience: float = 30.0) -> None:
    """The processes are gone, or go soon."""
    _, left = psutil.wait_procs(ranks, timeout=patience)
    for process in left:
        process.kill()
    assert not left, f"{len(left)} ranks are left"


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The ranks of a command, once they are there."""
    deadline = time.monotonic() + LATEST
    while time.monotonic() < deadline:
        workers = [
            child
            for child in psutil.Process(process.pid).children()
            if any("train.rank" in part for part in child.cmdline())
        ]
        if len(workers) == 2:
            return workers
        time.sleep(0.2)
    raise AssertionError("no ranks were started")


def killed(rank: int, number: int) -> Callable[[Place, Subject, Reference, Path], str]:
    """SIGKILL of a rank at a file event of the save."""

    def check(place: Place, subject: Subject, reference: Reference, out: Path) -> str:
        shutil.copytree(reference.begun, out)
        process = resume(out, harm=(rank, signal.SIGKILL, number))
        ranks = ranks_of(process)
        ended(process, f"Rank {rank}")
        assert_nobody_is_left(ranks)
        return went_on(place, subject, reference, out)

    return check


def stopped_rank(ranks: list[psutil.Process]) -> psutil.Process:
    """Rank 0, when it has stopped."""
    stopped = next(rank for rank in ranks if rank.environ()["RANK"] == "0")
    deadline = time.monotonic() + LATEST
    while stopped.status() != psutil.STATUS_STOPPED and time.monotonic() < deadline:
        time.sleep(0.2)
    return stopped


def told_to_stop(place: Place, subject: Subject, reference: Reference, out: Path) -> str:
    """SIGTERM to the command while ranks train."""
    shutil.copytree(reference.begun, out)
    first = 1 + next(number for number, name in enumerate(reference.events[0].collectives) if name in OF_STEPS)
    process = resume(out, harm=(0, signal.SIGSTOP, first), at_file=False)  # so that they cannot have finished
    ranks = ranks_of(process)
    stopped = stopped_rank(ranks)
    process.send_signal(signal.SIGTERM)
    stopped.resume()
    ended(process, "Continue with: fp8booster train --resume", code=130)
    assert_nobody_is_left(ranks)
    return went_on(place, subject, reference, out)


def command_killed(place: Place, subject: Subject, reference: Reference, out: Path) -> str:
    """SIGKILL of the command: its ranks end by themselves."""
    shutil.copytree(reference.begun, out)
    process = resume(out, harm=(0, signal.SIGSTOP, 1))  # so that they cannot have finished
    ranks = ranks_of(process)
    stopped = stopped_rank(ranks)
    process.kill()
    process.wait()  # not until its streams are closed: rank 0 writes to them too
    stopped.resume()
    assert_nobody_is_left(ranks)
    return went_on(place, subject, reference, out)


def full(place: Place, subject: Subject, reference: Reference, out: Path) -> str:
    """A disk that takes half of a checkpoint, logs included."""
    with small_disk(out) as disk:
        shutil.copytree(reference.begun, disk, dirs_exist_ok=True)
        size = sum(path.stat().st_size for path in checkpoints_of(subject, disk).rglob("*") if path.is_file())
        leave_room(disk, size // 2)
        process = resume(disk)
        ranks = ranks_of(process)
        ended(process, "The disk took no more (")
        assert_nobody_is_left(ranks)
        leave_room(disk)
        return went_on(place, subject, reference, disk)


COMMANDS = {
    "SIGKILL of rank 0 as its save begins": killed(0, 1),
    "SIGKILL of rank 0 in the middle of its save": killed(0, 9),
    "SIGKILL of rank 1 in its save": killed(1, 1),
    "SIGTERM": told_to_stop,
    "SIGKILL of the command": command_killed,
    "full disk": full,
}
