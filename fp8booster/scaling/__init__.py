"""Scaling strategies: one class each, chosen by `FP8Config.scaling`, by name or as an object."""

from __future__ import annotations

import ast
from dataclasses import fields

from fp8booster.scaling.constant import Constant
from fp8booster.scaling.contract import GRANULARITIES, INPUT, OUTPUT_GRADIENT, WEIGHT, Scaling, State, check_strategy
from fp8booster.scaling.delayed import Delayed
from fp8booster.scaling.real_time import RealTime
from fp8booster.scaling.smooth_swiglu import SmoothSwiGLU

__all__ = [
    "GRANULARITIES",
    "INPUT",
    "OUTPUT_GRADIENT",
    "WEIGHT",
    "Constant",
    "Delayed",
    "RealTime",
    "Scaling",
    "SmoothSwiGLU",
    "State",
    "check_strategy",
    "named",
]

BY_NAME: dict[str, Scaling] = {
    **{granularity: RealTime(granularity) for granularity in GRANULARITIES},
    "amax": RealTime(power_of_two=True),
    "delayed": Delayed(),
    "constant": Constant(),
    "smooth-swiglu": SmoothSwiGLU(),
}


def named(text: str) -> Scaling:
    """Return a strategy by its name, with or without arguments: "delayed", "delayed(history=4, amax='most recent')".

    Raises:
        ValueError: there is none of this name, or an argument that it does not take.
    """
    name, opened, arguments = text.partition("(")
    name = name.strip()
    if name not in BY_NAME:
        raise ValueError(f"FP8Config.scaling is {text!r}; use {', '.join(BY_NAME)}, or a Scaling object")
    if not opened:
        return BY_NAME[name]
    kind = type(BY_NAME[name])
    own = {"granularity": name} if name in GRANULARITIES else {"power_of_two": True} if name == "amax" else {}
    try:
        call = ast.parse(f"f({arguments}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise SyntaxError
        # Python's parser refuses no argument that is given twice within `ast.parse`; a dict would keep the last
        given = {str(each.arg): ast.literal_eval(each.value) for each in call.keywords}
        known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
        if len(given) < len(call.keywords) or own.keys() & given.keys() or not given.keys() <= known:
            raise SyntaxError
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError):
        raise ValueError(
            f"FP8Config.scaling is {text!r}; write {name}(argument=value), with arguments of "
            f"fp8booster.scaling.{kind.__name__}"
        ) from None
    return kind(**own, **given)
