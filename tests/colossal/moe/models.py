"""Tiny mixtures of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, MixtralConfig, MixtralForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP, DeepseekV3MoE

from tests.colossal.models import VOCABULARY

EXPERTS = 4


def tiny_mixtral(**options: Any) -> MixtralForCausalLM:
    """A Mixtral of 2 layers, hidden 64, with 4 experts of which a token has 2; the same at every call."""
    torch.manual_seed(0)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_local_experts": EXPERTS,
    }
    return MixtralForCausalLM(MixtralConfig(**sizes | options))


def mixtral_block(layer: nn.Module) -> nn.Module:
    """The mixture of a decoder layer, which transformers 4.51 and 5 name differently."""
    return getattr(layer, "block_sparse_moe", None) or layer.mlp


def deepseek_v3_block() -> DeepseekV3MoE:
    """DeepSeek-V3's block: 4 experts of which a token has 2, and one that all share."""
    torch.manual_seed(0)
    block = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=64,
            moe_intermediate_size=96,
            n_routed_experts=EXPERTS,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=1,
            topk_group=1,
        )
    )
    nn.init.normal_(block.gate.weight)
    return block


class DeepseekMoE(nn.Module):
    """As DeepSeekMoE's own code has it, which transformers does not hold."""

    class Gate(nn.Module):
        """Chooses two experts, with a loss that balances them."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(EXPERTS, 64))

        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            scores = nn.functional.linear(hidden_states.reshape(-1, 64), self.weight).softmax(-1)
            weights, chosen = scores.topk(2, -1)
            return chosen, weights, 0.1 * scores.mean(0).square().sum()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.config = DeepseekV3Config(
            hidden_size=64, intermediate_size=96, n_routed_experts=EXPERTS, n_shared_experts=1
        )
        self.num_experts_per_tok = 2
        self.experts = nn.ModuleList(DeepseekV3MLP(self.config) for _ in range(EXPERTS))
        self.shared_experts = DeepseekV3MLP(self.config)
        self.gate = self.Gate()

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S, H] to [B, S, H], and the balancing loss added to the graph."""
        chosen, weights, loss = self.gate(hidden_states)
        tokens = hidden_states.reshape(-1, 64)
        each = torch.stack([expert(tokens) for expert in self.experts], 1)
        mixed = (each.gather(1, chosen.unsqueeze(-1).expand(-1, -1, 64)) * weights.unsqueeze(-1)).sum(1)
        self.loss = loss
        return mixed.view(hidden_states.shape) + self.shared_experts(hidden_states)
