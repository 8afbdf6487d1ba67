"""One run of a campaign: its folder, which says how far it came and what it found.

    job.json        engine and job
    losses.jsonl    the losses, a line every few steps, some with losses on other text; at last, how it ended
    scales.jsonl    what FP8 does to each tensor, where that is recorded
    checkpoints/    where it goes on; removed when it has ended
    rank-0.log      what its processes print

A run that has ended needs its first three files alone.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.training.job import Job
from benchmarks.training.variants import Variant
from fp8booster.checkpoints import named_step, newest_checkpoint
from fp8booster.files import write_whole
from fp8booster.monitor.sinks import FILE

HELD_OUT, NOT_FINITE = "held out", "not finite"
"""How a run ends: with the loss on what it has not trained on, or where its loss was not finite."""

Point = tuple[int, float, float]
"""Tokens that were trained on, the loss on a text, and its standard error over the text."""


class RunFolder:
    """The files that a run has written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.scales = path / FILE
        self._record = path / "losses.jsonl"

    def claim(self, engine: str, job: Job) -> None:
        """Make the folder, or see that it is of this run.

        Raises:
            ValueError: another run was begun there.
        """
        # texts by what they are, wherever their files lie
        texts = {
            "tokens": None if job.tokens is None else job.tokens.identity,
            "kinds": [[name, tokens.identity] for name, tokens in job.kinds],
        }
        text = json.dumps({"engine": engine, "job": job.as_record() | texts}, indent=1) + "\n"
        file = self.path / "job.json"
        if file.exists() and file.read_text() != text:
            raise ValueError(f"{self.path} holds a run of other options or another text; give another --runs")
        self.path.mkdir(parents=True, exist_ok=True)
        write_whole(file, text)

    def lines(self) -> list[dict[str, Any]]:
        """Its record; without the last line, where a kill has cut that."""
        if not self._record.exists():
            return []
        whole = [line for line in self._record.read_text().splitlines(keepends=True) if line.endswith("\n")]
        return [json.loads(line) for line in whole]

    def append(self, **line: Any) -> None:
        """Write one line."""
        with self._record.open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def cut(self, step: int) -> None:
        """Forget the steps after one from which the run goes on."""
        kept = [line for line in self.lines() if line.get("step", step + 1) <= step]
        write_whole(self._record, "".join(json.dumps(line) + "\n" for line in kept))

    def losses(self) -> list[float]:
        """The losses of every step so far."""
        return [loss for line in self.lines() for loss in line.get("losses", ())]

    @property
    def resumes_at(self) -> int:
        """The step of the checkpoint from which it goes on; 0 where there is none."""
        checkpoint = newest_checkpoint(self.checkpoints)
        return 0 if checkpoint is None else named_step(checkpoint)

    def speed(self, since: int = 0) -> float | None:
        """The median tokens/s of the lines after a step, without evaluations; None where there are none."""
        timed = [line for line in self.lines() if line.get("step", 0) > since]
        return median(line["tokens"] / line["seconds"] for line in timed) if timed else None

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of its checkpoints on the disk."""
        return sum(path.stat().st_size for path in self.checkpoints.rglob("*") if path.is_file())

    def curves(self) -> dict[str, list[Point]]:
        """The evaluations so far, by the name of the text."""
        found: dict[str, list[Point]] = {}
        tokens = 0
        for line in self.lines():
            tokens += line.get("tokens", 0)
            texts = line.get("texts", {})
            if line.get("end") == HELD_OUT:
                texts = {HELD_OUT: line["held_out"], **line["kinds"]}
            for text, loss in texts.items():
                found.setdefault(text, []).append((tokens, loss["own"], loss["error"]))
        return found

    def end(self) -> dict[str, Any] | None:
        """The line that says how it ended; None of a run that has not."""
        return next((line for line in self.lines() if "end" in line), None)

    def finish(self, end: str, **facts: Any) -> None:
        """Write how it ended; it is not gone on with."""
        self.append(end=end, **facts)
        shutil.rmtree(self.checkpoints, ignore_errors=True)


@dataclass(frozen=True)
class Run:
    """One variant with one seed."""

    seed: int
    variant: Variant
    job: Job
    folder: RunFolder

    @property
    def name(self) -> str:
        return f"seed {self.seed}, {self.variant.label}"

    @classmethod
    def of(cls, root: Path, variants: Sequence[Variant], seeds: Sequence[int], job: Job) -> list[Run]:
        """All of a campaign, one seed after the other; each in a folder of its own."""
        return [
            cls(seed, variant, variant.job(job, seed), RunFolder(root / f"seed-{seed}" / variant.key))
            for seed in seeds
            for variant in variants
        ]
