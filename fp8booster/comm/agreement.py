"""Whether the ranks of a group make the same call: compared when a rank makes a call for the first time.

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
each rank deletes those of its calls when the group ends: another may come that has its name and numbers calls anew.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from fp8booster.comm.group_end import LeftKeys
from fp8booster.comm.replays import note

PATIENCE = timedelta(seconds=10)
"""How long a blocking call that is new waits for the other ranks before it sends."""

_AGREED = "agreed"
_KEYS = ("first", "came", "verdict", "read")


class _Calls:
    """What a rank has called in a group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.known: set[tuple] = set()
        self.ranks, self.rank = group.size(), dist.get_rank()
        self.store: dist.Store = dist.PrefixStore("fp8booster", _get_process_group_store(group))
        self.left = LeftKeys(group, self.store)
        self.always = dist.get_debug_level() != dist.DebugLevel.OFF
        self.compares = True

    def enter(self) -> None:
        """Count a call."""
        self.count += 1


class Claim:
    """One rank's part in the comparison of a call."""

    def __init__(self, calls: _Calls, number: int, signature: tuple, text: str, on_arrival: bool) -> None:
        self.calls, self.on_arrival = calls, on_arrival
        self._number, self._signature, self._text = number, signature, text

    def _key(self, name: str) -> str:
        return f"{self._number}/{name}"

    def post(self) -> bool:
        """Compare with who came first.

        Returns:
            whether all ranks have come and agree.

        Raises:
            ValueError: they do not agree.
        """
        calls = self.calls
        calls.left.keys.update(map(self._key, _KEYS))
        mine = f"rank {calls.rank} calls {self._text}"
        first = calls.store.compare_set(self._key("first"), "", mine).decode()
        if first.split(" ", 2)[2] != mine.split(" ", 2)[2]:
            differ = f"{first}; {mine}"
            calls.store.set(self._key("verdict"), differ)
            self._refuse(differ)  # its own sentence, whatever another rank that differs writes meanwhile
        if calls.store.add(self._key("came"), 1) == calls.ranks:
            calls.store.set(self._key("verdict"), _AGREED)
            self._heed()
            return True
        return False

    def wait(self) -> bool:
        """Wait for the others, at most `PATIENCE`; returns and raises as `post`."""
        try:
            self.calls.store.wait([self._key("verdict")], PATIENCE)
        except RuntimeError:  # each store has another for it: one is late, or in a call that it knows
            return False
        self._heed()
        return True

    def arrived(self) -> None:
        """Look again, once the data of all ranks is there.

        Raises:
            ValueError: the ranks do not agree.
        """
        calls = self.calls
        if not calls.store.check([self._key("verdict")]):
            absent = calls.ranks - int(calls.store.add(self._key("came"), 0))
            self._refuse(
                f"rank {calls.rank} calls {self._text} for the first time; {absent} of the {calls.ranks} ranks make a "
                "call that is not new to them"
            )
        self._heed()

    def _heed(self) -> None:
        """Raise where the verdict is against it; the last to read a good one takes the keys away."""
        store = self.calls.store
        verdict = store.get(self._key("verdict")).decode()
        if verdict != _AGREED:
            self._refuse(verdict)
        if store.add(self._key("read"), 1) == self.calls.ranks:
            for name in _KEYS:
                store.delete_key(self._key(name))
        self.calls.left.keys.difference_update(map(self._key, _KEYS))

    def _refuse(self, what: str) -> NoReturn:
        self.calls.known.discard(self._signature)
        raise ValueError(
            f"ranks of a group disagree about a collective: {what}; give all ranks of a call the same sizes, dtype, "
            "op, encoding and min_bytes"
        )


_calls: weakref.WeakKeyDictionary[dist.ProcessGroup, _Calls] = weakref.WeakKeyDictionary()


def claim(
    group: dist.ProcessGroup, name: str, *, async_op: bool = False, on_arrival: bool = True, **what: object
) -> Claim | None:
    """Compare a call with those of the group's other ranks where it is new to this one.

    Args:
        group: of the call.
        name: the collective.
        async_op: whether the caller may have to go on before the others come.
        on_arrival: whether data arrives only where all ranks have entered the call.
        what: all that ranks have to give alike.

    Returns:
        None where nothing is left to compare; else what must be told when the data has arrived.

    Raises:
        ValueError: the ranks do not agree.
    """
    if not isinstance(group, dist.ProcessGroup) or group.size() < 2:
        return None
    calls = _calls.get(group)
    if calls is None:
        calls = _calls[group] = _Calls(group)
    if not calls.compares:
        return None
    signature = (name, *what.values())
    with calls.lock:
        number = calls.count
        is_called = note(calls.enter)
        if signature in calls.known and not (calls.always and is_called):
            return None
        calls.known.add(signature)
    text = f"{name}({', '.join(f'{key}={value}' for key, value in what.items())})"
    made = Claim(calls, number, signature, text, on_arrival)
    try:
        agreed = made.post() or (not async_op and made.wait())
    except RuntimeError as error:
        _give_up(calls, error)
        return None
    return None if agreed else made


def wait_for_others(claimed: Claim | None) -> Claim | None:
    """Give the other ranks their time, now that the caller of an asynchronous call waits for what they send.

    Returns and raises as `claim`.
    """
    if claimed is None or not claimed.calls.compares:
        return None
    try:
        return None if claimed.wait() else claimed
    except RuntimeError as error:
        _give_up(claimed.calls, error)
        return None


def settle(claimed: Claim | None, device: torch.device) -> None:
    """Tell a claim, if there is one, that the data arrived, or will in the order of the current stream.

    Raises:
        ValueError: the ranks do not agree.
    """
    if claimed is None or not (claimed.calls.compares and claimed.on_arrival):
        return
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return
        torch.cuda.current_stream(device).synchronize()
    try:
        claimed.arrived()
    except RuntimeError as error:
        _give_up(claimed.calls, error)


def _give_up(calls: _Calls, error: RuntimeError) -> None:
    """Compare no more: the store's host has gone, or it is a stand-in."""
    warnings.warn(f"collectives are not compared: the group's store fails with {error}", stacklevel=4)
    calls.compares = False
