"""Counts the memory of tensors at the peak of a training step, where torch makes them."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

FORWARD, BACKWARD, UPDATE = PHASES = ("forward", "backward", "update")

ACTIVATIONS, GRADIENTS, TEMPORARY = "activations", "gradients", "temporary values"
"""Parts by lifetime: left by forward for backward, by backward for the update, and freed within a phase."""

FREE_IN_POOLS = "free in pools"
"""The part of `Pool`s that no tensor holds."""

_FREE = 0
"""In place of a storage, for what pools have free."""


class _Block:
    """The memory that a tensor and its views share."""

    def __init__(self, count: int, phase: str) -> None:
        self.bytes, self.phase, self.part, self.named = count, phase, TEMPORARY, False
        self.elsewhere = False  # it lies in memory that another block counts


class Pool:
    """Memory that some tensors share, as a private pool of torch's allocator: it stays as large as it ever was."""

    def __init__(self, tracker: MemoryTracker, part: str) -> None:
        self._tracker, self._part = tracker, part
        self._made: dict[int, _Block] = {}
        self._most = 0
        tracker.pools.add(self)

    def take(self, key: int, block: _Block) -> None:
        """Note a tensor's memory, by its storage."""
        self._made[key] = block
        block.part, block.named = self._part, True

    def grow(self) -> None:
        """Note what is held now."""
        self._most = max(self._most, sum(self.held().values()))

    def held(self) -> dict[int, int]:
        """Return the bytes of each tensor that there is still, by storage."""
        now = self._tracker.blocks
        self._made = {key: block for key, block in self._made.items() if now.get(key) is block}
        return {key: block.bytes for key, block in self._made.items() if not block.elsewhere}

    @property
    def free(self) -> int:
        """Bytes that no tensor holds."""
        return self._most - sum(self.held().values())


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of all tensors that operators make while it is entered, and their parts at each phase's peak.

    Tensors without values (`FakeTensorMode`, entered before this) count as if they had them. Operators that autograd
    runs are backward, whoever called it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        """Of all tensors that there are now."""
        self.made = 0
        """Of all tensors that there have been."""
        self._phase = self._last = UPDATE
        self.blocks: dict[int, _Block] = {}
        """By storage."""
        self.pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self._peaks: dict[str, tuple[int, list[_Block]]] = {}
        self._within_one = 0
        self._pool: Pool | None = None

    def begin_step(self) -> None:
        """Begin forward, and measure peaks anew; tensors of before have names (`name`, `name_rest`).

        What pools have free now counts as held from here on.
        """
        free = sum(pool.free for pool in self.pools)
        self.bytes += free - self.blocks.pop(_FREE, _Block(0, UPDATE)).bytes
        if free:
            block = self.blocks[_FREE] = _Block(free, UPDATE)
            block.part, block.named = FREE_IN_POOLS, True
        self._phase = self._last = FORWARD
        self._peaks = {}
        self._look(FORWARD)

    def begin_update(self) -> None:
        """Begin the optimizer's step."""
        self._name_made_in(BACKWARD, GRADIENTS)
        self._phase = self._last = UPDATE
        self._look(UPDATE)

    def peaks(self) -> dict[str, Counter[str]]:
        """Return, by phase of the last step, the bytes of each part when most memory was held."""
        peaks = {phase: Counter[str]() for phase in PHASES}
        for phase, (_, blocks) in self._peaks.items():
            for block in blocks:
                peaks[phase][block.part] += block.bytes
        return peaks

    def name(self, part: str, tensors: Iterable[torch.Tensor]) -> None:
        """Name the part of memory that tensors are; the first name given stays."""
        for tensor in tensors:
            block = self.blocks.get(tensor.untyped_storage()._cdata)
            if block is not None and not block.named:
                block.part, block.named = part, True

    def name_rest(self, part: str) -> None:
        """Name all tensors that have no name yet."""
        for block in self.blocks.values():
            if not block.named:
                block.part, block.named = part, True

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Count as backward what autograd does not run, as reductions that follow."""
        phase, self._phase = self._phase, BACKWARD
        try:
            yield
        finally:
            self._phase = phase

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """Look only at the memory that is left in the end, as if one kernel did what runs inside."""
        self._within_one += 1
        try:
            yield
        finally:
            self._within_one -= 1
            if not self._within_one:
                self._look(self._last)

    @contextmanager
    def inside(self, pool: Pool) -> Iterator[None]:
        """Lay in a pool what is made inside; no peak is looked for there."""
        outer, self._pool = self._pool, pool
        try:
            yield
        finally:
            self._pool = outer

    def lies_elsewhere(self, tensor: torch.Tensor) -> None:
        """Count a tensor, and its views, as if it lay in memory that is counted already."""
        block = self.blocks[tensor.untyped_storage()._cdata]
        self.bytes -= block.bytes
        block.bytes, block.elsewhere = 0, True

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Note a storage that was resized, but by no operator."""
        block = self.blocks.get(storage._cdata)
        if block is not None and not block.elsewhere and block.bytes != storage.nbytes():
            now = self.blocks[storage._cdata] = _Block(storage.nbytes(), self._last)  # peaks keep the former
            now.part, now.named = block.part, block.named
            self.bytes += now.bytes - block.bytes

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        # autograd has a number for the task that it runs, on any thread
        # so recomputed forwards count as backward too
        phase = BACKWARD if torch._C._current_graph_task_id() >= 0 else self._phase
        # tensors of forward that are there now wait for backward
        if phase == BACKWARD and self._last == FORWARD:
            self._name_made_in(FORWARD, ACTIVATIONS)
        elif phase == FORWARD and self._last == BACKWARD:
            self._name_made_in(BACKWARD, GRADIENTS)  # which wait for the next micro-batch's
        self._last = phase
        for value in tree_iter(result):
            if isinstance(value, torch.Tensor):
                self._count(value.untyped_storage())
        if not self._within_one:
            self._look(phase)
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        # the address of torch's own object: views and new Python wrappers of one storage share it
        key = storage._cdata
        if key in self.blocks:
            self.resized(storage)
            return
        block = self.blocks[key] = _Block(storage.nbytes(), self._last)
        self.bytes += storage.nbytes()
        self.made += storage.nbytes()
        if self._pool is not None:
            self._pool.take(key, block)
        # a later storage may have the same key
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.bytes -= self.blocks.pop(key).bytes

    def _name_made_in(self, phase: str, part: str) -> None:
        for block in self.blocks.values():
            if block.phase == phase and not block.named:
                block.part = part

    def _look(self, phase: str) -> None:
        if self._pool is not None:
            self._pool.grow()
            return
        if self.bytes > self._peaks.get(phase, (-1, []))[0]:
            # the blocks themselves: they are named later, when their lifetime shows
            self._peaks[phase] = self.bytes, list(self.blocks.values())
