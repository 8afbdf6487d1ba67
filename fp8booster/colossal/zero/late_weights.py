"""Weights that ZeRO still gathers when the forward pass begins (`overlap_allgather`), read by layers past its hook.

Native code turns each parameter into a ColoParameter, whose torch function waits for the gather (zero_hook.py:24). An
FP8 layer reads its weight outside any torch function, so it waits in a forward hook of its own, and its parameters
become plain ones again.
"""

from __future__ import annotations

from colossalai.zero.low_level.zero_hook import wait_all_gather_handle
from torch import nn

from fp8booster.nn import FP8Linear


def wait_before_forward(model: nn.Module) -> None:
    """Make every module that reads a parameter of an FP8 layer wait for its gather first."""
    late = {
        id(parameter): parameter
        for module in model.modules()
        if isinstance(module, FP8Linear)
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad
    }
    for parameter in late.values():
        parameter.__class__ = nn.Parameter
    for module in model.modules():
        # an embedding tied to an FP8 layer too: its parameter lost the hook
        if any(id(parameter) in late for parameter in module.parameters(recurse=False)):
            module.register_forward_pre_hook(_wait_for_parameters)


def _wait_for_parameters(module: nn.Module, args: tuple) -> None:
    for parameter in module.parameters(recurse=False):
        wait_all_gather_handle(parameter)
