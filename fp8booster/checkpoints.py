"""Folders of checkpoints: `step-<step>` is whole or not there, and the last ones stay.

Every rank runs `with new_checkpoint(root, step, keep=2) as folder:`, with whatever belongs to the checkpoint in the
block, as `booster.save_model(model, str(folder / "model"), shard=True)`. `newest_checkpoint(root)` is where to resume,
unless `is_finite` is False of it: `last_finite` finds the one before. `what_is_broken` finds files of it that were cut,
lost, or put there from another step.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from .files import put_in_place, sync_folder
from .reading import first_of

FILES = "files.json"
"""The list, in a checkpoint's folder, of its files: by path, the size in bytes and the digest of each."""

_END = 1 << 20  # bytes of a file's beginning and end that the digest is of

_PARTIAL, _FORMER, _OLD = (f".fp8booster-{role}" for role in ("partial", "former", "old"))
"""Ends of names, which begin with a dot, of folders that are written, replaced and removed."""

_NAME = re.compile(rf"(step-(\d{{8,}}))|\.(step-(\d{{8,}})){_FORMER}")
_LEFT = re.compile(rf"\.step-\d{{8,}}({_PARTIAL}|{_FORMER}|{_OLD})")

_NOT_FINITE = "not-finite.txt"  # file in a checkpoint whose weights or optimizer states are not finite


def checkpoints_in(root: Path) -> list[Path]:
    """Return the checkpoints in a folder of checkpoints, by step. Folders of other names are not looked at."""
    finals = {root / (match[1] or match[3]) for path in root.glob("*") if (match := _NAME.fullmatch(path.name))}
    places = [final if final.is_dir() else _hidden(final, _FORMER) for final in sorted(finals, key=named_step)]
    return [place for place in places if place.is_dir()]


def newest_checkpoint(root: Path) -> Path | None:
    """Return the checkpoint of the highest step in a folder of checkpoints."""
    return next(reversed(checkpoints_in(root)), None)


def named_step(checkpoint: Path) -> int | None:
    """Return the step in a checkpoint's name; None for a folder that was given another name."""
    match = _NAME.fullmatch(checkpoint.name)
    return int(match[2] or match[4]) if match else None


def is_finite(checkpoint: Path) -> bool:
    """Tell whether a checkpoint was saved as one whose weights and optimizer states are finite."""
    return not (checkpoint / _NOT_FINITE).exists()


def last_finite(checkpoints: Sequence[Path]) -> Path | None:
    """Return the last of some checkpoints that was saved as finite; None where none was."""
    return next(filter(is_finite, reversed(checkpoints)), None)


@contextmanager
def new_checkpoint(root: Path, step: int, *, keep: int = 0, finite: bool = True) -> Iterator[Path]:
    """Yield a new folder, which takes its place as the checkpoint of `step` when all ranks have left the block.

    Every rank enters and leaves. A block that is not finished, on any rank, leaves the checkpoints before as they
    were; what it wrote is removed by the next. No folder is removed but those that this function made.

    Args:
        root: on a disk that all ranks share.
        keep: newest checkpoints that stay, of those up to this step, with the last finite one; 0: all.
        finite: the weights and optimizer states of all ranks are, as `BoostedModel.is_finite` tells.

    Raises:
        OSError: the disk did not take what was written.
    """
    final = root / f"step-{step:08d}"
    partial = _hidden(final, _PARTIAL)
    if _rank() == 0:
        for left in root.glob(".step-*"):
            if _LEFT.fullmatch(left.name) and left not in checkpoints_in(root):
                shutil.rmtree(left)
        partial.mkdir(parents=True)
    _barrier()
    yield partial
    _barrier()
    if _rank() == 0:
        if not finite:
            (partial / _NOT_FINITE).write_text("Weights or optimizer states in this checkpoint are NaN or infinite.\n")
        write_manifest(partial)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # of a shared disk each machine syncs what it wrote itself
        sync_folder(partial)
    _barrier()
    if _rank() == 0:
        put_in_place(partial, final, former=_hidden(final, _FORMER))
        written = [path for path in checkpoints_in(root) if named_step(path) <= step]
        good = last_finite(written)
        for old in written[:-keep] if keep else []:
            if old != good:
                # renamed first: one that is removed in part must not be taken for a checkpoint
                shutil.rmtree(old.rename(_hidden(root / f"step-{named_step(old):08d}", _OLD)))
    _barrier()


def write_manifest(folder: Path) -> None:
    """List the files of a checkpoint that is complete; a list that is there is replaced, and not in the new one."""
    (folder / FILES).unlink(missing_ok=True)
    files = {str(path.relative_to(folder)): _mark(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / FILES).write_text(json.dumps(files, indent=1) + "\n")


def what_is_broken(folder: Path) -> str | None:
    """Name the files of a checkpoint that are not those that were saved as it, in a sentence.

    Files are compared by size and by their first and last MiB: that tells files of different steps apart and finds cut
    ones, in little time, but not each flipped bit. None where all are as saved, or the checkpoint has no list.
    """
    if not (folder / FILES).is_file():
        return None
    try:
        listed = json.loads((folder / FILES).read_text())
        wrong = [f"{name} {fault}" for name, mark in listed.items() if (fault := _fault(folder / name, *mark))]
    except (ValueError, TypeError, AttributeError):
        return f"{folder} is broken: its list of files, {FILES}, cannot be read"
    return f"{folder} is broken: {first_of(wrong, shown=3)}" if wrong else None


SHARDING = "sharding"
"""Key of the metadata of a rank's file: how masters are divided."""

ZERO_ALONE = "ZeRO"
"""Its value where each rank has a flat shard of each parameter."""


def rank_file(folder: Path, rank: int, ranks: int) -> Path:
    """Return the file that a rank writes by itself, as of its master weights."""
    return folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def rank_files(folder: Path) -> tuple[list[Path], int]:
    """Return the files in a folder that ranks wrote, in their order, and by the first one's name how many wrote."""
    files = sorted(folder.glob("rank-*-of-*.safetensors"))
    return files, int(files[0].stem.rpartition("-")[2]) if files else 0


def _fault(path: Path, size: int, digest: str) -> str | None:
    if not path.is_file():
        return "is missing"
    found, found_digest = _mark(path)
    if found != size:
        return f"has {found} of {size} bytes"
    return None if found_digest == digest else "is of another step, or changed"


def _mark(path: Path) -> tuple[int, str]:
    """Return the size and the digest of a file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        ends = hashlib.sha256(stream.read(_END))
        stream.seek(max(0, size - _END))
        ends.update(stream.read(_END))
    return size, ends.hexdigest()


def _hidden(final: Path, end: str) -> Path:
    return final.with_name(f".{final.name}{end}")


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
