"""Branches of a run: one that goes on from an earlier checkpoint sets aside what it leaves behind.

What was left becomes a run of its own in `abandoned-<its first step>-<number>` in the run's folder, from which
`--resume` goes on as from any other:
    run.json                        for the one precision
    summary.*, loss.png             if they told of it
    <precision>/checkpoints/        those after the checkpoint that the run now goes on from
    <precision>/metrics.jsonl       all its steps, those before the fork too; scales.jsonl likewise
    <precision>/result.json
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

from fp8booster.checkpoints import checkpoints_in, named_step
from fp8booster.cli.metrics import REMOVE
from fp8booster.monitor.sinks import FILE
from fp8booster.reading import read_record, require_fields

from .checkpoint import read_state
from .resume import read_run_file, write_run_file
from .task import Task

_SUMMARY = ("summary.md", "loss.png", "summary.json")
"""The one that is asked for its steps comes last: moved half, they are moved again."""


def is_own(checkpoint: Path, folder: Path) -> bool:
    """Whether a checkpoint is of the run that keeps one precision's files in `folder`."""
    checkpoints = folder / "checkpoints"
    return checkpoints.exists() and checkpoints.samefile(checkpoint.absolute().parent)


def left_behind(checkpoint: Path, folder: Path) -> list[Path]:
    """What `folder`, of one precision, and the run's around it hold of a branch that does not lead to `checkpoint`.

    That is what came after it, or everything if the checkpoint is another run's. Newest checkpoints first: moved half,
    they leave a run that ended earlier.
    """
    shared = _shared_steps(checkpoint, folder)
    checkpoints = [path for path in checkpoints_in(folder / "checkpoints") if named_step(path) > shared]
    found = sorted(checkpoints, reverse=True)
    result = folder / "result.json"
    if result.exists() and read_record(result, {"step": int}, REMOVE)["step"] > shared:
        found.append(result)
    run = folder.parent
    summary = run / "summary.json"
    if summary.exists() and _summed_up(read_record(summary, {"columns": list}, REMOVE), folder.name) > shared:
        found += [run / name for name in _SUMMARY if (run / name).exists()]
    return found


def set_aside(task: Task, tell: Callable[[str], None]) -> Path | None:
    """Move what a task's run leaves behind into a folder of its own; `tell` gets a sentence that names it.

    Rank 0 calls it, when every rank has loaded the checkpoint and before anything is written. Returns the folder, None
    where nothing is left behind. After a crash halfway it moves the rest, into another folder.
    """
    checkpoint, folder, run = Path(task.resume), task.folder, Path(task.options.out)
    paths = left_behind(checkpoint, folder)
    if not paths:
        return None
    shared = _shared_steps(checkpoint, folder)
    aside = _new_folder(run, shared + 1)
    (aside / task.precision / "checkpoints").mkdir(parents=True)
    _copy_run_file(run, aside, task.precision)
    lines = [path for path in (folder / "metrics.jsonl", folder / FILE) if path.exists()]
    if shared:
        for path in lines:
            shutil.copy2(path, aside / task.precision)  # the steps before the fork belong to both
    else:
        paths = [*lines, *(path for path in (folder / "tensorboard",) if path.exists()), *paths]
    for path in paths:
        shutil.move(path, aside / path.relative_to(run))  # copies if checkpoints/ is a link to another disk
    tell(f"The run goes on from {checkpoint}; what {folder} held of another branch is set aside in {aside}.")
    return aside


def _shared_steps(checkpoint: Path, folder: Path) -> int:
    """Steps that the branch in `folder` and the one that leads to `checkpoint` have in common, at most."""
    return read_state(checkpoint).step if is_own(checkpoint, folder) else 0


def _summed_up(summary: dict[str, Any], precision: str) -> int:
    """Steps of one precision that a summary tells of; 0: none."""
    columns = summary["columns"]
    for column in columns:
        if not isinstance(column, dict):
            raise ValueError(f"A column of summary.json is no object; {REMOVE}.")
        require_fields(column, "A column of summary.json", {"precision": str, "steps": int}, REMOVE)
    return sum(column["steps"] for column in columns if column["precision"] == precision)


def _new_folder(run: Path, first: int) -> Path:
    folders = (run / f"abandoned-{first:08d}-{number}" for number in count(1))
    return next(folder for folder in folders if not folder.exists())


def _copy_run_file(run: Path, aside: Path, precision: str) -> None:
    about, options = read_run_file(run)
    del about["options"]
    write_run_file(dataclasses.replace(options.of_precision(precision), out=str(aside)), about)
