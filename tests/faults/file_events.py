"""Count what a process does to the files of a folder, and kill it at one of these events."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR
_CHANGES = ("os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.link", "os.symlink")


class FileEvents:
    """The events in a folder: files opened to be written, renamed, removed and synced, folders made and removed.

    What torch and safetensors write past Python counts as two: before the file, and when it is half written.

    Args:
        folder: whose files count; those that other processes write do not.
        first: counting begins with a path that holds this text.
        fatal: the process gives itself a signal at the event of this number, before it happens; 0: it lives.
        native: count what torch and safetensors write too; imports them.
    """

    def __init__(
        self,
        folder: str | Path,
        first: str = "",
        fatal: int = 0,
        signal_number: int = signal.SIGKILL,
        native: bool = True,
    ) -> None:
        self.seen: list[str] = []
        self._folder = str(folder)
        self._first = first
        self._fatal = fatal
        self._signal = signal_number
        sys.addaudithook(self._hear)
        if native:
            self._wrap_writers()

    def _hear(self, kind: str, arguments: tuple) -> None:
        if kind == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & _WRITES:
                self._note("write", path)
        elif kind in _CHANGES:
            descriptors = [value for value in arguments[1:] if isinstance(value, int) and value > 2]
            relative = kind in ("os.remove", "os.rmdir") and descriptors  # shutil.rmtree names them by their folder
            self._note(kind, arguments[0], _path_of(descriptors[-1]) if relative else None)

    def _note(self, what: str, path: object, parent: str | None = None, tear: bool = False) -> None:
        if isinstance(path, int):
            path = _path_of(path)
        path = os.fsdecode(path) if isinstance(path, (str, bytes, os.PathLike)) else ""
        path = os.path.join(parent, path) if parent else path
        if not path.startswith(self._folder) or (not self.seen and self._first not in path):
            return
        if "tensorboard" in path:  # written by a thread, whenever it comes to it
            return
        self.seen.append(f"{what} {path.removeprefix(self._folder)}")
        if len(self.seen) == self._fatal:
            if tear:
                os.truncate(path, os.path.getsize(path) // 2)
            os.kill(os.getpid(), self._signal)

    def _wrap_writers(self) -> None:
        import safetensors.torch
        import torch

        def torn(write: Callable[..., Any], place: int) -> Callable[..., Any]:
            @wraps(write)
            def note(*arguments: Any, **named: Any) -> Any:
                path = arguments[place] if len(arguments) > place else named.get("f", named.get("filename"))
                if not isinstance(path, (str, os.PathLike)):
                    return write(*arguments, **named)
                self._note("native write", path)
                value = write(*arguments, **named)
                self._note("native half", path, tear=True)
                return value

            return note

        fsync = os.fsync

        def noted_fsync(descriptor: int) -> None:
            self._note("fsync", descriptor)
            fsync(descriptor)

        os.fsync = noted_fsync
        torch.save = torn(torch.save, 1)
        safetensors.torch.serialize_file = torn(safetensors.torch.serialize_file, 1)


def _path_of(descriptor: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        return ""
