"""A watch over ranks that wait for each other: when no step ends for too long it names the rank that hangs, and where.

Every rank publishes in the store of the process group what its main thread does. A rank whose entry no longer changes
is stopped or gone; one that is in no collective holds up those that are.
"""

from __future__ import annotations

import faulthandler
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from fp8booster.listing import first_of
from fp8booster.monitor.traffic import Traffic

SHORTEST = 120.0
"""Seconds for a step where the user names none, if ten of the longest are no more."""

_STEPS = 10
_SHARE = 0.9  # of the time after which the process group itself gives up
_GROUP = {"nccl": 600.0, "gloo": 1800.0}  # seconds: torch's defaults, which colossalai keeps
_PULSES = 10  # in a step's time
_NAMED = 4  # ranks that a sentence names
_WAITS = (
    "torch.distributed",
    "torch.cuda",
    "torch.autograd",
    "colossalai",
    "fp8booster.cli.train.loop",
    "fp8booster.colossal",
    "fp8booster.comm",
    "fp8booster.nn",
    "fp8booster.optim",
    "fp8booster.training.boosted",
    "fp8booster.training.ranks",
)
"""Modules whose functions call what waits for other ranks, or for a GPU that does, and nothing else that takes long."""


@dataclass(frozen=True, kw_only=True)
class Doing:
    """What a rank's main thread does."""

    pulse: int
    """Counts as long as the process runs."""
    task: str
    waits: bool
    """Whether it is in a collective, or waits for its GPU."""
    place: str
    """Function, file and line."""
    collective: str
    """The last one that it began."""


class Watch:
    """Looks on from a thread; `expect` says what is due. It ends the process when that does not come."""

    def __init__(self, traffic: Traffic, timeout: float | None, tell: Callable[[str], None]) -> None:
        """
        Args:
            timeout: seconds for a step; None: `SHORTEST`, or ten of the longest; 0: no watch.
            tell: gets the sentence before the process ends.
        """
        self._traffic = traffic
        self._timeout = timeout
        self._tell = tell
        self._longest = 0.0
        self._task = "the start"
        self._began = time.monotonic()
        self._limit = math.inf
        self._stopped = threading.Event()
        self._main = threading.get_ident()
        self._pulse = 0
        self._seconds = min(5.0, (timeout or SHORTEST) / _PULSES)
        self._thread = threading.Thread(target=self._look, daemon=True)
        if timeout != 0 and dist.get_world_size() > 1:
            self._thread.start()

    def expect(self, task: str, long: bool = False) -> None:
        """A step begins; with `long`, what may take as long as the process group waits.

        That is the first step of a process, which compiles, and what waits for disks.
        """
        limit = self._step_limit()
        if long:
            limit = max(limit, _SHARE * _GROUP.get(dist.get_backend(), math.inf))
        self._task, self._limit, self._began = task, limit, time.monotonic()

    def step_ended(self) -> None:
        """The step that was expected has ended."""
        self._longest = max(self._longest, time.monotonic() - self._began)

    def stop(self) -> None:
        """Nothing more is expected."""
        self._stopped.set()

    def _step_limit(self) -> float:
        return self._timeout or max(SHORTEST, _STEPS * self._longest)

    def _look(self) -> None:
        store = dist.distributed_c10d._get_default_store().clone()  # a client takes one request at a time
        store.set_timeout(timedelta(seconds=20))
        before = time.monotonic()
        while not self._stopped.wait(self._seconds):
            now = time.monotonic()
            if now - before > 3 * self._seconds + 1:  # this process was itself stopped
                self._began += now - before
            before = now
            try:
                self._publish(store)
                late = now - self._began > self._limit
                sentence = self._find(store) if late else None
            except (RuntimeError, ValueError) as error:
                if now - self._began <= self._limit:
                    continue
                sentence = f"the store that ranks share does not answer ({type(error).__name__})"
            if sentence is not None and not self._stopped.is_set():
                self._end(store, sentence)

    def _find(self, store: dist.Store) -> str | None:
        """Which rank hangs; None where what was expected has come meanwhile."""
        began = self._began
        before = _read(store)
        for _ in range(3):
            if self._stopped.wait(self._seconds) or self._began != began:
                return None
            self._publish(store)
        return describe(before, _read(store))

    def _end(self, store: dist.Store, found: str) -> None:
        sentence = (
            f"{self._task.capitalize()} has not ended for {self._limit:.0f} s: {found}; look at the logs and machines "
            "of these ranks and --resume the run, with a greater --timeout if a step may take that long."
        )
        with suppress(RuntimeError):  # the first verdict holds: ranks that it ends look stopped to the others
            sentence = store.compare_set(_VERDICT, "", sentence).decode()
        faulthandler.dump_traceback(all_threads=True)
        self._tell(sentence)
        os._exit(1)

    def _publish(self, store: dist.Store) -> None:
        self._pulse += 1
        place, waits = locate(sys._current_frames().get(self._main))
        doing = Doing(pulse=self._pulse, task=self._task, waits=waits, place=place, collective=self._traffic.latest)
        store.set(_key(dist.get_rank()), json.dumps(asdict(doing)))


_VERDICT = "fp8booster/watch/verdict"


def _key(rank: int) -> str:
    return f"fp8booster/watch/{rank}"


def _read(store: dist.Store) -> dict[int, Doing | None]:
    ranks = range(dist.get_world_size())
    return {rank: Doing(**json.loads(store.get(_key(rank)))) if store.check([_key(rank)]) else None for rank in ranks}


def locate(frame: FrameType | None) -> tuple[str, bool]:
    """Where a thread is, and whether it waits there for other ranks or for its GPU."""
    if frame is None:
        return "no known place", False
    code = frame.f_code
    place = f"{code.co_name} ({os.path.basename(code.co_filename)}:{frame.f_lineno})"
    return place, frame.f_globals.get("__name__", "").startswith(_WAITS)


def describe(before: Mapping[int, Doing | None], after: Mapping[int, Doing | None]) -> str:
    """Which ranks hold up the others, from two looks at them between which every live rank has published anew."""
    silent = [rank for rank, doing in after.items() if doing is None or doing == before[rank]]
    busy = [rank for rank, doing in after.items() if rank not in silent and not doing.waits]
    waiting = [rank for rank in after if rank not in silent and rank not in busy]
    found = []
    if silent:
        found.append(f"{_ranks(silent)} not answer (stopped, or the machine is gone)")
    found += [f"rank {rank} is in {after[rank].place}, in no collective" for rank in busy[:_NAMED]]
    if not found:
        found.append("all ranks wait, in collectives that do not fit together")
    found += [
        f"rank {rank} waits in {after[rank].place}, having begun {after[rank].collective or 'no collective'}"
        for rank in waiting[:_NAMED]
    ]
    return ", ".join(found)


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} does"
    return f"ranks {first_of([str(rank) for rank in ranks])} do"
