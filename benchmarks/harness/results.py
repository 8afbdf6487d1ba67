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

from fp8booster.files import write_whole

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

    def files(self, *, folder: Path | None, json_file: Path | None) -> list[Path]:
        """Return the Markdown file in `folder` and `json_file`, where given."""
        return [*([] if folder is None else [folder / f"{self.stem}.md"]), *([] if json_file is None else [json_file])]

    def require_writable(self, *, folder: Path | None, json_file: Path | None) -> None:
        """Make the folders of the files, and see that these can be written, before hours of work.

        Raises:
            ValueError: one cannot.
        """
        for path in self.files(folder=folder, json_file=json_file):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                new = not path.exists()
                path.open("a").close()
            except OSError as error:
                raise ValueError(f"{path} cannot be written: {error.strerror}; give another file or folder") from None
            if new:
                path.unlink()

    def write(self, *, folder: Path | None, json_file: Path | None) -> list[Path]:
        """Write Markdown into `folder` and JSON to `json_file`, where given; return what was written."""
        files = self.files(folder=folder, json_file=json_file)
        for path in files:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = self.json() if path == json_file else self.markdown()
            if path.exists() and not path.is_file():
                path.write_text(text)  # a device or a pipe, as /dev/stdout, is not to be replaced by a file
            else:
                write_whole(path.resolve(), text)
        return files


def _code(key: str, value: str) -> str:
    return f"`{value}`" if key in ("command", "commit") else value


def spread(samples: Record, digits: int) -> str:
    """A `Samples` record as "median [10th-90th percentile]"."""
    return f"{samples['median']:.{digits}f} [{samples['p10']:.{digits}f}-{samples['p90']:.{digits}f}]"


def microseconds(ms: Record) -> str:
    """`spread` of milliseconds, in microseconds."""
    return spread({key: 1e3 * ms[key] for key in ("median", "p10", "p90")}, 1)
