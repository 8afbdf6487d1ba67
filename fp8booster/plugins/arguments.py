"""The arguments of a native plugin, accepted as it accepts them, plus ours."""

from __future__ import annotations

import difflib
import inspect
from typing import Any

from fp8booster.config import FP8Config


def bind(native: type, positional: tuple, named: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call to a native plugin's constructor, by name, as far as they were given.

    Raises:
        TypeError: an argument that the plugin does not have; the message names close matches.
    """
    signature = inspect.signature(native.__init__)
    known = list(signature.parameters)[1:]
    ours = [name for name in ("use_fp8", "fp8_config") if name not in known]
    for name in named:
        if name not in known:
            close = difflib.get_close_matches(name, known + ours, n=3)
            hint = (
                f"did you mean {' or '.join(close)}?"
                if close
                else f"it takes {', '.join(known)} and {' and '.join(ours)}"
            )
            raise TypeError(f"{native.__name__} has no argument {name!r}; {hint}")
    arguments = signature.bind(None, *positional, **named).arguments
    del arguments[next(iter(arguments))]  # self
    return arguments


def require_config(config: FP8Config | None) -> FP8Config:
    """The configuration, or the default one for None.

    Raises:
        TypeError: it is something else.
    """
    if config is None:
        return FP8Config()
    if not isinstance(config, FP8Config):
        raise TypeError(f"fp8_config is {config!r}; give an fp8booster.FP8Config")
    return config


FP8_PRECISIONS = ("bf16", "fp16")


def require_16_bits(precision: str) -> None:
    """Raise ValueError where what is not in FP8 would not be in 16 bits."""
    if precision not in FP8_PRECISIONS:
        raise ValueError(
            f"use_fp8 goes with precision {' or '.join(map(repr, FP8_PRECISIONS))}, not {precision!r}: what is not in "
            "FP8 needs a 16-bit type"
        )
