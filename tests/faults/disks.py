"""Folders on a disk that is full or cannot be written; root on Linux can make them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_ROOMY = 1 << 30


class CannotMount(Exception):
    """This user, or this machine, mounts nothing."""


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system in memory at a folder, roomy at first."""
    folder.mkdir(parents=True)
    _mount("-t", "tmpfs", "-o", f"size={_ROOMY}", "tmpfs", folder)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def leave_room(folder: Path, size: int | None = None) -> None:
    """Let a small disk take so many more bytes; None: enough."""
    if size is not None:
        size += sum(-(-path.stat().st_size // 4096) * 4096 for path in folder.rglob("*") if path.is_file())
    _mount("-o", f"remount,size={size or _ROOMY}", folder)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Meanwhile nothing in a folder can be changed, not by root either."""
    _mount("--bind", folder, folder)
    try:
        _mount("-o", "remount,bind,ro", folder)
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def _mount(*arguments: object) -> None:
    done = subprocess.run(["mount", *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotMount(done.stderr.strip())
