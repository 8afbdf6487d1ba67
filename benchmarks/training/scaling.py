"""Weak scaling, from the JSON files of runs with different numbers of GPUs."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.results import Column, Record, Table, spread

COMPARED = ("GPU", "training")
"""Lines of the head that must be alike."""


def read_runs(files: Sequence[Path]) -> list[dict[str, Any]]:
    """The results in files, the one on fewest GPUs first.

    Raises:
        ValueError: a file is no result of `benchmarks.llama`, two are on as many GPUs, or they differ in what they
            train.
    """
    runs = []
    for file in files:
        found = json.loads(file.read_text())
        if "ranks" not in found.get("head", {}) or "engines" not in found.get("tables", {}):
            raise ValueError(f"{file} is not a result of `benchmarks.llama --json`")
        runs.append(found)
    runs.sort(key=_ranks)
    for one, other in itertools.pairwise(runs):
        if _ranks(one) == _ranks(other):
            raise ValueError(f"two of the results are on {_ranks(one)} GPUs; give one for each number of GPUs")
        for line in COMPARED:
            if one["head"][line] != other["head"][line]:
                raise ValueError(
                    f"the results differ in {line}: {one['head'][line]} and {other['head'][line]}; weak scaling "
                    "compares runs that differ in the number of GPUs alone"
                )
    return runs


def scaling_records(runs: Sequence[dict[str, Any]]) -> list[Record]:
    """For each engine and number of GPUs the efficiency: throughput of a GPU over that on the fewest GPUs."""
    records = []
    for name in dict.fromkeys(record["engine"] for run in runs for record in run["tables"]["engines"]):
        first = None
        for run in runs:
            found = next((each for each in run["tables"]["engines"] if each["engine"] == name), None)
            if found is None or "ms" not in found:
                continue
            throughput = found["tokens_per_second_per_gpu"]
            first = first or throughput
            records.append(
                {
                    "engine": name,
                    "label": found["label"],
                    "ranks": _ranks(run),
                    "ms": found["ms"],
                    "tokens_per_second_per_gpu": throughput,
                    "tokens_per_second": throughput * _ranks(run),
                    "efficiency": throughput / first,
                }
            )
    return records


def scaling_table(records: Sequence[Record]) -> Table:
    """One row for each engine and number of GPUs."""
    return Table(
        "scaling",
        "Weak scaling",
        [
            Column("engine", lambda r: r["label"]),
            Column("GPUs", lambda r: str(r["ranks"])),
            Column("ms", lambda r: spread(r["ms"], 1)),
            Column("tokens/s/GPU", lambda r: f"{r['tokens_per_second_per_gpu']:.0f}"),
            Column("tokens/s", lambda r: f"{r['tokens_per_second']:.0f}"),
            Column("efficiency", lambda r: f"{100 * r['efficiency']:.1f} %"),
        ],
        records,
        "The same work for each GPU. Efficiency is the throughput of a GPU over that on the fewest GPUs measured.",
    )


def _ranks(run: dict[str, Any]) -> int:
    return int(run["head"]["ranks"])
