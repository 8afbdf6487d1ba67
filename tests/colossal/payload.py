"""What a stranger may put into a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path


class Payload:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: str | Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self._folder,)
