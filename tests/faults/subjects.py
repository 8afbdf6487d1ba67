"""What the campaign does harm to: `fp8booster train` in each plugin, and the examples, on two gloo ranks.

A run has `STEPS` steps and saves after steps `SAVED` and `2 * SAVED`, and at its end. It keeps one checkpoint, so that
a save removes one too.
"""

from __future__ import annotations

import dataclasses
import shutil
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from fp8booster.cli.train.data import TokenFile, prepare_tokens
from fp8booster.cli.train.defaults import resolve
from fp8booster.cli.train.options import TrainOptions
from tests.colossal.models import tiny_llama

STEPS, SAVED = 5, 2
VOCABULARY = 336


@dataclass(frozen=True)
class Subject:
    """A way to train."""

    name: str
    exact: bool
    """A resumed run is promised to end with the bits of one that was never interrupted."""
    options: dict | None = None
    """Of the command, beside those that all have; None for an example."""
    example: tuple[str, ...] = ()
    """Of `examples/pretrain.py`."""


SUBJECTS = {
    subject.name: subject
    for subject in (
        Subject("zero", True, {"batch": 2}),
        Subject("zero-codes", True, {"batch": 2, "optimizer": "adamw-8bit", "save_codes": True}),
        Subject("hybrid", True, {"plugin": "hybrid", "batch": 2}),
        Subject("tp", True, {"plugin": "hybrid", "tp": 2, "batch": 4}),
        Subject("pp", True, {"plugin": "hybrid", "pp": 2, "batch": 2, "accumulate": 2}),
        Subject("fsdp", True, {"plugin": "fsdp", "batch": 2}),
        Subject("gemini", False, {"plugin": "gemini", "batch": 2}),
        Subject("ddp", False, {"plugin": "ddp", "batch": 2}),
        Subject("example-zero", False, example=("--plugin", "low_level_zero")),
        Subject("example-moe", False, example=("--plugin", "moe", "--ep", "2", "--experts", "4")),
    )
}


@dataclass(frozen=True)
class Place:
    """What all runs of a campaign share."""

    options: TrainOptions
    tokens: TokenFile
    text: str


def prepare(folder: Path, steps: int = STEPS, save: int = SAVED) -> Place:
    """A tiny model's config, a little real text and its tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.py"
    shutil.copy(Path(sysconfig.get_paths()["stdlib"], "ast.py"), text)
    tiny_llama(vocab_size=VOCABULARY).config.save_pretrained(folder / "model")
    options = TrainOptions(
        model=str(folder / "model"),
        data=str(text),
        vocabulary=VOCABULARY,
        cache=str(folder / "cache"),
        out=str(folder),
        precision="fp8",
        steps=steps,
        save=save,
        keep=1,
        sequence=32,
        lr=1e-2,
        warmup=1,
        nproc=2,
    )
    options = resolve(options, launched=False)
    return Place(options, prepare_tokens(options, lambda _: None), str(text))


def options_in(place: Place, subject: Subject, out: Path) -> TrainOptions:
    """The options of one run of the command."""
    return dataclasses.replace(place.options, out=str(out), **subject.options)


def checkpoints_of(subject: Subject, out: Path) -> Path:
    """Where a run keeps its checkpoints."""
    return out if subject.options is None else out / "fp8" / "checkpoints"
