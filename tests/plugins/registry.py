"""Checks that every rank runs, in one start for all of them; the tests of the parent judge one each."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.distributed import run_each

Check = Callable[..., None]
CHECKS: dict[str, Check] = {}
_shared = Path()


def check(function: Check) -> Check:
    """Register a check under its name."""
    CHECKS[function.__name__] = function
    return function


def check_each(*cases: Any) -> Callable[[Check], Check]:
    """Register `function(case)` for each case, as name[case]."""

    def register(function: Check) -> Check:
        for case in cases:
            CHECKS[f"{function.__name__}[{case}]"] = partial(function, case)
        return function

    return register


def names(module: str) -> list[str]:
    """The checks that a module registers."""
    import_module(module)
    return [name for name, function in CHECKS.items() if getattr(function, "func", function).__module__ == module]


def shared_folder(name: str) -> Path:
    """A folder that all ranks see."""
    folder = _shared / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def run_checks(modules: list[str], folder: str) -> None:
    """Run the checks of modules on this rank, for `check_ranks`."""
    run_named([name for module in modules for name in names(module)], folder)


def run_named(checks: list[str], folder: str) -> None:
    """Run checks that were registered on this rank; `folder` is what all ranks see."""
    import colossalai

    global _shared
    _shared = Path(folder)
    logging.disable(logging.WARNING)
    colossalai.launch_from_torch(verbose=False)
    spare_time()
    run_each({name: CHECKS[name] for name in checks}, lambda: torch.manual_seed(0))


def spare_time() -> None:
    """Skip what takes half of the time to boost a tiny model, and what no check looks at."""
    import colossalai.booster.plugin
    from colossalai.logging import DistributedLogger

    with contextlib.suppress(ImportError):  # transformers 5: Colossal-AI cannot shard its models
        import colossalai.shardformer.policies.llama  # noqa: F401

    # a plugin that goes collects garbage, and would look through all that was ever imported
    gc.collect()
    gc.freeze()
    # the place in the code that logs, for which sources are read, even where nothing is logged
    DistributedLogger._DistributedLogger__get_call_info = staticmethod(lambda: ("", 0, ""))
    for device in (torch.cuda, torch.xpu, torch.mtia):
        if not device.is_available():  # the stack is formatted for each seed of a device that may come
            device.manual_seed_all = lambda seed: None
