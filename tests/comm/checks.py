"""What every rank runs: each function checks one property of `fp8booster.comm` against `torch.distributed`."""

from __future__ import annotations

from tests.comm import (
    exchange_checks,
    gather_checks,
    handle_checks,
    point_to_point_checks,
    reduction_checks,
    value_checks,
)
from tests.comm.harness import CHECKS, check, run_checks, spread

__all__ = [
    "CHECKS",
    "check",
    "exchange_checks",
    "gather_checks",
    "handle_checks",
    "point_to_point_checks",
    "reduction_checks",
    "run_checks",
    "spread",
    "value_checks",
]
