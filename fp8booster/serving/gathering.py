"""Parameters of which each rank holds a part, made whole one by one: under FSDP2, and Colossal-AI's tensor parallelism.

All ranks gather the same parameters in the same order.
"""

from __future__ import annotations

import sys
from typing import Any, cast

import torch
from torch import nn


def is_sharded(tensor: torch.Tensor) -> bool:
    """Tell whether this rank holds a part of a parameter."""
    # by the method of a DTensor: a program that shards nothing need not import the class
    return hasattr(tensor, "full_tensor") or is_colossal(tensor)


def is_colossal(tensor: torch.Tensor) -> bool:
    """Tell whether Colossal-AI has divided a parameter among ranks, or padded it for that."""
    # without the module nobody has, and to import it takes seconds
    if "colossalai.tensor.d_tensor" not in sys.modules:
        return False
    from fp8booster.colossal.tensor.whole import is_divided

    return is_divided(tensor)


def gathered(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a parameter whole; all ranks call it.

    Args:
        tensor: for which `is_sharded`.
        dtype: in which FSDP2 gathers it for the layers; None: its own.
    """
    if is_colossal(tensor):
        from fp8booster.colossal.tensor.whole import gather

        return gather(tensor)
    # as in training: rounded first, by which half of the bytes are sent
    sharded: Any = tensor.detach().to(tensor.dtype if dtype is None else dtype)
    return sharded.full_tensor()


def gathered_dtypes(model: nn.Module) -> dict[int, torch.dtype]:
    """Return the type in which FSDP2 gathers a parameter for the layers, by its identity.

    Left out are those that it gathers in their own type, or in FP8: these bytes are cast from the shards as they are.
    """
    found = {}
    for module in model.modules():
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = cast(Any, module)._get_fsdp_state()
        # one group, or several, by the version of torch
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for param in (each for group in filter(None, groups) for each in group.fsdp_params):
            sharded, dtype = param.sharded_param, param.mp_policy.param_dtype  # known before the first forward too
            if dtype not in (None, sharded.dtype) and sharded.is_floating_point() and not hasattr(param, "fp8_unit"):
                found[id(sharded)] = dtype
    return found
