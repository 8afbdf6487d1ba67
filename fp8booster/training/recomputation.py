"""Which layers of a model compute their activations again in backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from fp8booster.nn.modules import repeated_layers

_FLAG = "gradient_checkpointing"
"""Of layers of transformers 5, and of models of 4.51."""


def recompute(model: Any, layers: int | None = None) -> None:
    """Let a model of transformers keep the inputs of its layers alone, and compute the rest again in backward.

    Args:
        model: in place.
        layers: the first so many, which lets the last ones' activations go before the first's are computed again.
            None: all.

    Raises:
        ValueError: the model does not have so many.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if layers is None:
        return
    found = repeated_layers(model)
    if layers > len(found):
        raise ValueError(f"the model has {len(found)} layers; checkpoint at most so many, not {layers}.")
    for layer in found[layers:]:
        setattr(layer, _FLAG, False)
    for module in model.modules():
        if "_gradient_checkpointing_func" in vars(module) and module not in found:
            # of 4.51, where the model asks for each of its layers
            module._gradient_checkpointing_func = partial(_unless_it_keeps, module._gradient_checkpointing_func)


def _unless_it_keeps(checkpoint: Callable[..., Any], call: Callable[..., Any], *args: Any) -> Any:
    """What `call`, of a layer, gives for `args`: by `checkpoint`, unless the layer keeps its activations."""
    return (checkpoint if getattr(_layer_of(call), _FLAG, True) else _called)(call, *args)


def _called(call: Callable[..., Any], *args: Any) -> Any:
    return call(*args)


def _layer_of(call: Any) -> nn.Module:
    while isinstance(call, partial):
        call = call.func
    return getattr(call, "__self__", call)
