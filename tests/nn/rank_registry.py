"""Checks that every rank runs, in one start for all of them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from importlib import import_module

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm

CHECKS: dict[str, Callable[[], None]] = {}


def check(function: Callable[[], None]) -> Callable[[], None]:
    """Register a check."""
    CHECKS[function.__name__] = function
    return function


def run_checks(modules: tuple[str, ...]) -> dict[str, str | None]:
    """Run the checks of modules on this rank, up to the first that fails: name to None, or to what went wrong.

    A rank that stops closes its connections, so that the others, which may wait for it, fail at once.
    """
    for module in modules:
        import_module(module)
    outcomes: dict[str, str | None] = dict.fromkeys(CHECKS, "not run: a check before it failed")
    for name, function in CHECKS.items():
        torch.manual_seed(0)
        comm.reset_statistics()
        try:
            function()
            dist.barrier()
            outcomes[name] = None
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
            break
    return outcomes
