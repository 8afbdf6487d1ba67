"""What `fp8booster eval` shows: a column for each model and precision, or JSON."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path

from rich.table import Table

from fp8booster.cli.json_values import finite_or_null
from fp8booster.cli.train.summary import machine

from .columns import EvalOptions, Evaluation


def render(found: Evaluation) -> Table:
    """The table for a terminal."""
    columns = found.columns
    first = columns[0]
    title = f"{found.tokens:,} tokens of {found.data}, in sequences of {found.sequence}"
    if found.calibration_tokens:
        title += f"; calibrated with the {found.calibration_tokens:,} before them"
    table = Table(title=title, title_justify="left")
    table.add_column("")
    several = len({column.checkpoint for column in columns}) > 1
    for column in columns:
        name = column.precision.upper().replace("-CALIBRATED", " calibrated")
        table.add_column(f"{Path(column.checkpoint).name}\n{name}" if several else name, justify="right")
    table.add_row("loss", *(f"{column.loss:.4f}" for column in columns))
    if len(columns) > 1:
        changes = [f"{100 * (column.loss / first.loss - 1):+.3f} %" for column in columns[1:]]
        table.add_row("difference from the first", "", *changes)
    table.add_row("perplexity", *(f"{column.perplexity:.3f}" for column in columns))
    if len(columns) > 1:
        table.add_row("KL from the first, nats a token", "", *(f"{column.kl:.2e}" for column in columns[1:]))
    table.add_row("parameters, MiB", *(f"{column.parameter_bytes / 2**20:,.1f}" for column in columns))
    table.add_row("linear layers in FP8", *(f"{column.fp8_layers} of {column.layers}" for column in columns))
    if any(column.fp8_layers for column in columns):
        casts = [f"{column.from_masters} of {column.fp8_layers}" if column.fp8_layers else "" for column in columns]
        table.add_row("cast from FP32 master weights", *casts)
    return table


def as_record(found: Evaluation, asked: EvalOptions) -> str:
    """The same as JSON, with the command, the machine and the options."""
    options = {**dataclasses.asdict(asked), "checkpoints": [str(each) for each in asked.checkpoints]}
    command = shlex.join(["fp8booster", *sys.argv[1:]])
    record = {**machine(), "command": command, "options": options, **dataclasses.asdict(found)}
    record["columns"] = [{name: finite_or_null(value) for name, value in each.items()} for each in record["columns"]]
    return json.dumps(record, indent=1)
