"""The contract of a source of tensors for an export, and what all sources check."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fp8booster.config import FP8Config
from fp8booster.formats import HIGH_PRECISION
from fp8booster.kernels.scales import amax_of
from fp8booster.serving.formats import CheckpointFormat, require_finite
from fp8booster.serving.layout import Layout


class Source(ABC):
    """The tensors of a model, by their names in files."""

    fp8_config: FP8Config
    layout: Layout
    dtype: torch.dtype = torch.bfloat16
    """Type of what is written in 16 bits: FP16 for a model that has that and no BF16."""
    merged: int = 0
    """Weights that adapters are merged into."""
    from_masters: int = 0
    """Weights that are cast from masters."""

    def __init__(self) -> None:
        self._amaxes: dict[tuple[str, ...], torch.Tensor] = {}

    @property
    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of all tensors, a tied one once."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Return the value of a tensor in files, in FP32 where it is still to be rounded."""

    def weight(self, name: str) -> torch.Tensor:
        """Return the value that training casts."""
        return self.tensor(name)

    def castable(self, name: str) -> torch.Tensor:
        """Return the value that training casts, in a type that FP8 is cast from. Raises ValueError for none."""
        weight = self.weight(name)
        require_floating(name, weight)
        require_finite(name, weight)
        # products of training cast FP32, BF16 and FP16, and no FP64
        return weight if weight.dtype in HIGH_PRECISION else weight.float()

    def shared_amax(self, name: str) -> torch.Tensor:
        """Return the amax of the weights that share a scale with a weight."""
        group = self.scale_group(name)
        if group not in self._amaxes:
            # kept, so that q, k and v are read once for it and not thrice
            self._amaxes[group] = torch.stack([amax_of(self.castable(each)) for each in group]).max()
        return self._amaxes[group]

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return values and scale of a weight that is at hand in FP8 in this format; None for others.

        Raises:
            ValueError: it is at hand in another format, and nowhere else: to cast it again would round it twice.
        """
        return None

    def scale_group(self, name: str) -> tuple[str, ...]:
        """Return the weights that share a scale."""
        return self.layout.groups[name]

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the content of config.json."""

    @abstractmethod
    def copy_files(self, folder: Path) -> None:
        """Write the files that belong to the model besides its weights and config."""


def half_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the 16-bit type of a model: FP16 where it has that and no BF16."""
    return torch.float16 if {torch.float16, torch.bfloat16} & {*dtypes} == {torch.float16} else torch.bfloat16


def require_of_one_layer(adapters: Iterable[str], layout: Layout, place: object) -> None:
    """Raise ValueError for adapters on no layer's weight, or on that of several, as a tied one."""
    owners = Counter(layout.first_name.values())
    for name in adapters:
        if owners[layout.first_name.get(name, "")] != 1:
            raise ValueError(
                f"{name} in {place} is not one layer's weight; merge its adapters with peft's merge_and_unload."
            )


def require_granularity(name: str, there: str | None, chosen: CheckpointFormat) -> None:
    """Raise ValueError unless a weight's FP8 values have scales of the format."""
    if there != chosen.granularity:
        raise ValueError(
            f"{name} is kept in FP8 alone, with {there or 'other'} scales, and the format has {chosen.granularity} "
            "ones; use the format that it is in, or bf16: another cast would round it twice."
        )


def require_shapes(layout: Layout, found: Mapping[str, Sequence[int]], place: str) -> None:
    """Raise ValueError unless these are the tensors of the model; of a tied one any name will do."""
    there = {layout.first_name.get(name, name) for name in found}
    for name in sorted({*found, *layout.shapes}):
        if name not in found and layout.first_name.get(name, name) in there:
            continue
        expected = list(layout.shapes[name]) if name in layout.shapes else "none"
        has = list(found[name]) if name in found else "none"
        if has != expected:
            raise ValueError(
                f"{name} is {has} in {place}, and {expected} in the model that its config describes; give a whole "
                "model, as booster.save_model writes it, with its config.json."
            )


def require_floating(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that is no weight in 16 bits or more."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise ValueError(
            f"{name} is {tensor.dtype}, and weights have 16 bits or more; give the model as it was trained"
        )
