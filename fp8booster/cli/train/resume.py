"""What `--resume` names: a run's folder, or one checkpoint."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoint import is_checkpoint, newest_checkpoint, read_state
from .files import write_whole
from .options import PRECISIONS, TrainOptions

RUN_FILE = "run.json"
"""Beside a run's results: its options and command."""


@dataclass(frozen=True)
class Resume:
    """Where a run goes on."""

    options: TrainOptions
    """Those of the run, before what the command line changes."""
    checkpoints: dict[str, str]
    """The checkpoint for each precision that has one."""


def find_resume(folder: str) -> Resume:
    """Read what a run's folder or a checkpoint says.

    Raises ValueError when the folder is neither.
    """
    path = Path(folder)
    if is_checkpoint(path):
        state = read_state(path)
        run = path.absolute().parent.parent.parent
        out = str(run) if (run / RUN_FILE).is_file() else None
        options = dataclasses.replace(state.options, precision=state.precision, out=out)
        return Resume(options, {state.precision: folder})
    if (path / RUN_FILE).is_file():
        options = TrainOptions.from_mapping(json.loads((path / RUN_FILE).read_text())["options"])
        found = {
            precision: newest_checkpoint(path / precision / "checkpoints")
            for precision in PRECISIONS[options.precision]
        }
        checkpoints = {precision: str(checkpoint) for precision, checkpoint in found.items() if checkpoint}
        return Resume(dataclasses.replace(options, out=folder), checkpoints)
    raise ValueError(
        f"{folder} is neither a run nor a checkpoint; --resume takes a run's folder (with {RUN_FILE}) or one of its "
        "checkpoints (step-...)."
    )


def write_run_file(options: TrainOptions, about: dict[str, Any]) -> None:
    """Keep a run's options in its folder."""
    path = Path(options.out) / RUN_FILE
    write_whole(path, json.dumps({**about, "options": dataclasses.asdict(options)}, indent=1) + "\n")
