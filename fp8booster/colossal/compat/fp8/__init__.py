"""What FP8 needs of colossalai 0.5.0 where no argument, subclass or attribute serves."""

from __future__ import annotations

from fp8booster.colossal.compat.fp8 import communication, graphs, training  # noqa: F401 (registers their patches)
