"""Adam's update of many tensors, each read and written once; the largest magnitude of what was written comes with it.

torch's fused operator writes the divided gradients back, and an amax of the new values would read these once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import amaxes_of

SMALLEST_NORMAL = 2.0**-126  # of float32


class AdamRates(NamedTuple):
    """Hyperparameters of a step, as in `torch.optim.Adam`."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """Decay the values themselves (AdamW), not by way of the gradient (Adam with L2)."""

    def denominator_eps(self) -> float:
        """Return `eps`, or the smallest normal float32 in the place of 0."""
        # it changes no sum with a root of a second moment, which is at least 3.7e-23 or 0; but 0 / 0 would make NaN of
        # what never had a gradient, as the padding of a shard
        return max(self.eps, SMALLEST_NORMAL)


class AdamShards(NamedTuple):
    """Tensors of one device: the i-th of each list belong together. [n_i], contiguous, of BF16, FP16 or FP32."""

    values: Sequence[Tensor]
    gradients: Sequence[Tensor]
    """Of any of these dtypes."""

    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    """As `exp_avgs`, of the dtype of the values."""

    steps: Sequence[Tensor]
    """float32 [], on the device or on the host: the number of steps, this one included."""

    def require_contiguous(self) -> None:
        """Raise ValueError where a tensor's values lie apart."""
        require_contiguous(chain.from_iterable(self[:4]))


def require_contiguous(tensors: Iterable[Tensor]) -> None:
    """Raise ValueError where the values of a tensor that Adam's update reads or writes lie apart."""
    if not all(map(Tensor.is_contiguous, tensors)):
        raise ValueError("Adam's update reads and writes values one after the other; give contiguous tensors")


def require_rates(lr: float, betas: tuple[float, float], eps: float, weight_decay: float) -> None:
    """Raise ValueError for a hyperparameter of an Adam outside its range."""
    infinite = float("inf")
    for name, value, limit in (
        ("lr", lr, infinite),
        ("eps", eps, infinite),
        ("weight_decay", weight_decay, infinite),
        ("betas[0]", betas[0], 1.0),
        ("betas[1]", betas[1], 1.0),
    ):
        if not 0.0 <= value < limit:
            raise ValueError(f"{name} is {value!r}; it must be at least 0 and less than {limit:g}")


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
    # of values as they were rounded: the cast that takes these amaxes reads what memory holds
    return torch.stack(amaxes_of(shards.values))


def update_by_torch(
    shards: AdamShards,
    rates: AdamRates,
    divisor: Tensor | None = None,
    max_exp_avg_sqs: Sequence[Tensor] = (),
    maximize: bool = False,
) -> None:
    """Take the step of `update` by torch's fused operator, without the amaxes; gradients are widened first.

    Args:
        shards, rates, divisor: as in `update`.
        max_exp_avg_sqs: as `exp_avg_sqs`, for amsgrad; none without it.
        maximize: as in `torch.optim.Adam`.
    """
    values, device = shards.values, shards.values[0].device
    operator = torch._fused_adamw_ if rates.decoupled else torch._fused_adam_
    lr = rates.lr  # as a tensor it stays on a GPU: the host would wait for the number
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
    """Return a gradient of its value's dtype and strides."""
    # the operator reads both in the order in which they lie, whatever their strides
    return gradient.to(value.dtype) if gradient.stride() == value.stride() else torch.empty_like(value).copy_(gradient)


def factors(shards: AdamShards, rates: AdamRates) -> Tensor:
    """Return the numbers of a step that differ between shards: float32 [shards, 4] on their device.

    A row holds the factor of weight decay, the step size lr / (1 - beta1^t), the root of 1 - beta2^t, and a zero, where
    the amax comes; 16 bytes, so that each begins at a multiple of 16.
    """
    # in FP64: 1 - 0.999 in float32 errs by up to 3e-5 of itself in a run's first steps
    device = shards.values[0].device
    steps = torch.stack(tuple(shards.steps)).to(device, torch.float64, non_blocking=True)
    lr = rates.lr.to(steps) if isinstance(rates.lr, Tensor) else rates.lr
    decay = lr * rates.weight_decay if rates.decoupled else rates.weight_decay
    rows = torch.zeros(len(steps), 4, dtype=torch.float64, device=device)
    rows[:, 0] = decay
    rows[:, 1] = lr / (1 - rates.betas[0] ** steps)
    rows[:, 2] = (1 - rates.betas[1] ** steps).sqrt()
    return rows.float()
