"""The copies of FP8 weights that are kept from step to step where `FP8Config` leaves it open.

A copy costs memory and saves time: the transpose a pass over the FP8 weight in each backward, the 16-bit copy nothing
but what reads parameters by themselves. So a model's copies are dropped where they would fill a good part of the GPU,
and kept where they hardly count.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from fp8booster.config import FP8Config

LARGEST_SHARE = 1 / 32
"""Of the GPU's memory, for one kind of copies. Transposes of 2.6 billion parameters reach it on 80 GiB."""


def without_large_transposes(config: FP8Config, model: nn.Module) -> FP8Config:
    """Return the configuration without transposes, where they would not fit and nothing else was asked for."""
    if config.weight_copies.transposes is not None or config.rowwise or fits(model, bytes_a_value=1):
        return config
    return replace(config, weight_copies=replace(config.weight_copies, transposes=False))


def fits(model: nn.Module, bytes_a_value: int) -> bool:
    """Tell whether copies of all parameters of a rank are small compared with its GPU's memory; without a GPU, yes."""
    memory = gpu_memory()
    values = sum(parameter.numel() for parameter in model.parameters() if not is_lazy(parameter))
    return memory is None or values * bytes_a_value <= LARGEST_SHARE * memory


def is_lazy(parameter: torch.Tensor | None) -> bool:
    """Tell whether a parameter, such as that of nn.LazyLinear, has no size before the first batch."""
    return isinstance(parameter, nn.parameter.UninitializedParameter)


def gpu_memory() -> int | None:
    """Return the bytes of memory of the current GPU; None without a GPU."""
    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
