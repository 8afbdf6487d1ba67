"""What stands in for a CUDA graph on the CPU: the work is done again, and its results are laid where the first lay."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from fp8booster.comm.observer import observer
from fp8booster.nn.weights.pinned import Copies, copies_are_held


class Rerun:
    """As `nn.graphs.recorder.Recorder`; counts what it has captured, and how often that was replayed."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self.graphs: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()  # those that somebody could replay
        self._passing: list[Any] = []

    def __call__(self, work: Callable[[], Any], *, passing: bool = False) -> tuple[Callable[[], None], Any]:
        self.captured += 1
        held = copies_are_held if Copies.held else nullcontext
        casts = torch.is_autocast_enabled("cpu")
        with observer.noted_at_replays() as note_calls:
            places = work()
        _overwrite(places)  # a capture computes nothing
        if passing:
            self._passing.append(places)

        def replay() -> None:
            self.replayed += 1
            as_captured = torch.autocast("cpu", enabled=casts)
            with torch.enable_grad(), held(), as_captured, observer.noted_at_replays():  # a graph runs no Python
                results = work()
            note_calls()
            if passing:
                for other in self._passing:  # they have one memory
                    _overwrite(other)
            for place, made in zip(_tensors(places), _tensors(results), strict=True):
                place.copy_(made)

        self.graphs.add(replay)
        return replay, places


def _overwrite(places: Any) -> None:
    for place in _tensors(places):
        place.copy_(torch.full(place.shape, torch.nan))


def _tensors(made: Any) -> list[torch.Tensor]:
    return [each.detach() for each in made if each is not None and each.numel()]
