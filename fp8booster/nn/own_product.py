"""What a product gave, to be written over."""

from __future__ import annotations

import torch


def own_product(product: torch.Tensor) -> torch.Tensor:
    """A product that was just computed, or a copy of it where someone else may hold it.

    Selective checkpointing keeps what operators gave for its recomputation, by a dispatch mode, and does not see all
    that is written over it.
    """
    held = not torch.compiler.is_compiling() and torch._C._len_torch_dispatch_stack() > 0
    return product.clone() if held else product
