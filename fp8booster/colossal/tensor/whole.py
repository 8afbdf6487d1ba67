"""Parameters that shardformer has divided among tensor parallel ranks, made whole one by one."""

from __future__ import annotations

import torch
from colossalai.checkpoint_io.utils import gather_distributed_param
from colossalai.tensor.d_tensor import is_customized_distributed_tensor, is_distributed_tensor
from colossalai.tensor.padded_tensor import is_padded_tensor, to_unpadded_tensor


def is_divided(parameter: torch.Tensor) -> bool:
    """Tell whether ranks hold parts of a parameter, or it has padding that the model does not."""
    return any(each(parameter) for each in (is_distributed_tensor, is_customized_distributed_tensor, is_padded_tensor))


def gather(parameter: torch.Tensor) -> torch.Tensor:
    """Return a parameter whole, without padding; all ranks of its group call it."""
    whole = gather_distributed_param(parameter, keep_vars=False)
    return to_unpadded_tensor(whole) if is_padded_tensor(whole) else whole
