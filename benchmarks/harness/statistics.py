"""Median and spread of measured values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Samples:
    """One value for each round of a measurement."""

    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float]) -> Samples:
        """Samples of at least one value.

        Raises:
            ValueError: there is none.
        """
        if not values:
            raise ValueError("a measurement needs at least one round; ask for more rounds")
        return cls(tuple(values))

    @property
    def median(self) -> float:
        """The middle value."""
        return float(np.median(self.values))

    @property
    def low(self) -> float:
        """The 10th percentile."""
        return float(np.percentile(self.values, 10))

    @property
    def high(self) -> float:
        """The 90th percentile."""
        return float(np.percentile(self.values, 90))

    def over(self, other: Samples) -> Samples:
        """This divided by `other`, round by round: what drifts during a run, as clocks do, cancels out."""
        return Samples(tuple(a / b for a, b in zip(self.values, other.values, strict=True)))

    def as_record(self) -> dict[str, object]:
        """For JSON: median, spread and every value."""
        return {"median": self.median, "p10": self.low, "p90": self.high, "values": list(self.values)}
