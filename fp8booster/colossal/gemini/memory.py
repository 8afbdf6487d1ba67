"""A tensor's memory, taken away and given back while the tensor object stays: what Gemini does with gathered chunks.

Colossal-AI's functions (zero/gemini/chunk/chunk.py:45) look at typed storage, which torch deprecates: each look formats
a warning's place anew, and a step takes some dozens of looks a layer.
"""

from __future__ import annotations

import torch


def take_memory(tensor: torch.Tensor) -> None:
    """Free a tensor's values."""
    storage = tensor.untyped_storage()
    if storage.size():
        storage.resize_(0)


def give_memory(tensor: torch.Tensor) -> None:
    """Give a tensor that has the whole of its storage memory for its values again, unless it has it."""
    storage = tensor.untyped_storage()
    if not storage.size():
        storage.resize_(tensor.nbytes)
