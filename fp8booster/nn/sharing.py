"""Hooks on the modules within whose forward layers of one input share its cast."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from fp8booster.nn.linear.layer import FP8Layer, without_adapter
from fp8booster.nn.linear.shared_input import begin_forward, end_forward
from fp8booster.nn.modules import repeated_layers


def share_inputs(model: nn.Module) -> None:
    """Let FP8 layers share the casts of their inputs within each forward of what holds them, by hooks on it.

    That is a repeated layer, such as a decoder layer, of which attention and feed-forward block may read one input, and
    elsewhere the module that holds two FP8 layers or more.

    Args:
        model: converted.
    """
    for module in _bounds(model):
        if isinstance(module, nn.TransformerEncoderLayer):
            continue  # its layers share no input, and hooks would end its fast path in evaluation
        if begin_forward not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(begin_forward)
            module.register_forward_hook(end_forward, always_call=True)


def _bounds(model: nn.Module) -> Iterator[nn.Module]:
    repeated = [
        layer
        for layer in repeated_layers(model)
        if not isinstance(layer, FP8Layer) and sum(isinstance(each, FP8Layer) for each in layer.modules()) > 1
    ]
    inside = {module for layer in repeated for module in layer.modules()}
    yield from repeated
    for module in model.modules():
        readers = [child for child in map(without_adapter, module.children()) if isinstance(child, FP8Layer)]
        if len(readers) > 1 and module not in inside and not isinstance(module, nn.ModuleList):
            yield module
