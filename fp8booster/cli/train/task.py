"""What the command hands to a worker process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .options import TrainOptions
from .tokens import TokenFile


@dataclass(frozen=True, kw_only=True)
class Task:
    """One run in one precision."""

    options: TrainOptions
    """Resolved."""
    precision: str
    """"bf16" or "fp8"."""
    tokens: TokenFile
    resume: str | None
    """Checkpoint to continue from."""

    @property
    def folder(self) -> Path:
        """Where this precision of the run keeps its files."""
        return Path(self.options.out) / self.precision

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"
