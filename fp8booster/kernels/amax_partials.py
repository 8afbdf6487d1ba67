"""How a kernel that makes a tensor delivers its amax: one float32 a program, the largest of which is the amax.

`kernels.cast.cast` takes them as its `amax`. A few hundred programs walk over the rows, so that a cast finds the
largest at no cost.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 1 for the CPU, where Triton's interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


def new_partials(programs: int, like: Tensor) -> Tensor:
    """Memory for the partial maxima of so many programs, float32 [programs]; each must store its own."""
    return torch.empty(programs, dtype=torch.float32, device=like.device)
