"""What one step of Adam is given: hyperparameters, the tensors that it updates, and the factors made of both."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST_NORMAL = 2.0**-126
"""Of float32."""


class AdamRates(NamedTuple):
    """Hyperparameters of a step, as in `torch.optim.Adam`."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    decoupled: bool
    """Decay the values themselves (AdamW), not by way of the gradient (Adam with L2)."""

    def denominator_eps(self) -> float:
        """`eps`, or the smallest normal float32 in the place of 0.

        It changes no sum with a root of a second moment, which is at least 3.7e-23 or 0. But 0 / 0 would make NaN of
        what never had a gradient, as the padding of a shard.
        """
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
    """float32 [], on the device or on the host: how many steps this one makes."""

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


def factors(shards: AdamShards, rates: AdamRates) -> Tensor:
    """What Adam's arithmetic takes of a step beside the betas: float32 [shards, 4] on the shards' device.

    A row holds the factor of weight decay, the step size lr / (1 - beta1^t), the root of 1 - beta2^t, and a zero, where
    the amax comes; 16 bytes, so that each begins at a multiple of 16.
    """
    device = shards.values[0].device
    steps = torch.stack(tuple(shards.steps)).to(device, torch.float64, non_blocking=True)
    lr = rates.lr.to(steps) if isinstance(rates.lr, Tensor) else rates.lr
    decay = lr * rates.weight_decay if rates.decoupled else rates.weight_decay
    rows = torch.zeros(len(steps), 4, dtype=torch.float64, device=device)
    rows[:, 0] = decay
    rows[:, 1] = lr / (1 - rates.betas[0] ** steps)
    rows[:, 2] = (1 - rates.betas[1] ** steps).sqrt()
    return rows.float()
