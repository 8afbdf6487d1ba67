"""Adam's update of many tensors, each read and written once; the largest magnitude of what was written comes with it.

torch's fused operator writes the divided gradients back, and an amax of the new values would read these once more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8booster.kernels.adam_step import AdamRates, AdamShards
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amaxes_of


@operator()
def update(shards: AdamShards, rates: AdamRates, divisor: Tensor | None = None) -> Tensor:
    """Take one step of Adam (Kingma and Ba, algorithm 1) or AdamW (Loshchilov and Hutter, algorithm 2), in FP32.

    Args:
        shards: one or more; values and moments are written, gradients may be.
        rates: of the step.
        divisor: float32 [] on their device; gradients are divided by it first. None: they are not.

    Returns:
        float32 [shards]: the largest magnitude among the new values of each, NaN where one is NaN.

    Raises:
        ValueError: a tensor's values lie apart.
    """
    shards.require_contiguous()
    update_by_torch(shards, rates, divisor)
    return torch.stack(amaxes_of(shards.values))


def update_by_torch(
    shards: AdamShards,
    rates: AdamRates,
    divisor: Tensor | None = None,
    max_exp_avg_sqs: Sequence[Tensor] = (),
    maximize: bool = False,
) -> None:
    """The step of `update` in torch's fused operator, without the amaxes; gradients are widened first.

    Args:
        shards, rates, divisor: as in `update`.
        max_exp_avg_sqs: as `exp_avg_sqs`, for amsgrad; none without it.
        maximize: as in `torch.optim.Adam`.
    """
    values, device = shards.values, shards.values[0].device
    operator = torch._fused_adamw_ if rates.decoupled else torch._fused_adam_
    lr = rates.lr
    if isinstance(lr, Tensor):
        lr = lr.to(device) if device.type == "cuda" else lr.item()
    operator(
        list(values),
        [_laid_as(value, gradient) for gradient, value in zip(shards.gradients, values, strict=True)],
        list(shards.exp_avgs),
        list(shards.exp_avg_sqs),
        list(max_exp_avg_sqs),
        [step.to(device) for step in shards.steps],
        lr=lr,
        beta1=rates.betas[0],
        beta2=rates.betas[1],
        weight_decay=rates.weight_decay,
        eps=rates.denominator_eps(),
        amsgrad=len(max_exp_avg_sqs) > 0,
        maximize=maximize,
        grad_scale=divisor,
        found_inf=None,
    )


def _laid_as(value: Tensor, gradient: Tensor) -> Tensor:
    """A gradient of its value's dtype and strides: the operator reads both in the order in which they lie."""
    return gradient.to(value.dtype) if gradient.stride() == value.stride() else torch.empty_like(value).copy_(gradient)
