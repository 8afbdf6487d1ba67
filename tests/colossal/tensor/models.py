"""Tiny models, sharded by shardformer as HybridParallelPlugin shards them, without the plugin."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.colossal.models import VOCABULARY

SHARES_THE_GROUP = ("split_gather", "ring")
"""Modes of sequence parallelism among the ranks of tensor parallelism; the others have ranks of their own."""


def tiny_gpt2(**options: Any) -> nn.Module:
    """A GPT-2 of 2 layers, hidden 64, without dropout, in FP32."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4}
    dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return GPT2LMHeadModel(GPT2Config(**sizes | dropout | options))


@functools.cache
def alone() -> dist.ProcessGroup:
    """The group of this rank only; all ranks call it."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


def shard(model: nn.Module, mode: str | None = None, **options: Any) -> nn.Module:
    """Shard a model over all ranks: by tensors, and by sequence in the modes that share their group; else by sequence.

    Args:
        model: of transformers.
        mode: of sequence parallelism.
        options: of shardformer's ShardConfig.
    """
    from colossalai.cluster import ProcessGroupMesh
    from colossalai.shardformer import ShardConfig, ShardFormer

    mesh = ProcessGroupMesh(1, 1, dist.get_world_size())
    world = mesh.get_group_along_axis(2)
    by_tensors = mode is None or mode in SHARES_THE_GROUP
    config = ShardConfig(
        tensor_parallel_process_group=world if by_tensors else alone(),
        enable_tensor_parallelism=by_tensors,
        sequence_parallel_process_group=alone() if mode is None else world,
        enable_sequence_parallelism=mode is not None,
        sequence_parallelism_mode=mode,
        sp_axis=2,
        pg_mesh=mesh,
        inner_ring_size=None,
        **{"enable_flash_attention": mode == "ring_attn"} | options,
    )
    return ShardFormer(config).optimize(model)[0]
