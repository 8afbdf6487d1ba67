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


def tiny_command(**options: Any) -> nn.Module:
    """A Command-R of 2 layers, hidden 64, in FP32."""
    from transformers import CohereConfig, CohereForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return CohereForCausalLM(CohereConfig(**sizes | heads | tokens | options))


@functools.cache
def alone() -> dist.ProcessGroup:
    """The group of this rank only; all ranks call it."""
    return [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]


@functools.cache
def mesh(compressed: bool = False) -> Any:
    """The mesh that models are spread over, with groups of its own; all ranks call it.

    Args:
        compressed: its groups were given to `compress_groups`.
    """
    from colossalai.cluster import ProcessGroupMesh

    from fp8booster.colossal.tensor import compress_groups

    made = ProcessGroupMesh(1, 1, dist.get_world_size())
    if compressed:
        compress_groups(made.get_group_along_axis(AXIS))
    return made


AXIS = 2
"""Of the mesh."""


def shard(model: nn.Module, mode: str | None = None, *, compressed: bool = False, **options: Any) -> nn.Module:
    """Shard a model over all ranks: by tensors, and by sequence in the modes that share their group; else by sequence.

    Args:
        model: of transformers.
        mode: of sequence parallelism.
        compressed: over groups that were given to `compress_groups`.
        options: of shardformer's ShardConfig.
    """
    from colossalai.shardformer import ShardFormer

    return ShardFormer(sharding(mode, compressed=compressed, **options)).optimize(model)[0]


def sharding(mode: str | None = None, *, compressed: bool = False, **options: Any) -> Any:
    """The ShardConfig of `shard`."""
    from colossalai.shardformer import ShardConfig

    group = mesh(compressed).get_group_along_axis(AXIS)
    by_tensors = mode is None or mode in SHARES_THE_GROUP
    return ShardConfig(
        tensor_parallel_process_group=group if by_tensors else alone(),
        enable_tensor_parallelism=by_tensors,
        sequence_parallel_process_group=alone() if mode is None else group,
        enable_sequence_parallelism=mode is not None,
        sequence_parallelism_mode=mode,
        sp_axis=AXIS,
        pg_mesh=mesh(compressed),
        **{"enable_flash_attention": mode == "ring_attn"} | options,
    )
