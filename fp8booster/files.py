"""Files and folders that a kill, a full disk or a power cut leaves whole: as they were, or as they are to be."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Write a file: under another name, then to the disk, then in its place."""
    partial = path.with_name(f"{path.name}.partial")
    with partial.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(path)
    _sync(path.parent)


def sync_folder(folder: Path) -> None:
    """Return when everything in a folder is on the disk. Raises OSError where the disk did not take it.

    A machine vouches for what it wrote itself: on a shared disk one process of each calls it.
    """
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def put_in_place(partial: Path, final: Path) -> None:
    """Rename a folder that is whole, and on the disk, to where it is looked for.

    What was there waits as `.<name>.former` in between, and is removed.
    """
    former = former_of(final)
    if final.exists():
        shutil.rmtree(former, ignore_errors=True)
        final.rename(former)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(former, ignore_errors=True)


def former_of(final: Path) -> Path:
    """Where `put_in_place` keeps what was at a place; there without the place itself only after a kill."""
    return final.with_name(f".{final.name}.former")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)
