"""The loss in FP8 compared with BF16, over several seeds: the differences, and how far chance moves them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.plots import plot_differences
from benchmarks.harness.results import Column, Record, Table

BF16 = "BF16"
TENTHS = 10

Losses = Mapping[int, Mapping[str, Sequence[float]]]
"""By seed and variant, of every step; a seed has the variants that were trained."""

NOTE = (
    "The loss is the mean of a tenth of the steps, the difference that to BF16's of the same seed, over it. "
    "After ± is the standard error of the mean over the seeds: two runs that round differently, as both "
    "variants of BF16 do, part from each other too, and what of a difference lies within a few of its errors "
    "may be chance."
)


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of what one variant's loss is over BF16's, less one."""

    mean: float
    error: float
    """Standard error of the mean; NaN of one seed."""

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference:
        """Of one value for each seed."""
        count = len(differences)
        error = float(np.std(differences, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(np.mean(differences)), error)

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {100 * self.error:.2f}"
        return f"{100 * self.mean:+.2f}{error} %"


def read_runs(files: Sequence[Path]) -> tuple[dict[int, dict[str, list[float]]], list[str], list[dict[str, Any]]]:
    """Results of `benchmarks.convergence --json`, with different seeds.

    Returns:
        the losses of all, their variants, and the results.

    Raises:
        ValueError: a file is no such result, two have one seed, or they differ in what they train.
    """
    losses: dict[int, dict[str, list[float]]] = {}
    variants: dict[str, None] = {}
    runs = []
    for file in files:
        found = json.loads(file.read_text())
        if "ends" not in found.get("tables", {}):
            raise ValueError(f"{file} is not a result of `benchmarks.convergence --json`")
        runs.append(found)
        for line in COMPARED:
            if found["head"][line] != runs[0]["head"][line]:
                raise ValueError(
                    f"{file} differs in {line} from {files[0]}: {found['head'][line]} and {runs[0]['head'][line]}; "
                    "join runs that differ in their seeds alone"
                )
        for record in found["tables"]["ends"]:
            if "losses" not in record:
                continue  # the mean over seeds
            if int(record["seed"]) in losses:
                raise ValueError(f"{file} has seed {record['seed']}, which another file has too")
            losses[int(record["seed"])] = record["losses"]
            variants |= dict.fromkeys(record["losses"])
    return dict(sorted(losses.items())), list(variants), runs


COMPARED = ("GPU", "ranks", "training")
"""Lines of the head that must be alike."""


def tenths(losses: Sequence[float]) -> list[float]:
    """The mean of each tenth of the steps; of each step, where there are fewer than ten."""
    return [float(np.mean(part)) for part in np.array_split(losses, min(TENTHS, len(losses)))]


def differences(losses: Losses, variant: str) -> list[Difference]:
    """Of each tenth, over the seeds that have both the variant and BF16."""
    both = [by_variant for by_variant in losses.values() if variant in by_variant and BF16 in by_variant]
    if not both:
        return []
    ratios = [np.divide(tenths(each[variant]), tenths(each[BF16])) - 1 for each in both]
    return [Difference.of(of_tenth) for of_tenth in np.transpose(ratios)]


def end_table(losses: Losses, variants: Sequence[str]) -> Table:
    """The last tenth, seed by seed, and over all of them."""
    records: list[Record] = [
        {
            "seed": str(seed),
            "last": {name: tenths(each)[-1] for name, each in by_variant.items()},
            "losses": {name: list(each) for name, each in by_variant.items()},
        }
        for seed, by_variant in losses.items()
    ]
    over_all: Record = {"seed": "all", "differences": {}}
    for name in variants:
        if name != BF16 and (found := differences(losses, name)):
            over_all["differences"][name] = {"mean": found[-1].mean, "error": found[-1].error, "shown": str(found[-1])}
    return Table(
        "ends",
        "The last tenth of the steps",
        [Column("seed", lambda r: r["seed"]), *(Column(name, lambda r, name=name: _end(r, name)) for name in variants)],
        [*records, over_all],
        NOTE,
    )


def _end(record: Record, variant: str) -> str:
    if "last" not in record:
        return record["differences"].get(variant, {}).get("shown", "")
    last = record["last"]
    if variant not in last:
        return "-"
    if variant == BF16 or BF16 not in last:
        return f"{last[variant]:.4f}"
    return f"{last[variant]:.4f} ({100 * (last[variant] / last[BF16] - 1):+.2f} %)"


def course_table(losses: Losses, variants: Sequence[str]) -> Table:
    """The mean difference of each tenth."""
    of = {name: differences(losses, name) for name in variants if name != BF16}
    steps = max((len(each) for by_variant in losses.values() for each in by_variant.values()), default=0)
    ends = np.cumsum([len(part) for part in np.array_split(range(steps), min(TENTHS, steps) or 1)])
    records = [
        {
            "steps": f"{begin + 1} to {end}",
            "differences": {name: str(found[index]) for name, found in of.items() if index < len(found)},
        }
        for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return Table(
        "course",
        "Difference to BF16 on the way, the mean over seeds",
        [
            Column("steps", lambda r: r["steps"]),
            *(Column(name, lambda r, name=name: r["differences"].get(name, "-")) for name in of),
        ],
        records,
    )


def plot(path: Path, losses: Losses, variants: Sequence[str], title: str) -> bool:
    """Draw the differences over the tenths, with their errors; whether there are any."""
    lines = {name: found for name in variants if name != BF16 and (found := differences(losses, name))}
    if lines:
        plot_differences(
            path,
            title=title,
            x_label="tenth of the steps",
            y_label="loss over BF16's, %",
            lines={name: [(100 * each.mean, 100 * each.error) for each in found] for name, found in lines.items()},
        )
    return bool(lines)
