"""Kernels in Triton's interpreter, on the CPU."""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterable
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


def all_of(function: Callable[..., Iterable[str]], *arguments: Any) -> list[str]:
    """What a generator yields, as a list, which processes can send."""
    return list(function(*arguments))


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    _patch_once()
    torch.manual_seed(0)  # whatever the process did before
    return function(*arguments)


@functools.cache
def _patch_once() -> None:
    """Let Triton replace its language's functions once for each module of kernels, and leave them replaced.

    It would look through all of the language for each launch, and for each function that a kernel calls: a third of
    the time.
    """
    from triton.runtime import interpreter

    patch, scopes = interpreter._patch_lang, {}

    def patch_once(function: Callable[..., Any]) -> Any:
        module = function.__module__
        if module not in scopes:
            scopes[module] = patch(function)
        return type(scopes[module])()  # one that has nothing to restore

    interpreter._patch_lang = patch_once


@atexit.register
def _end() -> None:
    while _process:
        _process.pop().kill()
