"""Compares the calls that the ranks of a group make, when a rank makes a call for the first time.

Padding hides what plain collectives notice: messages of 5000 and of 5001 values can have the same bytes. So a call that
is new to a rank (another collective, count, dtype, reduction, encoding or threshold) is compared through the group's
store, under the number that it has among the group's calls:

    claim     before anything is sent. The first rank to come writes down its call, each other one compares its own with
              that and raises, for itself and for who waits, where they differ. Where all have come and agree, the call
              is known from then on and costs a look into a set.
    arrival   a rank for which the call is new cannot tell whether one that does not claim is late or makes a call
              that it knows. It never waits for that: it sends and receives, and looks again once the data is there.
              Who sent has claimed before, or makes another call: ranks that agreed so far know the same calls.

So no rank waits for a claim that may never come, and none can hang here that would not hang in torch. A blocking call
gives the others `PATIENCE` before it sends, so that all of them raise the same sentence. An asynchronous one gives it
when it is waited for, as its caller may have to do something first that another rank needs. On a GPU an unsettled
arrival makes the host wait for the stream, once for each new call, but not while a graph is being captured.

With TORCH_DISTRIBUTED_DEBUG at INFO or DETAIL every call is compared, but those that a CUDA graph holds; without it,
ranks that make two calls which all know in another order are not seen. Never compared: sizes of uneven parts, which
differ by design; point-to-point messages; a `broadcast` on its arrival, which proves that its source has come and no
other.

The last rank to read that all agree deletes the keys of the call. Where a call was refused, or a rank did not look,
each rank deletes those of its calls when the group ends: a program may destroy its groups and make others, with the
same names, on the same store, which number calls anew.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from fp8booster.mailbox import LeftKeys

PATIENCE = timedelta(seconds=10)
"""How long a blocking call that is new waits for the other ranks before it sends."""

_AGREED = "agreed"
_KEYS = ("first", "came", "verdict", "read")


class GroupCalls:
    """The calls that this rank has made in a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.known: set[tuple] = set()
        self.ranks, self.rank = group.size(), dist.get_rank()
        # torch keeps its own keys of the group there
        self.store: dist.Store = dist.PrefixStore("fp8booster", _get_process_group_store(group))
        self.left = LeftKeys(group, self.store)
        self.always = dist.get_debug_level() != dist.DebugLevel.OFF
        self.compares = True

    def enter(self) -> None:
        """Count a call."""
        self.count += 1


class Claim:
    """One rank's part in the comparison of a call. Its methods raise ValueError where the ranks do not agree."""

    def __init__(self, calls: GroupCalls, number: int, signature: tuple, text: str, on_arrival: bool) -> None:
        self._calls, self._on_arrival = calls, on_arrival
        self._number, self._signature, self._text = number, signature, text

    def begin(self, asynchronous: bool) -> Claim | None:
        """Compare with the ranks that came before, and give the others their time; return None once all agree."""
        return self._try(lambda: self._post() or (not asynchronous and self._wait()))

    def wait(self) -> Claim | None:
        """Give the other ranks their time, now that the caller of an asynchronous call waits; return as `begin`."""
        return self._try(self._wait)

    def settle(self, device: torch.device) -> None:
        """Look again, once the data arrived or will in the order of the current stream."""
        if not (self._calls.compares and self._on_arrival):
            return
        if device.type == "cuda":
            if torch.cuda.is_current_stream_capturing():
                return
            # a verdict that is missing means something only when the data is there, and the host reads the store at
            # once
            torch.cuda.current_stream(device).synchronize()
        self._try(self._arrived)

    def _try(self, agrees: Callable[[], bool]) -> Claim | None:
        """Return None where nothing is left to compare. Without a store nothing is compared from then on."""
        if not self._calls.compares:
            return None
        try:
            return None if agrees() else self
        except RuntimeError as error:  # the store's host has gone, or it is a stand-in
            warnings.warn(f"collectives are not compared: the group's store fails with {error}", stacklevel=4)
            self._calls.compares = False
            return None

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def _post(self) -> bool:
        """Compare with who came first; return True where all ranks have come and agree."""
        calls = self._calls
        calls.left.keys.update(map(self._key, _KEYS))
        mine = f"rank {calls.rank} calls {self._text}"
        # one step, by which exactly one rank is first
        first = calls.store.compare_set(self._key("first"), "", mine).decode()
        # without "rank N", in which the same call differs
        if first.split(" ", 2)[2] != mine.split(" ", 2)[2]:
            differ = f"{first}; {mine}"
            calls.store.set(self._key("verdict"), differ)
            self._refuse(differ)  # its own sentence, whatever another rank that differs writes meanwhile
        if calls.store.add(self._key("came"), 1) == calls.ranks:
            calls.store.set(self._key("verdict"), _AGREED)
            return self._heed()
        return False

    def _wait(self) -> bool:
        """Wait for the others, at most `PATIENCE`; return as `_post`."""
        try:
            self._calls.store.wait([self._key("verdict")], PATIENCE)
        except RuntimeError:  # each store has another for it: one is late, or in a call that it knows
            return False
        return self._heed()

    def _arrived(self) -> bool:
        calls = self._calls
        if not calls.store.check([self._key("verdict")]):
            absent = calls.ranks - int(calls.store.add(self._key("came"), 0))
            self._refuse(
                f"rank {calls.rank} calls {self._text} for the first time; {absent} of the {calls.ranks} ranks make a "
                "call that is not new to them"
            )
        return self._heed()

    def _heed(self) -> bool:
        """Return True, or raise where the verdict is against it; the last to read a good one takes the keys away."""
        store = self._calls.store
        verdict = store.get(self._key("verdict")).decode()
        if verdict != _AGREED:
            self._refuse(verdict)
        if store.add(self._key("read"), 1) == self._calls.ranks:
            for name in _KEYS:
                store.delete_key(self._key(name))
        # the last to read deletes them, so the end of the group has none of them to look for
        self._calls.left.keys.difference_update(map(self._key, _KEYS))
        return True

    def _refuse(self, what: str) -> NoReturn:
        # a caller that catches the error and repeats the call has it compared again
        self._calls.known.discard(self._signature)
        raise ValueError(
            f"ranks of a group disagree about a collective: {what}; give all ranks of a call the same sizes, dtype, "
            "op, encoding and min_bytes"
        )
