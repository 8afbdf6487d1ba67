"""Fuse a model's layers, and replay them as CUDA graphs where the host would be too slow."""

from __future__ import annotations

from torch import nn

from fp8booster.nn.fused import fuse_model
from fp8booster.nn.graphs import capture_as_configured, forget_graphs
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import require_module


def fuse(model: nn.Module) -> str:
    """Fuse what can be fused of a model, in place, in FP8 or in the precision that it has.

    In decoder layers of the families that docs/guide.md lists the residual's addition and the norm become one kernel,
    so do rotary embedding and SwiGLU; in training q, k and v are one product, and gate and up. Their models for causal
    language modelling compute the loss over chunks of logits, which are then never whole (`nn.fused.use_fused_loss`).
    Parameters, their names and the state dict stay as they were. Decoder layers with FP8 layers are replayed as CUDA
    graphs as `FP8Config.cuda_graphs` says.

    `use_fp8=True` fuses by itself. By hand it serves a model that was converted by `convert_to_fp8`, and one that
    computes in BF16, as plain PyTorch or under `TorchDDPPlugin` and `LowLevelZeroPlugin`: fuse it when it has its dtype
    and its device, before it is boosted, for then the weights of merged products are stacked by rows in memory. Where
    they cannot be, those layers run one by one, and the line that is returned says why.

    Args:
        model: any module.

    Returns:
        What was fused and what was not, in a line.

    Raises:
        TypeError: the model is no module.
    """
    require_module(model)
    forget_graphs(model)  # which hold the memory of weights that are to be moved
    summary = fuse_model(model)
    for layer in model.modules():
        if isinstance(layer, FP8Layer):
            capture_as_configured(model, layer.fp8_config)
            break
    return summary
