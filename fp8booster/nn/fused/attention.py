"""The attention of a fused layer: PyTorch's SDPA, as transformers calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

_READ_BY_SDPA = ("is_causal", "position_bias", "cache", "softcap")
"""What transformers' `sdpa_attention_forward` reads of the arguments that a model passes on, and `attend` does not."""


def attends_alike(implementation: str, arguments: Mapping[str, Any]) -> bool:
    """Whether `attend` computes what transformers' attention of this name does with a layer's arguments."""
    return (
        implementation == "sdpa"
        and not arguments.get("output_attentions")
        and all(arguments.get(name) is None for name in _READ_BY_SDPA)
    )


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    dropout: float = 0.0,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention, causal where no mask says more.

    Args:
        query: [B, Hq, S, D].
        key, value: [B, Hkv, S', D], Hkv a divisor of Hq: queries share heads of keys and values in their order.
        mask: [B, 1, S, at least S'], as transformers makes it.
        dropout: of the scores.
        scale: of the scores; None is D**-0.5.

    Returns:
        [B, Hq, S, D].
    """
    groups = query.shape[1] // key.shape[1]
    if groups > 1 and mask is not None and not takes_mask_and_groups(query):
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
        groups = 1
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if mask is None else mask[..., : key.shape[2]],
        dropout_p=dropout,
        is_causal=mask is None and query.shape[2] > 1,
        scale=scale,
        enable_gqa=groups > 1,
    )


def takes_mask_and_groups(query: torch.Tensor) -> bool:
    """Whether SDPA has a kernel for a mask and heads that share keys, but the one that holds all scores in memory.

    cuDNN's is, which PyTorch prefers on Hopper and Blackwell. Flash attention takes no mask, the memory-efficient
    kernel no shared keys.
    """
    return not query.is_cuda or torch.cuda.get_device_capability(query.device)[0] in (9, 10)
