"""What gradients are divided by, found on the device: no step waits for the norm."""

from __future__ import annotations

import torch


def clipping_divisor(norm: torch.Tensor, loss_scale: float, max_norm: float) -> torch.Tensor:
    """What undoes the loss scale and clips gradients by their norm, as Colossal-AI does it on the host.

    Upstream: zero/low_level/low_level_optim.py:710, zero/gemini/gemini_optimizer.py:260,
    amp/naive_amp/mixed_precision_optimizer.py:127.

    Args:
        norm: of all gradients, times the loss scale: [], on any device.
        loss_scale: what the loss was multiplied by.
        max_norm: the largest norm that is left as it is.

    Returns:
        [] of the norm's dtype and device. A norm that is NaN clips nothing: gradients keep their NaN where it is.
    """
    over = (norm / loss_scale + 1e-6) / max_norm
    return loss_scale * torch.where(over > 1, over, 1.0)
