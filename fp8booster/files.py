"""Files and folders that a kill, a full disk or a power cut leaves whole: as they were, or as they are to be.

Files and folders have a new name until they are whole. Nothing that is there already is written over or removed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of files that runs share: $XDG_CACHE_HOME/fp8booster, by default ~/.cache/fp8booster."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fp8booster"


def write_whole(path: Path, text: str) -> None:
    """Write a file: under a new name, then to the disk, then in its place."""
    for partial in _new_names(path):
        try:
            stream = partial.open("x", encoding="utf-8")
            break
        except FileExistsError:
            continue
    try:
        with naming(path), stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a write that fails in the block name its file, which the system does not."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


@contextmanager
def new_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder, which is renamed to `final` when the block ends, and removed where the block raises.

    A kill may leave it, in the same folder, under a name that begins with a dot.

    Raises:
        OSError: something is at `final`, or the disk did not take what was written.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for partial in _new_names(final):
        try:
            partial.mkdir()
            break
        except FileExistsError:
            continue
    try:
        yield partial
        sync_folder(partial)
        if final.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(final))
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    _sync(final.parent)


def sync_folder(folder: Path) -> None:
    """Return when everything in a folder is on the disk. Raises OSError where the disk did not take it.

    A machine can sync what it wrote itself alone: on a shared disk one process of each calls it.
    """
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def put_in_place(partial: Path, final: Path, former: Path) -> None:
    """Rename a folder that is whole, and on the disk, to its final name.

    A folder that has the name waits as `former` in between, and is removed, as anything at `former` before.
    """
    if final.exists():
        shutil.rmtree(former, ignore_errors=True)
        final.rename(former)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(former, ignore_errors=True)


def _new_names(path: Path) -> Iterator[Path]:
    """Yield names in the same folder, to be tried until one is free; short enough for any file system."""
    return (path.with_name(f".{path.name[:40]}.{number}.partial") for number in count(1))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL or not path.is_dir():  # some network file systems sync no folders
            raise
    finally:
        os.close(descriptor)
