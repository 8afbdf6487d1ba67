"""Files of a checkpoint that are cut or altered: the command refuses it, and names the one before to go on from."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from fp8booster.checkpoints import newest_checkpoint
from tests.faults.commands import ended, resume
from tests.faults.runs import Reference, assert_same, digests, run
from tests.faults.subjects import SAVED, Place, Subject, checkpoints_of


def cut(file: Path) -> None:
    """Take the second half of a file away."""
    os.truncate(file, file.stat().st_size // 2)


def alter(file: Path) -> None:
    """Change a bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


FORMS = {"cut": cut, "altered": alter}


def damaged(subject: Subject, reference: Reference) -> list[tuple[str, str]]:
    """(folder, form) of each damage; of those of even numbers, and of the others, half are of a form."""
    checkpoint = newest_checkpoint(checkpoints_of(subject, reference.begun))
    folders = sorted(path.name for path in checkpoint.iterdir() if path.is_dir() and any(path.iterdir()))
    forms = list(FORMS)
    return [(name, form) for number, name in enumerate(folders) for form in forms[:: -1 if number % 2 else 1]]


def refused(place: Place, subject: Subject, reference: Reference, out: Path, folder: str, form: str) -> str:
    """Damage the largest file of a folder of the newest of two checkpoints, and do what the command then says.

    Raises:
        AssertionError: it trains on, does not name the file and the checkpoint before, or ends with other bits.
    """
    shutil.copytree(reference.begun, out)
    run(place, subject, out, until=2 * SAVED)
    checkpoints = checkpoints_of(subject, out)
    newest, before = newest_checkpoint(checkpoints), checkpoints / f"step-{SAVED:08d}"
    shutil.copytree(checkpoints_of(subject, reference.begun) / before.name, before)  # the run keeps one
    file = max(sorted((newest / folder).iterdir()), key=lambda path: path.stat().st_size)
    FORMS[form](file)
    said = ended(resume(out), f"{newest} is broken: {file.relative_to(newest)}")
    assert f"--resume {before}" in said, f"it does not say what to go on from: {said[-300:]}"
    anew = out.with_name(f"{out.name}-anew")
    ended(resume(before, "--out", str(anew)), "", code=0)
    found = digests(newest_checkpoint(checkpoints_of(subject, anew)))
    shutil.rmtree(anew)
    assert_same((found, []), (reference.ends[SAVED][0], []), f"from {before.name}")
    return f"{file.name} is refused, and it goes on from step {SAVED}"
