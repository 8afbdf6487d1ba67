"""A difference between variants, over several seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.results import Record


@dataclass(frozen=True)
class Difference:
    """The mean over seeds of what one variant's loss is over BF16's, less one."""

    mean: float
    error: float
    """Standard error of the mean; NaN of one seed."""

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference:
        """Return the mean and its error of one value for each seed."""
        count = len(differences)
        error = float(np.std(differences, ddof=1)) / math.sqrt(count) if count > 1 else math.nan
        return cls(float(np.mean(differences)), error)

    @property
    def in_percent(self) -> tuple[float, float]:
        """Mean and error."""
        return 100 * self.mean, 100 * self.error

    def as_record(self) -> Record:
        """For JSON."""
        return {"mean": self.mean, "error": self.error, "shown": str(self)}

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {100 * self.error:.2f}"
        return f"{100 * self.mean:+.2f}{error} %"
