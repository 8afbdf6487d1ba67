"""Types of arguments, checked by their annotations: Python would take a wrong one, and fail later or not at all."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

WORDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    torch.dtype: "bf16, fp16 or fp32",
    NoneType: "None",
    list[int]: "a list of whole numbers",
    tuple[float, float]: "a pair of numbers",
    torch.Tensor: "a tensor",
    dict: "a dict",
}
"""The types that are checked, and their names in sentences."""


def types_of(hint: Any, default: Any = inspect.Parameter.empty) -> list[Any]:
    """Return the types of an annotation that `WORDS` has; NoneType too where the default is None.

    The list is empty for an argument that takes objects of other kinds.
    """
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    kinds = [list[int] if kind == list[int] or get_args(kind) == (int,) else kind for kind in kinds]
    known = [kind for kind in kinds if kind in WORDS]
    if default is None and NoneType not in known and known:
        known.append(NoneType)
    return [] if known == [NoneType] else known


def is_of(value: Any, kind: Any) -> bool:
    """Tell whether a value is of a type of `WORDS`: true and false are no numbers, and a whole number is a number."""
    if kind == list[int]:
        return isinstance(value, (list, tuple)) and all(is_of(each, int) for each in value)
    if kind == tuple[float, float]:
        return isinstance(value, (tuple, list)) and len(value) == 2 and all(is_of(each, float) for each in value)
    if kind in (int, float):
        return isinstance(value, Integral if kind is int else Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def wrong_type(value: Any, hint: Any, default: Any = inspect.Parameter.empty) -> str | None:
    """Return what a value must be, in words, that is of none of an annotation's types; None for others.

    An annotation that names a type which `WORDS` has not is not checked.
    """
    kinds = types_of(hint, default)
    named = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if len(types_of(hint)) < len(named) or any(is_of(value, kind) for kind in kinds):
        return None
    return " or ".join(WORDS[kind] for kind in kinds)


def require_types(function: Callable[..., Any], values: Mapping[str, Any], owner: str = "") -> None:
    """Raise TypeError for a value that is of none of the types with which its argument is annotated.

    Args:
        function: or a class, which takes the arguments.
        values: by name; arguments without one are passed over.
        owner: beginning of the sentence, before the name.
    """
    for name, hint in _hints(function).items():
        if name in values and (wanted := wrong_type(values[name], hint)) is not None:
            raise TypeError(f"{owner}{name} is {values[name]!r}; it must be {wanted}")


@functools.cache
def _hints(function: Callable[..., Any]) -> dict[str, Any]:
    return get_type_hints(function)
