"""Checks that every rank runs, in one start for all of them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch

from fp8booster import comm
from tests.distributed import run_each

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


def run_checks(modules: tuple[str, ...]) -> None:
    """Run the checks of modules on this rank, for `check_ranks`."""
    for module in modules:
        import_module(module)
    run_each(CHECKS, _prepare)


def _prepare() -> None:
    torch.manual_seed(0)
    comm.reset_statistics()
