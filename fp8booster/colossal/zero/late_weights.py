"""Weights that ZeRO still gathers when the forward pass begins (`overlap_allgather`), read by layers past its hook.

Native code turns each parameter into a ColoParameter, whose torch function waits for the gather (zero_hook.py:24). FP8
layers, and native's own tensor parallel ones (shardformer/layer/_operation.py), read their weights outside any torch
function. So every module waits in a forward hook of its own, and the parameters of FP8 layers become plain ones again.
"""

from __future__ import annotations

from colossalai.zero.low_level.zero_hook import wait_all_gather_handle
from torch import nn

from fp8booster.nn.layer import FP8Layer


def wait_before_forward(model: nn.Module) -> None:
    """Make every module that has parameters of its own wait for their gathers first."""
    for module in model.modules():
        trained = [parameter for parameter in module.parameters(recurse=False) if parameter.requires_grad]
        if isinstance(module, FP8Layer):
            for parameter in trained:
                parameter.__class__ = nn.Parameter
        if trained:
            module.register_forward_pre_hook(_wait_for_parameters)


def _wait_for_parameters(module: nn.Module, args: tuple) -> None:
    for parameter in module.parameters(recurse=False):
        wait_all_gather_handle(parameter)
