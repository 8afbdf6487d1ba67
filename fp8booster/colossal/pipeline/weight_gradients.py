"""Weight gradients under the zero-bubble schedule, which computes them in passes of their own.

Backward of a micro-batch (B) makes the gradients of activations alone, and the scheduler fills its bubbles with the
weight gradients (W): each layer puts its work into colossalai's `WeightGradStore`, `schedule_b` closes the list of a
micro-batch and `schedule_w` works off the oldest (pipeline/weight_grad_store.py, pipeline/schedule/zero_bubble_pp.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from colossalai.pipeline.weight_grad_store import WeightGradStore
from torch import nn

from fp8booster.nn.linear.functional import Defer


def defer_weight_gradient(weight: nn.Parameter | tuple[torch.Tensor, nn.Parameter]) -> Defer:
    """What a layer gives to `nn.linear.functional.linear_from_quantized` as `defer` under the zero-bubble schedule.

    Each gradient is added to `weight.grad`, in place where there is one, when the scheduler comes to it. Autograd
    returns none, so hooks that wait for this gradient do not run.

    Args:
        weight: the parameter, or as Colossal-AI's GPT-2 layers have it (view used in the product, parameter); its
            gradient has its shape. Where the layer holds the weight transposed, wrap what computes it first.
    """
    return lambda compute: WeightGradStore.put(None, None, weight, _Deferred(compute))


class _Deferred:
    """A weight gradient in the form that `WeightGradStore.pop` calls: with input, output's gradient and what is there.

    Colossal-AI's products get their operands from the store; this one holds FP8 copies of its own.
    """

    def __init__(self, compute: Callable[[], torch.Tensor]) -> None:
        self._compute = compute

    def __call__(self, _: None, __: None, accumulated: torch.Tensor | None = None) -> torch.Tensor | None:
        gradient = self._compute()
        if accumulated is None:
            return gradient
        accumulated.add_(gradient)
        return None
