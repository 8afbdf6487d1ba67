"""A patch for streams: what is sent on one of them must not hold up what runs on another."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from types import ModuleType

import torch

from fp8booster.colossal.compat.registry import patch
from fp8booster.colossal.compat.replacements import Replacements

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
"""How many queues a process gives its GPU work; CUDA reads it once, when it begins, and takes 8 where it is not set."""


def _given() -> str | None:
    """What the user set: colossalai, where it was imported before, has overwritten it in `os.environ`."""
    if "colossalai.initialize" not in sys.modules:
        return os.environ.get(VARIABLE)
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{VARIABLE}=".encode()
    return next((entry[len(prefix) :].decode() for entry in started_with if entry.startswith(prefix)), None)


_GIVEN = _given()


@patch("initialize", "10", needed_when=f"the user has not set {VARIABLE}")
def streams_have_queues_of_their_own(module: ModuleType, replacements: Replacements) -> None:
    """Streams do not wait for each other unless they are told to.

    Without it colossalai sets CUDA_DEVICE_MAX_CONNECTIONS=1 when it is imported, whatever the user has set: all streams
    share one queue, and the next forward waits behind the weights that are sent meanwhile. What the user has set is
    kept.
    """
    if os.environ.get(VARIABLE) == _GIVEN:
        return
    if torch.cuda.is_initialized():
        warnings.warn(
            f"CUDA began with {VARIABLE}={os.environ.get(VARIABLE)}, which colossalai set, so communication may not "
            "run beside computation; import fp8booster.plugins before the first use of a GPU",
            stacklevel=2,
        )
        return
    replacements.set_variable(VARIABLE, _GIVEN)
