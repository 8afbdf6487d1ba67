"""A result: its head, its tables and what was left out, as Markdown and as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import rich.markup
import rich.table

Record = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table: its title and what it shows of a record."""

    title: str
    show: Callable[[Record], str]


@dataclass(frozen=True)
class Table:
    """Records of one kind, and how they are shown. JSON keeps the records whole."""

    name: str | None
    """Key in the JSON file; None for another view of records that a table of this result has already."""

    title: str
    columns: Sequence[Column]
    records: Sequence[Record]
    note: str = ""
    """A paragraph above the table."""

    def markdown(self) -> str:
        """A heading, the note and the rows; the first column is aligned left."""
        titles = [column.title for column in self.columns]
        rules = [":--", *["--:"] * (len(titles) - 1)]
        rows = [[column.show(record) for column in self.columns] for record in self.records]
        lines = ["| " + " | ".join(cells) + " |" for cells in (titles, rules, *rows)]
        return "\n\n".join(part for part in (f"## {self.title}", self.note, "\n".join(lines)) if part)

    def rich(self) -> rich.table.Table:
        """The rows for a terminal, the first column aligned left."""
        table = rich.table.Table(title=self.title)
        for index, column in enumerate(self.columns):
            table.add_column(column.title, justify="right" if index else "left")
        for record in self.records:
            table.add_row(*(rich.markup.escape(column.show(record)) for column in self.columns))
        return table


@dataclass(frozen=True)
class Result:
    """The findings of one benchmark."""

    benchmark: str
    title: str
    head: dict[str, str]
    tables: Sequence[Table]
    left_out: dict[str, str] = field(default_factory=dict)
    """What was not measured, and why."""

    plots: Sequence[str] = ()
    """File names of plots, beside the Markdown file."""

    @property
    def stem(self) -> str:
        """Name of the result's files, without suffix: benchmark, device, date and torch version."""
        parts = (self.benchmark, self.head["GPU"], self.head["date"][:10], "torch-" + self.head["torch"])
        return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", part) for part in parts)

    def markdown(self) -> str:
        """The whole result."""
        parts = [f"# {self.title}", "\n".join(f"- {key}: {_code(key, value)}" for key, value in self.head.items())]
        if self.left_out:
            parts.append("\n".join(f"- Left out: {name}: {reason}" for name, reason in self.left_out.items()))
        parts += [table.markdown() for table in self.tables]
        parts += [f"![{self.title}]({plot})" for plot in self.plots]
        return "\n\n".join(parts) + "\n"

    def json(self) -> str:
        """The whole result, with every sample."""
        return json.dumps(
            {
                "benchmark": self.benchmark,
                "head": self.head,
                "left_out": self.left_out,
                "tables": {table.name: list(table.records) for table in self.tables if table.name is not None},
            },
            indent=1,
        )

    def write(self, *, folder: Path | None, json_file: Path | None) -> list[Path]:
        """Write Markdown into `folder` and JSON to `json_file`, where given; return what was written."""
        written = []
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            written.append(folder / f"{self.stem}.md")
            written[-1].write_text(self.markdown())
        if json_file is not None:
            json_file.parent.mkdir(parents=True, exist_ok=True)
            written.append(json_file)
            written[-1].write_text(self.json())
        return written


def _code(key: str, value: str) -> str:
    return f"`{value}`" if key in ("command", "commit") else value


def spread(samples: Record, digits: int) -> str:
    """A `Samples` record as "median [10th-90th percentile]"."""
    return f"{samples['median']:.{digits}f} [{samples['p10']:.{digits}f}-{samples['p90']:.{digits}f}]"


def microseconds(ms: Record) -> str:
    """`spread` of milliseconds, in microseconds."""
    return spread({key: 1e3 * ms[key] for key in ("median", "p10", "p90")}, 1)
