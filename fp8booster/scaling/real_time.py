"""Real-time (current, just-in-time) scaling: the scale of a tensor comes from its own amax, at each cast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fp8booster.kernels.blockwise_cast import blockwise_cast
from fp8booster.kernels.cast import cast
from fp8booster.kernels.rowwise_cast import rowwise_cast
from fp8booster.kernels.stack_cast import stack_cast
from fp8booster.scaling.checks import require_one_of, require_switch
from fp8booster.scaling.contract import GRANULARITIES, WEIGHT, Scaling
from fp8booster.tensor import QuantizedMatrix


@dataclass(frozen=True)
class RealTime(Scaling):
    """Scales from the tensor as it is; with powers of two the FP8-AMAX of Perez et al. (arXiv 2309.17224).

    Raises:
        ValueError: an argument has a value that is not allowed.
    """

    granularity: str = "tensorwise"
    """How many values share a scale, one of `GRANULARITIES`. With finer scales than one a tensor the transposes that
    backward reads have scales of their own: for each feature, or for 128 tokens of a feature. Blockwise products have
    no fast accumulation, and sizes are padded to multiples of 128."""

    power_of_two: bool = None  # type: ignore[assignment] # see __post_init__
    """As in `Scaling`; None: False for tensorwise scales, True for finer ones."""

    def __post_init__(self) -> None:
        require_one_of(self, "granularity", GRANULARITIES)
        if self.power_of_two is None:
            object.__setattr__(self, "power_of_two", self.granularity != "tensorwise")
        require_switch(self, "power_of_two")

    @property
    def name(self) -> str:  # type: ignore[override]
        """As `scaling.named` takes it."""
        return "amax" if self == RealTime(power_of_two=True) else self.granularity

    def cast(
        self,
        role: str,
        matrix: Tensor,
        dtype: torch.dtype,
        *,
        amax: Tensor | None = None,
        state: Any = None,
        **layouts: bool,
    ) -> QuantizedMatrix:
        """As `Scaling.cast`; finer scales than one a tensor find their own amaxes."""
        layouts["power_of_two"] = self.power_of_two
        # finer kernels read the matrix for amaxes of their own: one delivered for the whole is of no use to them
        if self.granularity == "tensorwise":
            return QuantizedMatrix(*cast(matrix, dtype, amax=amax, **layouts), None)
        if self.granularity == "rowwise":
            return QuantizedMatrix(*rowwise_cast(matrix, dtype, **layouts))
        # squares alone are scaled alike in the transpose, so a weight's serve forward and backward
        return QuantizedMatrix(*blockwise_cast(matrix, dtype, square=role == WEIGHT, **layouts))

    def cast_stack(
        self, role: str, matrices: Sequence[Tensor], dtype: torch.dtype, **layouts: bool
    ) -> QuantizedMatrix | None:
        """As `Scaling.cast_stack`; not where a subclass casts otherwise."""
        if self.granularity != "tensorwise" or type(self).cast is not RealTime.cast:
            return None
        return QuantizedMatrix(*stack_cast(matrices, dtype, power_of_two=self.power_of_two, **layouts), None)

    @property
    def for_engines(self) -> RealTime | None:
        """As `Scaling.for_engines`: a shard has no whole rows or blocks."""
        return self if self.granularity == "tensorwise" else None


class RealTimeElsewhere(Scaling):
    """Base of strategies that keep a state: in real time they scale where there is none, and what engines cast."""

    @property
    def without_state(self) -> RealTime:
        """As `Scaling.without_state`."""
        return RealTime(power_of_two=self.power_of_two)

    for_engines = without_state
