"""What FP8 did to the tensors of a run, in each tenth of its steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from benchmarks.harness.results import Column, Record, Table
from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import read_scales

TENTHS = 10


def recorded(file: Path, steps: int) -> list[Record]:
    """Sum up a run's `scales.jsonl`: a record for each tenth of its steps and role; none where nothing was recorded."""
    if not file.exists():
        return []
    groups: dict[tuple[int, str], list[ScaleRow]] = {}
    for row in read_scales(file)[1]:
        groups.setdefault((min(TENTHS, 1 + (row.step - 1) * TENTHS // steps), row.role), []).append(row)
    return [
        {"tenth": tenth, "role": role, "samples": len({row.step for row in rows})} | _figures(rows)
        for (tenth, role), rows in sorted(groups.items())
    ]


def _figures(rows: Sequence[ScaleRow]) -> Record:
    found: Record = {}
    for name in FIGURES:
        values = {index: value for index, row in enumerate(rows) if (value := getattr(row, name)) is not None}
        if values:
            largest = max(values, key=values.__getitem__)
            found[name] = {
                "median": median(values.values()),
                "largest": values[largest],
                "layer": rows[largest].layer,
                "step": rows[largest].step,
            }
    return found


FIGURES = {"kurtosis": "kurtosis", "outlier": "amax / root mean square", "flushed": "became zero"}
"""Figures of `ScaleRow` that are shown."""


def recorded_table(runs: Sequence[tuple[str, Sequence[Record]]]) -> Table:
    """Show a run's figures, a row each, and the tenths of the steps as columns.

    Args:
        runs: names, and what `recorded` gave.
    """
    records: list[Record] = []
    for name, found in runs:
        for role in dict.fromkeys(each["role"] for each in found):
            for figure in FIGURES:
                of = {each["tenth"]: each[figure] for each in found if each["role"] == role and figure in each}
                if of:
                    records.append({"run": name, "role": role, "figure": figure, "tenths": of})
    return Table(
        "recorded",
        "What FP8 did to the tensors on the way",
        [
            Column("run", lambda r: r["run"]),
            Column("tensors", lambda r: r["role"]),
            Column("figure", lambda r: FIGURES[r["figure"]]),
            *(
                Column(f"tenth {tenth}", lambda r, tenth=tenth: _shown(r["figure"], r["tenths"].get(tenth)))
                for tenth in range(1, TENTHS + 1)
            ),
        ],
        records,
        "Of all sampled tensors of a tenth of the steps the median and the largest.",
    )


def _shown(figure: str, found: Record | None) -> str:
    if found is None:
        return "-"
    factor, unit = (100, " %") if figure == "flushed" else (1, "")
    return f"{factor * found['median']:.3g}, {factor * found['largest']:.3g}{unit}"
