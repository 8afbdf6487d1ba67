"""What the command hands to a worker process."""

from __future__ import annotations

import dataclasses
import json
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

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), default=str)

    @classmethod
    def from_json(cls, text: str) -> Task:
        """The task that `to_json` wrote."""
        values = json.loads(text)
        values["options"] = TrainOptions.from_mapping(values["options"])
        values["tokens"] = TokenFile(**{**values["tokens"], "folder": Path(values["tokens"]["folder"])})
        return cls(**values)
