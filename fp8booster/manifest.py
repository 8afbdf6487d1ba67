"""The list of a checkpoint's files, by which one that was cut, lost or put there from another step is found."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from .listing import first_of

NAME = "files.json"
"""The list, in the checkpoint's folder: by path, the size in bytes and the digest of each of its files."""

_END = 1 << 20  # bytes of a file's beginning and end that the digest is of


def write_manifest(folder: Path) -> None:
    """List the files of a checkpoint that is complete; a list that is there is replaced, and not in the new one."""
    (folder / NAME).unlink(missing_ok=True)
    files = {str(path.relative_to(folder)): _mark(path) for path in sorted(folder.rglob("*")) if path.is_file()}
    (folder / NAME).write_text(json.dumps(files, indent=1) + "\n")


def what_is_broken(folder: Path) -> str | None:
    """Which files of a checkpoint are not those that were saved as it, in a sentence.

    Files are compared by size and by their first and last MiB: that tells files of different steps apart and finds cut
    ones, in little time, but not each flipped bit. None where all are as saved, or the checkpoint has no list.
    """
    if not (folder / NAME).is_file():
        return None
    try:
        listed = json.loads((folder / NAME).read_text())
        wrong = [f"{name} {fault}" for name, mark in listed.items() if (fault := _fault(folder / name, *mark))]
    except (ValueError, TypeError, AttributeError):
        return f"{folder} is broken: its list of files, {NAME}, cannot be read"
    return f"{folder} is broken: {first_of(wrong, shown=3)}" if wrong else None


def _fault(path: Path, size: int, digest: str) -> str | None:
    if not path.is_file():
        return "is missing"
    found, found_digest = _mark(path)
    if found != size:
        return f"has {found} of {size} bytes"
    return None if found_digest == digest else "is of another step, or changed"


def _mark(path: Path) -> tuple[int, str]:
    """Size and digest of a file."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        ends = hashlib.sha256(stream.read(_END))
        stream.seek(max(0, size - _END))
        ends.update(stream.read(_END))
    return size, ends.hexdigest()
