"""Caches of keys and values: what transformers calls them, and models that make none in training."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What models and attentions call the cache that they are given, the newest name first: 5.24 of transformers says
`cache`. What takes one name takes the older ones too, and transformers hands it on by the newer."""

_ASKS = ("use_cache", *CACHES)


class _NoCache:
    """Lets a model make no cache that nobody asks for where gradients are recorded.

    Args:
        names: of what its forward takes by place.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def before_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Say `use_cache=False` in a call that trains and leaves it open, as a forward pre-hook."""
        if not (model.training and torch.is_grad_enabled()):
            return None
        given = dict(zip(self._names, args, strict=False)) | kwargs
        if any(given.get(name) is not None for name in _ASKS) or len(args) > self._names.index("use_cache"):
            return None
        return args, {**kwargs, "use_cache": False}


def make_no_cache_in_training(model: nn.Module) -> None:
    """Let what trains make no cache for `config.use_cache`, which is on by default: nobody reads it there.

    A cache keeps the keys and values of all layers, attention of latents has no fused form with one, and layers that
    are given one are not replayed as CUDA graphs. A call gets one by `use_cache=True`, or by giving one.

    Args:
        model: of transformers', whose forward takes tokens and `use_cache`; others are left alone.
    """
    names = tuple(inspect.signature(model.forward).parameters)
    if {"input_ids", "use_cache"} <= set(names) and _MAKES_NONE not in vars(model):
        vars(model)[_MAKES_NONE] = True
        model.register_forward_pre_hook(_NoCache(names).before_model, with_kwargs=True)


_MAKES_NONE = "_fp8booster_makes_no_cache"
