"""Memory that weights of one layer after the other are gathered into, where CUDA graphs find them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol

import torch

from fp8booster.kernels.scales import new_inverse_scales


class Slots:
    """Memory that the units of a model are gathered into by turns, and that stays, so that CUDA graphs find it.

    Units of the same sizes have two places. A unit is gathered into its place when it runs, and the one before it, in
    forward as in backward, has been freed by then or lies in the other place. One that finds another there, as where a
    program keeps layers whole, is gathered elsewhere for that time.
    """

    def __init__(self) -> None:
        self._taken: dict[Hashable, list[Slot]] = {}

    def take(self, kinds: tuple[tuple[int, torch.dtype], ...], device: torch.device, *, alone: bool) -> Slot:
        """Return a place for a unit.

        Args:
            kinds: number of values and format of each piece of memory.
            device: where it lies.
            alone: no other unit gets it, as where weights stay whole after forward.
        """
        taken = self._taken.setdefault((kinds, device), [])
        slot = Slot(kinds, device) if alone or len(taken) < 2 else taken[len(taken) % 2]
        if not alone:
            taken.append(slot)
        return slot


class Owner(Protocol):
    """What is gathered into a place."""

    def step_aside(self) -> None:
        """Lie elsewhere, for another that must have the place."""


class Slot:
    """A place for one unit at a time."""

    owner: Owner | None = None
    """What is gathered there now."""

    def __init__(self, kinds: Sequence[tuple[int, torch.dtype]], device: torch.device) -> None:
        self.memory = [torch.empty(size, dtype=dtype, device=device) for size, dtype in kinds]
        self.inverse_scales = new_inverse_scales(len(kinds), device)
