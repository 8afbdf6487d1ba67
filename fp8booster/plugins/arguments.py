"""The arguments of a native plugin, accepted as it accepts them, plus ours."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping
from typing import Any

from colossalai.logging import DistributedLogger

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


def warn_of_no_effect(
    logger: DistributedLogger, given: FP8Config | None, use_fp8: bool, communication: bool, weights: str | None
) -> None:
    """Warn, on rank 0, of a configuration that nothing reads, and of options in it that do nothing.

    Args:
        given: what the user gave as `fp8_config`.
        communication: gradients and weights are to travel in FP8.
        weights: why ZeRO gathers no weight in FP8, and what to do; None where it does.
    """
    if given is None:
        return
    if not use_fp8:
        logger.warning(
            "fp8_config has no effect: use_fp8 is off; give use_fp8=True, or leave fp8_config out", ranks=[0]
        )
        return
    if weights is not None and given.weights_in_16_bits is False:
        logger.warning(f"fp8_config.weights_in_16_bits=False has no effect: {weights}", ranks=[0])
    if not communication and given.gradient_scaling != "block":
        logger.warning(
            f'fp8_config.gradient_scaling="{given.gradient_scaling}" has no effect: gradients travel uncompressed '
            "without fp8_communication; turn it on, or leave the option out",
            ranks=[0],
        )


def why_zero_gathers_16_bits(config: FP8Config, communication: bool, needs: Mapping[str, bool]) -> str | None:
    """Why ZeRO gathers every weight in 16 bits, and what to do; None where it gathers those of FP8 layers in FP8.

    Args:
        communication: gradients and weights are to travel in FP8.
        needs: by what the plugin would have to be given, whether it was.
    """
    if not communication:
        return "weights are gathered in 16 bits without fp8_communication; turn it on, or leave the option out"
    if config.rowwise:
        return 'weights are gathered in 16 bits with granularity="rowwise"; use "tensorwise", or leave the option out'
    for argument, given in needs.items():
        if not given:
            return f"no weight is gathered in FP8 but with {argument}; give that, or leave the option out"
    return None


FP8_PRECISIONS = ("bf16", "fp16")


def require_16_bits(precision: str) -> None:
    """Raise ValueError where what is not in FP8 would not be in 16 bits."""
    if precision not in FP8_PRECISIONS:
        raise ValueError(
            f"use_fp8 goes with precision {' or '.join(map(repr, FP8_PRECISIONS))}, not {precision!r}: what is not in "
            "FP8 needs a 16-bit type"
        )
