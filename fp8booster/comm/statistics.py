"""What the functions of `fp8booster.comm` sent, and what went uncompressed."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from rich.console import Console
from rich.table import Table

from fp8booster.comm.replays import note
from fp8booster.monitor.traffic import bytes_sent


@dataclass
class Row:
    """One collective. Bytes are those that leave this process (`monitor.traffic.bytes_sent`)."""

    calls: int = 0
    raw_bytes: int = 0
    """What the plain collective would have sent."""

    wire_bytes: int = 0
    """What was sent: values, scales and padding of what went in FP8, all bytes of what did not."""

    uncompressed: Counter[str] = field(default_factory=Counter)
    """Calls that went uncompressed, by reason."""

    @property
    def ratio(self) -> float:
        """Wire bytes over raw bytes; 1 where nothing was sent."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 1.0


@dataclass(frozen=True)
class Statistics:
    """What was counted, by collective. `str()` gives a table."""

    rows: dict[str, Row]

    def __getitem__(self, collective: str) -> Row:
        return self.rows.get(collective, Row())

    def table(self) -> Table:
        """The rows as a rich table."""
        table = Table(title="FP8 communication")
        table.add_column("collective")
        for column in ("calls", "raw MiB", "wire MiB", "wire / raw"):
            table.add_column(column, justify="right")
        table.add_column("uncompressed")
        for name, row in self.rows.items():
            reasons = ", ".join(f"{count} {reason}" for reason, count in row.uncompressed.most_common())
            table.add_row(
                name,
                str(row.calls),
                f"{row.raw_bytes / 2**20:.2f}",
                f"{row.wire_bytes / 2**20:.2f}",
                f"{row.ratio:.3f}",
                reasons,
            )
        return table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


_rows: dict[str, Row] = {}
_lock = threading.Lock()


def statistics() -> Statistics:
    """What this process sent since it began, or since `reset_statistics`."""
    with _lock:
        return Statistics(copy.deepcopy(_rows))


def reset_statistics() -> None:
    """Forget what was counted, so that `statistics` shows what comes next alone."""
    with _lock:
        _rows.clear()


def count_encoded(
    name: str, ranks: int, payload: int, transports: dict[str, int], collective: str | None = None
) -> None:
    """Count a call that goes in FP8.

    Args:
        name: the row.
        ranks: of its group.
        payload: bytes that the plain collective would have been given.
        transports: bytes given to each collective of torch.distributed that it uses.
        collective: the plain one, where the row has another name.
    """
    count_calls(name, 1, *bytes_of_encoded(name, ranks, payload, transports, collective))


def bytes_of_encoded(
    name: str, ranks: int, payload: int, transports: dict[str, int], collective: str | None = None
) -> tuple[int, int]:
    """What `count_encoded` counts of a call: bytes that the plain collective would send, and that are sent."""
    wire = sum([bytes_sent(transport, given, ranks) for transport, given in transports.items()])
    return bytes_sent(collective or name, payload, ranks), wire


def count_calls(name: str, calls: int, raw: int, wire: int) -> None:
    """Count calls that go in FP8, whose bytes are known together."""
    note(partial(_count, name, calls, raw, wire, None))


def count_plain(
    name: str, ranks: int, payload: int, reason: str, collective: str | None = None, *, calls: int = 1
) -> None:
    """Count calls that go uncompressed.

    Args:
        name, ranks, collective: as in `count_encoded`.
        payload: of all calls.
        reason: why they do.
        calls: how many.
    """
    sent = bytes_sent(collective or name, payload, max(ranks, 1))
    note(partial(_count, name, calls, sent, sent, reason))


def _count(name: str, calls: int, raw: int, wire: int, reason: str | None) -> None:
    with _lock:
        row = _rows.get(name)
        if row is None:
            row = _rows[name] = Row()
        row.calls += calls
        row.raw_bytes += raw
        row.wire_bytes += wire
        if reason is not None:
            row.uncompressed[reason] += calls
