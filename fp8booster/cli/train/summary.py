"""The end of a run: one column of figures for each precision, as a table, as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from fp8booster.cli.metrics import LAST, RunFigures, count_fp8, finite_or_null, not_in_fp8
from fp8booster.files import write_whole
from fp8booster.version import __version__

from .options import TrainOptions

_PACKAGES = ("torch", "colossalai", "transformers")


def rows(columns: list[RunFigures]) -> list[list[str]]:
    """Return the table's lines: a title, a value for each column."""
    first = columns[0]
    table = [
        ["final loss", *(f"{column.final_loss:.4f}" for column in columns)],
        ["tokens/s", *(f"{column.tokens_per_second:,.0f}" for column in columns)],
        ["ms a step", *(f"{1e3 * column.step_seconds:,.1f}" for column in columns)],
        ["peak memory, MiB a rank", *(f"{column.peak_memory / 2**20:,.0f}" for column in columns)],
        ["sent, MB a step and rank", *(f"{column.step_bytes / 1e6:,.2f}" for column in columns)],
        ["linear layers in FP8", *(f"{count_fp8(column.layers)} of {len(column.layers)}" for column in columns)],
    ]
    others = [f"{count_fp8(column.others)} of {len(column.others)}" if column.others else "" for column in columns]
    if any(others):
        table.append(["other weights in FP8", *others])
    shares = {
        "of the FP8 peak at its clock": [column.peak_share for column in columns],
        "of what its products reach": [column.reachable_share for column in columns],
    }
    # nothing where no limit is known, as on a CPU
    known = {title: values for title, values in shares.items() if any(value is not None for value in values)}
    table[2:2] = [[title, *("" if value is None else f"{value:.1%}" for value in of)] for title, of in known.items()]
    if len(columns) > 1:
        difference = [f"{100 * (column.final_loss / first.final_loss - 1):+.2f} %" for column in columns[1:]]
        table.insert(1, [f"difference from {first.precision.upper()}", "", *difference])
    return table


def render(columns: list[RunFigures], title: str) -> Table:
    """Return the table for a terminal."""
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("")
    for column in columns:
        table.add_column(column.precision.upper(), justify="right")
    for row in rows(columns):
        table.add_row(*row)
    return table


def layer_lines(columns: list[RunFigures]) -> list[str]:
    """Return the layers and others that are not in FP8, with the reasons, for the runs that have some in FP8."""
    return [
        f"{column.precision.upper()} run, not in FP8: {layers}"
        for column in columns
        for rows in [(*column.layers, *column.others)]
        if count_fp8(rows)
        for layers in not_in_fp8(rows)
    ]


def machine() -> dict[str, str]:
    """Return hardware, versions and date, for the head of a result."""
    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"
    else:
        hardware = f"CPU, {platform.processor() or platform.machine()}, {os.cpu_count()} cores"
    versions = ", ".join([f"fp8booster {__version__}", *(f"{package} {version(package)}" for package in _PACKAGES)])
    return {
        "hardware": hardware,
        "versions": f"{versions}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d %H:%M %Z"),
    }


def write_summary(folder: Path, options: TrainOptions, command: str, columns: list[RunFigures], data: str) -> None:
    """Write `summary.json`, where numbers that are not finite are null, and `summary.md` in the run's folder."""
    head = machine()
    document = {
        **head,
        "command": command,
        "data": data,
        "options": _as_json(options),
        "columns": [_as_json(column) for column in columns],
    }
    # NaN is no JSON, and other languages' readers refuse it
    write_whole(folder / "summary.json", json.dumps(document, indent=1, allow_nan=False) + "\n")

    first = columns[0]
    lines = [
        f"# {options.model}: {first.parameters / 1e6:,.1f} M parameters, {first.steps} steps",
        "",
        *(f"- {name}: {value}" for name, value in head.items()),
        f"- command: `{command}`",
        f"- data: {data}",
        f"- each step: {options.parallel.replicas(first.world_size)} replicas x {options.accumulate} micro-batches x "
        f"{options.batch} sequences x {options.sequence} tokens on {first.world_size} processes; "
        f"{options.parallel.describe()}; seed {options.seed}",
        "",
        "| | " + " | ".join(column.precision.upper() for column in columns) + " |",
        "|---|" + "---:|" * len(columns),
        *("| " + " | ".join(row) + " |" for row in rows(columns)),
        "",
        f"Final loss: mean of the last {LAST:.0%} of the steps. Tokens/s: all processes together, median step. "
        "Sent: bytes that leave rank 0, counted where collectives are called, for ring algorithms.",
        "",
        *(f"- {line}" for line in layer_lines(columns)),
        "",
        "![loss](loss.png)",
    ]
    write_whole(folder / "summary.md", "\n".join(lines) + "\n")


def _as_json(record: TrainOptions | RunFigures) -> dict[str, Any]:
    return {name: finite_or_null(value) for name, value in dataclasses.asdict(record).items()}
