"""What `--resume` names: a run's folder, or one checkpoint."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8booster.checkpoints import checkpoints_in, is_finite, last_finite, named_step, newest_checkpoint, what_is_broken
from fp8booster.files import write_whole
from fp8booster.reading import COPY_AGAIN, read_record

from .checkpoint import is_checkpoint, read_state
from .options import PRECISIONS, TrainOptions

RUN_FILE = "run.json"
"""Beside a run's results: its options, its command and what it went on from."""

_ORIGINS = "resumed"
"""In it: the checkpoint that each precision went on from, which may be another run's."""


@dataclass(frozen=True)
class Resume:
    """Where a run goes on."""

    options: TrainOptions
    """Those of the run, before what the command line changes."""
    checkpoints: dict[str, str]
    """The checkpoint for each precision that has one."""


def find_resume(folder: str) -> Resume:
    """Read what a run's folder or a checkpoint says.

    Raises ValueError when the folder is neither, or has saved nothing and what it went on from is gone.
    """
    path = Path(folder)
    if is_checkpoint(path):
        state = read_state(path)
        run = path.absolute().parent.parent.parent
        out = str(run) if (run / RUN_FILE).is_file() else None
        options = dataclasses.replace(state.options.of_precision(state.precision), out=out)
        return Resume(options, {state.precision: folder})
    if (path / RUN_FILE).is_file():
        about, options = read_run_file(path)
        checkpoints = {}
        for precision in PRECISIONS[options.precision]:
            newest = newest_checkpoint(path / precision / "checkpoints")
            if newest is not None:
                checkpoints[precision] = str(newest)
            elif origin := about.get(_ORIGINS, {}).get(precision):
                if not is_checkpoint(Path(origin)):
                    raise ValueError(
                        f"{folder} went on from {origin}, which is gone, and has saved nothing since; start a new run "
                        "with another --out."
                    )
                checkpoints[precision] = origin
        return Resume(dataclasses.replace(options, out=folder), checkpoints)
    raise ValueError(
        f"{folder} is neither a run nor a checkpoint; --resume takes a run's folder (with {RUN_FILE}) or one of its "
        "checkpoints (step-...)."
    )


def require_whole(checkpoint: Path) -> None:
    """Raise ValueError where a file of a checkpoint is not the one that was saved; it names the one before to take."""
    if (fault := what_is_broken(checkpoint)) is not None:
        before = _last_sound_before(checkpoint)
        raise ValueError(f"{fault}; {COPY_AGAIN}" + (f": --resume {shlex.quote(str(before))}" if before else "") + ".")


def require_resumable(checkpoint: Path, on_nonfinite: str) -> None:
    """Raise ValueError for a checkpoint that is not whole, or not finite unless `on_nonfinite` is "warn"."""
    require_whole(checkpoint)
    if on_nonfinite != "warn" and not is_finite(checkpoint):
        raise ValueError(why_not_resumed(checkpoint))


def why_not_resumed(checkpoint: Path) -> str:
    """Return the sentence about a checkpoint whose values are not finite, which names the one before to take."""
    before = _last_sound_before(checkpoint)
    remedy = (
        f"go on from the last one of finite values: --resume {shlex.quote(str(before))}, with a lower --lr or another "
        "--seed"
        if before
        else "no checkpoint before it has finite ones: train anew, with a lower --lr and another --out"
    )
    return (
        f"{checkpoint} has weights or optimizer states that are NaN or infinite; {remedy}. --on-nonfinite warn goes on "
        "from it all the same."
    )


def _last_sound_before(checkpoint: Path) -> Path | None:
    """Return the last checkpoint of an earlier step, beside this one, that a run can go on from."""
    step, others = named_step(checkpoint), checkpoints_in(checkpoint.parent)
    before = [other for other in others if step is not None and named_step(other) < step]
    return last_finite([other for other in before if what_is_broken(other) is None])


def read_run_file(run: Path) -> tuple[dict[str, Any], TrainOptions]:
    """What a run's folder says of it, and its options. Raises ValueError where the file does not say them."""
    file = run / RUN_FILE
    remedy = "put it right, or --resume one of the run's checkpoints (step-...) with another --out"
    about = read_record(file, {"options": dict}, remedy)
    origins = about.get(_ORIGINS, {})
    if not isinstance(origins, dict) or not all(isinstance(path, str) for path in origins.values()):
        raise ValueError(f"{_ORIGINS!r} in {file} is no object of paths; {remedy}.")
    return about, TrainOptions.from_file(about["options"], file, remedy)


def write_run_file(options: TrainOptions, about: dict[str, Any], resumed: Mapping[str, str] | None = None) -> None:
    """Keep a run's options in its folder.

    Args:
        about: what else is to be known of it.
        resumed: the checkpoint that each precision goes on from, where one does.
    """
    origins = {precision: str(Path(checkpoint).absolute()) for precision, checkpoint in (resumed or {}).items()}
    document = {**about, **({_ORIGINS: origins} if origins else {}), "options": dataclasses.asdict(options)}
    write_whole(Path(options.out) / RUN_FILE, json.dumps(document, indent=1) + "\n")
