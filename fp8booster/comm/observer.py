"""The observer around every collective: its agreement with other ranks, its bytes, and its replays by CUDA graphs.

The route of the data (encode, send, decode) notes nothing itself. A capture sends nothing, and a replay runs no Python:
what a captured call notes is kept, and noted again at each replay. So ranks that replay and ranks that do not count
alike.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from fp8booster.comm.agreement import Claim, GroupCalls
from fp8booster.comm.links import ESTIMATED
from fp8booster.comm.threshold import links_in_use
from fp8booster.monitor.traffic import bytes_sent

Note = Callable[[], None]


@dataclass
class Row:
    """One collective. Bytes are those that leave this process (`monitor.traffic.bytes_sent`)."""

    calls: int = 0
    raw_bytes: int = 0
    """Bytes that the plain collective would have sent."""

    wire_bytes: int = 0
    """Bytes sent: values, scales and padding of FP8 calls, all bytes of uncompressed ones."""

    by_nodes: int = 0
    """Calls of which ranks of a node added in the tensors' dtype, and those of different nodes in FP8."""

    uncompressed: Counter[str] = field(default_factory=Counter)
    """Calls that went uncompressed, by reason."""

    @property
    def ratio(self) -> float:
        """Wire bytes over raw bytes; 1 where nothing was sent."""
        return self.wire_bytes / self.raw_bytes if self.raw_bytes else 1.0


@dataclass(frozen=True)
class Statistics:
    """Counts by collective, as `statistics()["all_reduce"].calls`. `str()` gives a table."""

    rows: dict[str, Row]
    thresholds: str = ESTIMATED.source
    """A clause: where the sizes come from, from which FP8 is sent."""

    def __getitem__(self, collective: str) -> Row:
        return self.rows.get(collective, Row())

    # without it Python would index by 0, 1, 2 ..., and each index has a row
    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def table(self) -> Table:
        """Return the rows as a rich table."""
        table = Table(title="FP8 communication", caption=f"sizes from which FP8 is sent: {self.thresholds}")
        table.add_column("collective")
        for column in ("calls", "raw MiB", "wire MiB", "wire / raw"):
            table.add_column(column, justify="right")
        by_nodes = any(row.by_nodes for row in self.rows.values())
        if by_nodes:
            table.add_column("by nodes", justify="right")
        table.add_column("uncompressed")
        for name, row in self.rows.items():
            raw, wire = (f"{count / 2**20:.2f}" for count in (row.raw_bytes, row.wire_bytes))
            reasons = ", ".join(f"{count} {reason}" for reason, count in row.uncompressed.most_common())
            ending = (str(row.by_nodes), reasons) if by_nodes else (reasons,)
            table.add_row(name, str(row.calls), raw, wire, f"{row.ratio:.3f}", *ending)
        return table

    def __str__(self) -> str:
        console = Console(width=120, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


class Observer:
    """Notes the collectives of this process; `observer` is the one that there is."""

    def __init__(self) -> None:
        self.rows: defaultdict[str, Row] = defaultdict(Row)
        self.lock = threading.Lock()
        """Held while rows are counted or read."""
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupCalls] = weakref.WeakKeyDictionary()
        # of the process, not of the thread: the backward of a capture runs on another one
        self._kept: list[Note] | None = None

    def enter(
        self,
        group: dist.ProcessGroup,
        name: str,
        *,
        asynchronous: bool = False,
        on_arrival: bool = True,
        what: Mapping[str, object],
    ) -> Claim | None:
        """Number a call among those of its group, and compare it with the other ranks' where it is new to this one.

        Args:
            group: of the call.
            name: the collective.
            asynchronous: the caller may have to go on before the others come.
            on_arrival: data arrives only where all ranks have entered the call.
            what: all that ranks have to give alike.

        Returns:
            None where nothing is left to compare; else the claim to settle when the data has arrived.

        Raises:
            ValueError: the ranks do not agree.
        """
        # outside of a group torch gives a marker in its place; and one rank has no other to differ from
        if not isinstance(group, dist.ProcessGroup) or group.size() < 2:
            return None
        calls = self._groups.get(group)
        if calls is None:
            calls = self._groups[group] = GroupCalls(group)
        if not calls.compares:
            return None
        # not by the text: to write one down costs more than the look into the set
        signature = (name, *what.values())
        with calls.lock:
            # numbers are the keys in the store: two threads must not have the same
            number = calls.count
            kept = self._kept
            if kept is None:
                calls.count += 1
            else:
                kept.append(calls.enter)
            # one that a graph holds is compared when it is new alone: its replays run no Python
            if signature in calls.known and not (calls.always and kept is None):
                return None
            calls.known.add(signature)
        text = f"{name}({', '.join(f'{key}={value}' for key, value in what.items())})"
        return Claim(calls, number, signature, text, on_arrival).begin(asynchronous)

    def count_encoded(
        self, name: str, ranks: int, payload: int, transports: Mapping[str, int], collective: str | None = None
    ) -> None:
        """Count a call that goes in FP8.

        Args:
            name: the row.
            ranks: of its group.
            payload: bytes that the plain collective would have been given.
            transports: bytes given to each collective of torch.distributed that it uses.
            collective: the plain one, where the row has another name.
        """
        sent = tuple((transport, given, ranks) for transport, given in transports.items())
        raw, wire = bytes_of_encoded(collective or name, ranks, payload, sent)
        self.count(name, 1, raw, wire)

    def count_plain(
        self, name: str, ranks: int, payload: int, reason: str, collective: str | None = None, *, calls: int = 1
    ) -> None:
        """Count calls that go uncompressed.

        Args:
            name, ranks, collective: as in `count_encoded`.
            payload: of all calls.
            reason: why they do.
            calls: how many.
        """
        # torch says -1 outside of the group, where nothing is sent, as in a group of one
        sent = bytes_sent(collective or name, payload, max(ranks, 1))
        self.count(name, calls, sent, sent, reason)

    def count(
        self, name: str, calls: int, raw: int, wire: int, reason: str | None = None, *, by_nodes: bool = False
    ) -> None:
        """Count calls whose bytes are known together, now or at each replay."""
        self.note(partial(self._add, name, calls, raw, wire, reason, by_nodes))

    def _add(self, name: str, calls: int, raw: int, wire: int, reason: str | None, by_nodes: bool) -> None:
        with self.lock:
            row = self.rows[name]
            row.calls += calls
            row.raw_bytes += raw
            row.wire_bytes += wire
            row.by_nodes += calls if by_nodes else 0
            if reason is not None:
                row.uncompressed[reason] += calls

    @property
    def sent_bytes(self) -> int:
        """Bytes that this process has sent since rows were last cleared."""
        with self.lock:
            return sum(row.wire_bytes for row in self.rows.values())

    def note(self, what: Note) -> bool:
        """Note something of a call; return False where it is kept for replays."""
        if self._kept is None:
            what()
            return True
        self._kept.append(what)
        return False

    @contextmanager
    def noted_at_replays(self) -> Iterator[Note]:
        """Keep the notes made inside; calling what this yields makes them, once for each replay."""
        kept: list[Note] = []
        before, self._kept = self._kept, kept

        def make() -> None:
            for what in kept:
                what()

        try:
            yield make
        finally:
            self._kept = before


# a step repeats its calls: their bytes are computed once
@functools.lru_cache(maxsize=4096)
def bytes_of_encoded(
    collective: str, ranks: int, payload: int, transports: tuple[tuple[str, int, int], ...]
) -> tuple[int, int]:
    """Return the bytes that the plain collective would send of a payload, and those that its transports send.

    Args:
        collective, ranks, payload: the plain one's.
        transports: the collective, the bytes that it is given and its ranks, for each that is used.
    """
    wire = sum([bytes_sent(*each) for each in transports])
    return bytes_sent(collective, payload, ranks), wire


observer = Observer()


def statistics() -> Statistics:
    """Return what this process sent since it began, or since `reset_statistics`."""
    with observer.lock:
        # a copy: rows go on counting, and a caller compares two of these
        return Statistics(copy.deepcopy(dict(observer.rows)), links_in_use().source)


def reset_statistics() -> None:
    """Forget what was counted, so that `statistics` shows what comes next alone."""
    with observer.lock:
        observer.rows.clear()
