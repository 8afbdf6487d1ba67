"""What stands in for a CUDA graph on the CPU: the work is done again, and its results are laid where the first lay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Rerun:
    """As `nn.graphs.recorder.Recorder`; counts what it has captured, and how often that was replayed."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0

    def __call__(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.captured += 1
        places = work()
        for place in _tensors(places):
            place.copy_(torch.full(place.shape, torch.nan))  # a capture computes nothing

        def replay() -> None:
            self.replayed += 1
            with torch.enable_grad():  # as it was captured
                results = work()
            for place, made in zip(_tensors(places), _tensors(results), strict=True):
                place.copy_(made)

        return replay, places


def _tensors(made: Any) -> list[torch.Tensor]:
    return [each.detach() for each in made if each is not None and each.numel()]
