"""Parts that the steps of all Adams share: hyperparameters, one update for each device, the divisor of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from fp8booster.kernels.adamw import AdamRates

_DEVICE = attrgetter("device")


def rates_of(group: dict[str, Any], decoupled: bool) -> AdamRates:
    """Return the hyperparameters of a parameter group; `decoupled` where it does not say how weights decay."""
    decoupled = group.get("decoupled_weight_decay", decoupled)
    return AdamRates(group["lr"], group["betas"], group["eps"], group["weight_decay"], decoupled)


def divisor_on(device: torch.device, divisor: float | torch.Tensor | None) -> torch.Tensor | None:
    """Return a divisor of gradients as float32 [] on a device; None where there is none, or the number -1 stands."""
    if isinstance(divisor, torch.Tensor):
        return divisor.to(device)
    if divisor is None or divisor == -1:
        return None
    # filled there: for a copy of a number from the host it would wait for the device
    return torch.full((), divisor, dtype=torch.float32, device=device)


def update_by_device(
    update: Callable[..., torch.Tensor],
    group: dict[str, Any],
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
    divisor: float | torch.Tensor | None,
) -> list[torch.Tensor]:
    """Call `update`, as `AdamW.update_shards`, for the parameters of each device; return amaxes in their order."""
    devices = list(dict.fromkeys(map(_DEVICE, parameters)))
    if len(devices) == 1:
        return list(update(group, parameters, gradients, divisor_on(devices[0], divisor)).unbind())
    amaxes: dict[int, torch.Tensor] = {}
    # engines may have moved part of the masters to the host, and a kernel reads the memory of one device
    for device in devices:
        places = [place for place, parameter in enumerate(parameters) if parameter.device == device]
        here, of_here = [parameters[place] for place in places], [gradients[place] for place in places]
        found = update(group, here, of_here, divisor_on(device, divisor))
        amaxes.update(zip(places, found.unbind(), strict=True))
    return [amaxes[place] for place in range(len(parameters))]


def clipping_divisor(norm: torch.Tensor, loss_scale: float, max_norm: float) -> torch.Tensor:
    """Return the divisor that undoes the loss scale and clips gradients by their norm, as Colossal-AI does on the host.

    Upstream: zero/low_level/low_level_optim.py:710, zero/gemini/gemini_optimizer.py:260,
    amp/naive_amp/mixed_precision_optimizer.py:127.

    Args:
        norm: of all gradients, times the loss scale: [], on any device.
        loss_scale: by which the loss was multiplied.
        max_norm: the largest norm that is left as it is.

    Returns:
        [] of the norm's dtype and device. A norm that is NaN clips nothing: gradients keep their NaN where it is.
    """
    # on the device: a step need not wait until the host knows the norm
    # 1e-6 as in Colossal-AI, so that the same norm clips alike
    over = (norm / loss_scale + 1e-6) / max_norm
    # no clamp, which passes NaN on: every gradient would become NaN, and not only those that are
    return loss_scale * torch.where(over > 1, over, 1.0)
