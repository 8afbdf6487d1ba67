"""Policies by which shardformer shards a Qwen3: those of Qwen2, and what norms of each head's q and k need.

A norm of heads has one weight for all of them. Where ranks have parts of the heads, each finds a part of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import ColoAttention
from colossalai.shardformer.layer._operation import all_to_all_comm
from colossalai.shardformer.layer.utils import is_share_sp_tp
from colossalai.shardformer.policies.base_policy import ModulePolicyDescription
from colossalai.shardformer.policies.qwen2 import Qwen2ForCausalLMPolicy, Qwen2ForSequenceClassificationPolicy
from colossalai.shardformer.shard import ShardConfig
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from fp8booster.colossal.temporarily import temporarily

_ATTENTION = "Qwen3Attention"


class _Qwen3Policy:
    """Mixin before a policy of Qwen2's."""

    shard_config: ShardConfig
    model: nn.Module

    def module_policy(self) -> dict[str, ModulePolicyDescription]:
        """Return Qwen2's policy by Qwen3's names."""
        # keys are classes or names of classes, and a class of Qwen2's matches no module of a Qwen3
        named = {getattr(key, "__name__", key): description for key, description in super().module_policy().items()}
        policy = {name.replace("Qwen2", "Qwen3"): description for name, description in named.items()}
        attention = policy.get(_ATTENTION)
        if attention is not None and attention.method_replacement:
            attention.method_replacement["forward"] = get_qwen3_flash_attention_forward(self.shard_config)
        return policy

    def postprocess(self) -> nn.Module:
        """Add up the gradients of head norms over the ranks that have parts of the heads."""
        model, config = super().postprocess(), self.shard_config
        if config.enable_tensor_parallelism and config.tensor_parallel_size > 1:
            for module in model.modules():
                norms = (module.q_norm, module.k_norm) if type(module).__name__ == _ATTENTION else ()
                for norm in norms:
                    if norm.weight is None:  # another stage has it
                        continue
                    # a frozen weight takes no hook, and may be trained later
                    with temporarily(norm.weight, requires_grad=True):
                        norm.weight.register_hook(partial(_add_up, config.tensor_parallel_process_group))
        return model


class Qwen3ForCausalLMPolicy(_Qwen3Policy, Qwen2ForCausalLMPolicy):
    """For a Qwen3 that predicts the next token."""


class Qwen3ForSequenceClassificationPolicy(_Qwen3Policy, Qwen2ForSequenceClassificationPolicy):
    """For a Qwen3 that classifies sequences."""


POLICIES = {
    "Qwen3ForCausalLM": Qwen3ForCausalLMPolicy,
    "Qwen3ForSequenceClassification": Qwen3ForSequenceClassificationPolicy,
}
"""By the name of a model's class."""


def _add_up(group: dist.ProcessGroup, gradient: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks, made in FP32."""
    # a sum in 16 bits would be rounded at each rank
    total = gradient.float()
    if total is gradient:  # others may read it
        total = total.clone()
    dist.all_reduce(total, group=group)
    return total.to(gradient.dtype)


def get_qwen3_flash_attention_forward(config: ShardConfig) -> Callable:
    """Return the forward of an attention with flash attention or along a sequence.

    Args:
        config: by which the model is sharded.
    """
    mode, group = config.sequence_parallelism_mode, config.sequence_parallel_process_group
    exchanges = config.enable_sequence_parallelism and not is_share_sp_tp(mode)

    def exchange(tensor: torch.Tensor, scatter: int, gather: int) -> torch.Tensor:
        if not exchanges:
            return tensor
        fp8 = config.fp8_communication
        return all_to_all_comm(tensor, group, scatter_dim=scatter, gather_dim=gather, fp8_communication=fp8)

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        attention_mask: dict[str, Any],
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        """[B, S', H] of this rank's tokens to as much."""
        q, k, v = (
            exchange(project(hidden_states), 2, 1).unflatten(-1, (-1, self.head_dim))
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k, v = (heads.transpose(1, 2) for heads in (self.q_norm(q), self.k_norm(k), v))
        q, k = apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = (each.repeat_interleave(self.num_key_value_groups, 1) for each in (k, v))
        attended = ColoAttention.attention(q, k, v, **attention_mask)
        return self.o_proj(exchange(attended.transpose(1, 2).flatten(2), 1, 2)), None

    return forward
