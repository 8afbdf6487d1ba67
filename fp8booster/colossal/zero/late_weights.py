"""Weights that ZeRO still gathers when the forward pass begins (`overlap_allgather`), read by layers past its hook.

Colossal-AI turns each parameter into a ColoParameter, whose torch function waits for the gather (zero_hook.py:24). FP8
layers, and Colossal-AI's own tensor parallel ones (shardformer/layer/_operation.py), read their weights outside any
torch function. What they compute from is a ColoTensor all the same, whose in-place operations are none
(colo_tensor.py:6): the gradient of shardformer/layer/loss.py:136 loses its factor. So modules wait in a forward hook of
their own, and all parameters become plain ones again.
"""

from __future__ import annotations

from colossalai.tensor.colo_parameter import ColoParameter
from colossalai.zero.low_level.zero_hook import wait_all_gather_handle
from torch import nn

from fp8booster.nn.fused.causal_lm_loss import fused_head
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.modules import ONLY_WAITS, change_class


def make_parameters_plain(model: nn.Module) -> None:
    """Turn every ColoParameter into the nn.Parameter that it was."""
    for parameter in model.parameters():
        if type(parameter) is ColoParameter:
            change_class(parameter, nn.Parameter)


def wait_before_forward(model: nn.Module) -> None:
    """Make every module wait for the gathers of its own parameters, and of its children's, before its forward.

    Layers whose weights `nn.fused` reads past their forward have no hook, which it would have to run: the module that
    holds them waits.
    """
    held = {layer for merged in merged_layers(model) for layer in merged.layers} | {fused_head(model)}
    make_parameters_plain(model)
    for module in model.modules():
        # a model that is boosted again has the hook already
        if module not in held and _wait_for_parameters not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_wait_for_parameters)


def wait_for_weights(model: nn.Module) -> None:
    """Wait for the gathers of all weights that are under way; a rank may do so alone."""
    for parameter in model.parameters():
        wait_all_gather_handle(parameter)


def _wait_for_parameters(module: nn.Module, args: tuple) -> None:
    # children's too: a forward may read a child's weight without calling the child
    for each in (module, *module.children()):
        for parameter in each._parameters.values():
            if parameter is not None:
                wait_all_gather_handle(parameter)


# code that reads a layer past its forward refuses layers with hooks, whose work it would skip; this one is known
setattr(_wait_for_parameters, ONLY_WAITS, True)
