"""Colossal-AI's expert-parallel blocks, whose tokens are sent in FP8 and whose experts see all their tokens at once.

Colossal-AI sends tokens in FP8 between nodes only, their gradients never, those of DeepSeek-V3 never either way; runs
an expert once for each rank that sent it tokens; gives an expert without tokens no gradient, where other ranks have
one; and averages the gradient of an expert over the ranks that have tokens for it alone, which is more than that of the
mean loss (shardformer/modeling/{mixtral,deepseek,deepseek_v3}.py).

Blocks of other families have no class here (`moe/policy.py`).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.shardformer.modeling.deepseek import AddAuxiliaryLoss, EPDeepseekMoE
from colossalai.shardformer.modeling.deepseek_v3 import EpDeepseekV3MoE
from colossalai.shardformer.modeling.mixtral import EPMixtralSparseMoeBlock
from torch import nn

from fp8booster.comm import Encoding
from fp8booster.nn.convert import WHY_NOT_ROUTERS, remember_kept
from fp8booster.nn.experts.mixture import Mixture, group_experts
from fp8booster.nn.experts.spread import Spread
from fp8booster.nn.modules import change_class, held_by_modules
from fp8booster.nn.weights.delivered import as_rows


class FP8EPMixtralSparseMoeBlock(Mixture, EPMixtralSparseMoeBlock):
    """Mixtral's block."""

    returns_logits = True
    """Off in transformers 5 (`moe/mixtral.py`)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, S, H] to ([B, S, H], router's logits [B S, experts]), or to the first alone."""
        if self.training and self.jitter_noise > 0:
            hidden_states = hidden_states * self._noise(hidden_states)
        tokens = as_rows(hidden_states)
        logits = self.gate(tokens)
        # the softmax over all experts, divided by its sum over those chosen, is the softmax over these
        likeliest, chosen = logits.topk(self.top_k, dim=-1)
        weights = F.softmax(likeliest, dim=-1, dtype=torch.float).to(tokens.dtype)
        mixed = self.mix(tokens, chosen, weights).view(hidden_states.shape)
        return (mixed, logits) if self.returns_logits else mixed

    def _noise(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Draw what tokens are multiplied by, as transformers does and Colossal-AI leaves out."""
        noise = torch.empty_like(hidden_states).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
        if self.tp_group.size() > 1:  # whose ranks hold parts of each expert, of the same tokens
            dist.broadcast(noise, dist.get_global_rank(self.tp_group, 0), self.tp_group)
        return noise


class _WithSharedExperts(Mixture):
    """DeepSeek's blocks, with experts that all tokens share."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S, H] to [B, S, H]."""
        chosen, weights, *losses = self.gate(hidden_states)
        tokens = as_rows(hidden_states)
        shared = partial(self.shared_experts, tokens) if self.config.n_shared_experts is not None else None
        mixed = self.mix(tokens, chosen, weights, shared).view(hidden_states.shape)
        for auxiliary_loss in losses:  # DeepSeek-V3 has none
            if auxiliary_loss is not None:
                mixed = AddAuxiliaryLoss.apply(mixed, auxiliary_loss)
        return mixed


class FP8EPDeepseekMoE(_WithSharedExperts, EPDeepseekMoE):
    """DeepSeekMoE's block."""


class FP8EPDeepseekV3MoE(_WithSharedExperts, EpDeepseekV3MoE):
    """DeepSeek-V3's block."""


BLOCKS: dict[type[nn.Module], type[Any]] = {
    EPMixtralSparseMoeBlock: FP8EPMixtralSparseMoeBlock,
    EPDeepseekMoE: FP8EPDeepseekMoE,
    EpDeepseekV3MoE: FP8EPDeepseekV3MoE,
}


def convert_blocks(model: nn.Module, *, encoding: Encoding | None) -> int:
    """Let a model's expert-parallel blocks send as asked, in place, and turn Colossal-AI's into those of this file.

    Args:
        model: sharded, and converted to FP8 where it is to be.
        encoding: of tokens and their gradients; None sends them as they are.

    Returns:
        The number of blocks.
    """
    for block in [module for module in model.modules() if type(module) in BLOCKS]:
        change_class(block, BLOCKS[type(block)])
        block.fp8_spread = Spread(block.num_experts, block.ep_group)
        if not isinstance(block.gate, nn.Linear):  # DeepSeek's: a module with a product of its own
            remember_kept(block.gate, WHY_NOT_ROUTERS)
    for block in model.modules():
        if isinstance(block, Mixture):
            group_experts(block)
    spreads = held_by_modules(model, Spread)
    for spread in spreads:
        spread.encoding = encoding
    return len(spreads)
