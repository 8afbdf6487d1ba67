"""Colossal-AI's RingAttention on `nn.parallel.ring_attention`: without the flash-attn package, and in FP8."""

from __future__ import annotations

from typing import Any

import torch
from colossalai.shardformer.layer.attn import AttnMaskType, RingAttention

from fp8booster.colossal.compressed_groups import is_compressed
from fp8booster.nn.parallel.ring_attention import ring_attention


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sp_axis: int,
    attention_mask_type: AttnMaskType,
    cu_seqlens: torch.Tensor | None = None,
    max_seqlen: int | None = None,
    valid_indices: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    deterministic: bool = False,
    return_softmax: bool = False,
    inner_ring_size: int | None = None,
    pg_mesh: Any = None,
    **_: Any,
) -> Any:
    """`RingAttention.attention` (shardformer/layer/attn.py:496); keys and values are sent in FP8 in compressed groups.

    `inner_ring_size`, which lets Colossal-AI go round in two rings, changes what is sent when and not the result: there
    is one ring here. `max_seqlen` and `deterministic` serve Colossal-AI's kernels.

    Args:
        q: [B, H, S, D], padded at the end of each sequence.
        k, v: [B, Hkv, S, D] likewise, with the heads of q, as in Colossal-AI, or a divisor of them, which sends less.
        cu_seqlens: [B + 1], where this rank's sequences begin and end, with PADDED_CAUSAL.
        valid_indices: [tokens], which of this rank's tokens are not padding, with PADDED_CAUSAL.
        return_softmax: return the log-sum-exp of the scores too, [B * S, H].

    Raises:
        ValueError: another mask, or dropout.
    """
    if attention_mask_type not in RingAttention.SUPPORTED_MASK_TYPES:
        raise ValueError(f"ring attention is causal; {attention_mask_type} is not there for it")
    if dropout_p:
        raise ValueError(f"ring attention has no dropout; set attention_dropout={dropout_p} to 0")
    group = pg_mesh.get_group_along_axis(sp_axis)
    lengths = None
    # a number of tokens is known without waiting for the GPU, their lengths are not
    if attention_mask_type == AttnMaskType.PADDED_CAUSAL and valid_indices.numel() < q.shape[0] * q.shape[2]:
        lengths = cu_seqlens.diff().tolist()
    output, lse = ring_attention(
        q, k, v, group, lengths=lengths, scale=softmax_scale, communication=is_compressed(group)
    )
    return (output, lse.transpose(1, 2).flatten(0, 1)) if return_softmax else output
