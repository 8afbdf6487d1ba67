"""Repeated layers of a model that are captured into CUDA graphs after a few calls, and replayed from then on.

Where a part of a layer must run eagerly (`eager`), its graphs break there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.nn.graphs.layer import STATE_BYTES, LayerGraphs, Shared
from fp8booster.nn.modules import (
    change_class,
    class_without,
    inside_wrappers,
    mixed_class,
    repeated_layers,
    require_module,
)


class CapturedLayer(nn.Module):
    """Mixin of a layer that is replayed where it can be."""

    name_prefix = "Captured"

    fp8_graphs: LayerGraphs

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.fp8_graphs.run(super().forward, self, args, kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> CapturedLayer:
        # the parameters may move to another device or dtype, and graphs would hold the memory where they were
        self.fp8_graphs.forget()
        return cast(CapturedLayer, super()._apply(fn, recurse))


def capture_layers(model: nn.Module, *, only_where_host_limits: bool = False) -> int:
    """Let the repeated layers of a model be captured into CUDA graphs, in place, when they have run a few times.

    In training, each layer's forward and backward is one graph then, and Python no longer launches their kernels: a
    small model trains as fast as the GPU computes. A layer with a part that must run eagerly, as experts that are
    spread over ranks, has graphs before and behind it. Values are the same, bit for bit, without dropout.
    Needed are calls of the same shapes, of which a layer captures several; the report tells what was not captured and
    why. Graphs share what they need only while a layer runs.

    Args:
        model: converted, fused and sharded before.
        only_where_host_limits: not where the GPU takes `MOST_OF_HOST` times as long for a layer's first forwards as the
            host, unless these wait for other ranks. A later call changes this for layers that may be captured already.

    Returns:
        The number of layers.
    """
    require_module(model)
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    shared = Shared(only_where_host_limits, unseen=STATE_BYTES * trained)
    layers = [inside_wrappers(each) for each in repeated_layers(model)]
    for layer in layers:
        if isinstance(layer, CapturedLayer):  # as `fuse` left it to the host's speed; recordings hold what it shares
            shared = layer.fp8_graphs.shared
            shared.only_where_host_limits = only_where_host_limits
        else:
            change_class(layer, mixed_class(CapturedLayer, type(layer)))
        layer.__dict__["fp8_graphs"] = LayerGraphs(shared)
    return len(layers)


def capture_as_configured(model: nn.Module, config: FP8Config) -> None:
    """Let the repeated layers of a model be captured into CUDA graphs as `FP8Config.cuda_graphs` says.

    Where it says nowhere, those that an earlier configuration let be captured are no longer.

    Args:
        model, config: of its FP8 layers, converted before.
    """
    graphs = config.cuda_graphs
    # left open, graphs are a matter of speed: a strategy that cannot be captured is no mistake of the user's
    if graphs or (graphs is None and torch.cuda.is_available() and config.scaling.is_captured):
        capture_layers(model, only_where_host_limits=graphs is None)
    elif graphs is False:
        _release_layers(model)


def _release_layers(model: nn.Module) -> None:
    """Undo `capture_layers`. Backwards that are awaited have their graphs."""
    for module in model.modules():
        if isinstance(module, CapturedLayer):
            change_class(module, class_without(CapturedLayer, type(module)))
            del vars(module)["fp8_graphs"]


def look_inside(model: nn.Module, when: Callable[[], bool]) -> Callable[[], None]:
    """Let captured layers of a model run eagerly where `when()` is true; return what ends it."""
    shared = {module.fp8_graphs.shared for module in model.modules() if isinstance(module, CapturedLayer)}
    for each in shared:
        each.looks_inside.append(when)

    def end() -> None:
        for each in shared:
            each.looks_inside.remove(when)

    return end


def captured_layers(model: nn.Module) -> Counter[str | None]:
    """Count the layers that were replayed when they ran last in training, under None, and others by the reason."""
    return Counter(graphs.why_not for graphs in _graphs_in(model))


def graph_breaks(model: nn.Module) -> Counter[str]:
    """Count the replayed layers in which something runs eagerly, by the reason why."""
    return Counter(reason for graphs in _graphs_in(model) if graphs.why_not is None for reason in graphs.breaks)


def _graphs_in(model: nn.Module) -> Iterator[LayerGraphs]:
    return (module.fp8_graphs for module in model.modules() if isinstance(module, CapturedLayer))
