"""Kernels in Triton's interpreter, on the CPU."""

from __future__ import annotations

import atexit
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import TEST_SECONDS, RankError, RankProcesses

_process: list[RankProcesses] = []
"""One for all modules: Triton decides when it is imported whether it interprets, and that takes seconds."""


def interpreted(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a function returns in a process where Triton interprets kernels; skips the test where there is no Triton."""
    pytest.importorskip("triton")
    if not _process:
        _process.append(RankProcesses(1, None, TEST_SECONDS, {"TRITON_INTERPRET": "1"}, preloaded=False))
    try:
        return _process[0].call(_call, function, *arguments, seconds=TEST_SECONDS)[0]
    except RankError:
        _end()
        raise


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    torch.manual_seed(0)  # whatever the process did before
    return function(*arguments)


@atexit.register
def _end() -> None:
    while _process:
        _process.pop().kill()
