"""Which values the arguments of a plugin's constructor take on the command line."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    torch.dtype: "bf16, fp16 or fp32",
    NoneType: "None",
    list[int]: "a list of whole numbers",
    dict: "a dict",
}
"""The types that can be written on the command line, and their names there."""

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _from(least: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: least <= value < math.inf, f"at least {least}"


def _above(least: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: least < value < math.inf, f"above {least}"


_SHARE = (lambda value: 0 <= value <= 1), "from 0 to 1"

_RANGES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(
        (
            "reduce_bucket_size_in_m",
            "zero_bucket_size_in_m",
            "bucket_cap_mb",
            "ddp_bucket_cap_mb",
            "extra_dp_size",
            "num_model_chunks",
            "make_vocab_size_divisible_by",
            "inner_ring_size",
            "growth_interval",
            "hysteresis",
            "search_range_m",
            "hidden_dim",
        ),
        _from(1),
    ),
    **dict.fromkeys(("initial_scale", "min_scale", "max_scale", "norm_type", "min_chunk_size_m"), _above(0)),
    **dict.fromkeys(
        (
            "shard_param_frac",
            "offload_optim_frac",
            "offload_param_frac",
            "warmup_non_model_data_ratio",
            "steady_cuda_cap_ratio",
            "gpu_margin_mem_ratio",
        ),
        _SHARE,
    ),
    "growth_factor": _above(1),
    "backoff_factor": ((lambda value: 0 < value < 1), "above 0 and below 1"),
    "max_prefetch": _from(0),
    "communication_dtype": ((lambda value: value in _DTYPES), _WORDS[torch.dtype]),
    "placement_policy": ((lambda value: value in ("static", "auto")), "static or auto"),
    "num_layers_per_stage": ((lambda value: min(value, default=0) >= 1), "of at least one layer for each stage"),
}
"""What an argument's value must be, beside its type."""


def require_value(argument: inspect.Parameter, value: Any) -> None:
    """Raise ValueError for a value that a constructor's argument does not take, or would take and go wrong with."""
    name = argument.name
    types = _types(argument)
    if not types:
        raise ValueError(f"The plugin's option {name!r} is an object of Python's; it can be set in a script alone.")
    if not any(_is_of(value, each) for each in types):
        raise ValueError(
            f"The plugin's option {name!r} is {value!r}; it must be {' or '.join(_WORDS[each] for each in types)}."
        )
    if value is not None and name in _RANGES and not _RANGES[name][0](value):
        raise ValueError(f"The plugin's option {name!r} is {value!r}; it must be {_RANGES[name][1]}.")


def _types(argument: inspect.Parameter) -> list[Any]:
    """The types of an argument that can be written; none where it takes an object."""
    hint = argument.annotation
    kinds = list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]
    kinds = [list[int] if kind == list[int] or get_args(kind) == (int,) else kind for kind in kinds]
    known = [kind for kind in kinds if kind in _WORDS]
    if argument.default is None and NoneType not in known and known:
        known.append(NoneType)
    return [] if known == [NoneType] else known


def _is_of(value: Any, kind: Any) -> bool:
    if kind == list[int]:
        return isinstance(value, list) and all(type(each) is int for each in value)
    if kind is float:
        return type(value) in (int, float)
    return isinstance(value, kind) if kind in (torch.dtype, dict) else type(value) is kind
