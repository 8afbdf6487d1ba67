"""Colossal-AI's expert-parallel blocks, whose tokens are sent in FP8 and whose experts see all their tokens at once.

Colossal-AI sends tokens in FP8 between nodes only, their gradients never, those of DeepSeek-V3 never either way; runs
an expert once for each rank that sent it tokens; and gives an expert without tokens no gradient, where other ranks have
one (shardformer/modeling/{mixtral,deepseek,deepseek_v3}.py).

The gradient of an expert's weights is Colossal-AI's: a mean over the ranks that hold it and were sent tokens for it.
"""

from __future__ import annotations

from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from colossalai.shardformer.modeling.deepseek import AddAuxiliaryLoss, EPDeepseekMoE
from colossalai.shardformer.modeling.deepseek_v3 import EpDeepseekV3MoE
from colossalai.shardformer.modeling.mixtral import EPMixtralSparseMoeBlock
from torch import nn

from fp8booster.comm import Encoding
from fp8booster.nn.convert import WHY_NOT_ROUTERS, remember_kept
from fp8booster.nn.experts.dispatch import exchange_rows, run_experts
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.routing import Routes, count_rows, spread, weighted_sum
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import change_class


class _Loads(NamedTuple):
    """Rows for the experts, on their way to the host."""

    numbers: HostCopy
    """Those from this rank for each expert of all ranks; those from each rank for each expert of this one; and, where
    several ranks hold these, those of all of them."""

    factors: torch.Tensor | None
    """What the gradients of each expert of this rank are multiplied by, where several ranks hold it."""


class ExpertParallel(nn.Module):
    """A mixin before one of Colossal-AI's blocks, of whose attributes it reads the groups and the experts."""

    encoding: Encoding | None
    """Encodes tokens and their gradients; None: they are sent as they are."""

    fp8_grouped_experts: GroupedExperts | None = None
    """This rank's experts, where they are computed by grouped products."""

    def mixture(self, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Args:
            tokens: [T, H].
            chosen: [T, k], experts of each token, counted over all ranks.
            weights: [T, k].

        Returns:
            [T, H] of the tokens' dtype.
        """
        loads = self._loads(chosen)
        # the host waits for the loads alone: this is queued behind them, and keeps the GPU busy when the host goes on
        routes = Routes.of(chosen, self.num_experts)
        rows = self._at_experts(spread(tokens, routes), loads)
        return weighted_sum(rows, weights, routes)

    def _loads(self, chosen: torch.Tensor) -> _Loads:
        """Begin to tell the ranks how many rows go from each of them to each expert."""
        experts, held = self.num_experts, self.num_experts_per_ep
        numbers = torch.empty(2, experts, dtype=torch.int64, device=chosen.device)
        counts, arriving = numbers
        count_rows(chosen, experts, out=counts)
        # counts go ahead of the tokens: a rank must know how many rows it receives before it makes room
        if self.ep_size > 1:
            dist.all_to_all_single(arriving, counts, group=self.ep_group)
        else:
            arriving.copy_(counts)
        if self.moe_dp_size == 1:
            return _Loads(HostCopy(numbers.view(-1)), None)
        factors, rows = self._over_holders(arriving.view(-1, held).sum(0))
        return _Loads(HostCopy(torch.cat([numbers.view(-1), rows])), factors)

    def _over_holders(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Agree with the ranks that hold the same experts.

        Args:
            tokens: int64 [experts of this rank], how many each has here.

        Returns:
            For each expert of this rank, what makes of the mean over ranks the mean over those where it had tokens (the
            rank that holds it has the tokens of `ep_size` ranks), float32; and the tokens of all ranks for all of them,
            int64 [1].
        """
        # one message for both: it is latency that counts
        agreed = torch.cat([(tokens > 0).to(tokens.dtype), tokens.sum().view(1)])
        dist.all_reduce(agreed, group=self.moe_dp_group)
        # an expert without tokens on any rank has a gradient of 0, which an infinite factor would make NaN
        active = agreed[:-1].clamp(min=1).float()
        return self.moe_dp_size / (active * self.ep_size), agreed[-1:]

    def _at_experts(self, rows: torch.Tensor, loads: _Loads) -> torch.Tensor:
        """Send rows, sorted by expert, to their experts, and what these make of them back.

        Args:
            rows: [T k, H].
            loads: what `_loads` gave.
        """
        experts, held, group = self.num_experts, self.num_experts_per_ep, self.ep_group
        by_receiver, by_sender = (loads.numbers.part(first, self.ep_size, held) for first in (0, experts))
        sent = received = [len(rows)]
        if self.ep_size > 1:
            # every rank waits for its GPU here, as all-to-all with uneven splits needs the sizes of its messages
            sent, received = ([sum(rank) for rank in each.tolist()] for each in (by_receiver, by_sender))
        factors, of_all = loads.factors, sum(received)
        if factors is None:
            # tokens of `ep_size` ranks add up here, and the gradient is to be a mean over these ranks
            factors = [1 / self.ep_size] * held
        else:
            of_all = loads.numbers.part(2 * experts, 1).tolist()[0]
        rows = exchange_rows(rows, sent, received, group, self.encoding)
        own = list(islice(self.experts, self.expert_start_idx, self.expert_start_idx + held))
        made = run_experts(rows, by_sender, own, factors, self.fp8_grouped_experts, of_all / self.moe_dp_size)
        return exchange_rows(made, received, sent, group, self.encoding)


class FP8EPMixtralSparseMoeBlock(ExpertParallel, EPMixtralSparseMoeBlock):
    """Mixtral's block."""

    returns_logits = True
    """Off in transformers 5 (`moe/mixtral.py`)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Tokens [B, S, H] to ([B, S, H], router's logits [B S, experts]), or to the first alone."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(tokens)
        # the softmax over all experts, divided by its sum over those chosen, is the softmax over these
        likeliest, chosen = logits.topk(self.top_k, dim=-1)
        weights = F.softmax(likeliest, dim=-1, dtype=torch.float).to(tokens.dtype)
        mixed = self.mixture(tokens, chosen, weights).view(hidden_states.shape)
        return (mixed, logits) if self.returns_logits else mixed


class _WithSharedExperts(ExpertParallel):
    """DeepSeek's blocks, with experts that all tokens share."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S, H] to [B, S, H]."""
        chosen, weights, *losses = self.gate(hidden_states)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        mixed = self.mixture(tokens, chosen, weights).view(hidden_states.shape)
        for auxiliary_loss in losses:  # DeepSeek-V3 has none
            if auxiliary_loss is not None:
                mixed = AddAuxiliaryLoss.apply(mixed, auxiliary_loss)
        if self.config.n_shared_experts is not None:
            mixed = mixed + self.shared_experts(hidden_states)
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
    """Turn a model's expert-parallel blocks into those of this file, in place.

    Args:
        model: sharded by Colossal-AI.
        encoding: of tokens and their gradients; None sends them as they are.

    Returns:
        The number of blocks.
    """
    blocks = [module for module in model.modules() if type(module) in (*BLOCKS, *BLOCKS.values())]
    for block in blocks:
        change_class(block, BLOCKS.get(type(block), type(block)))
        block.encoding = encoding
        _group_experts(block)
        if not isinstance(block.gate, nn.Linear):  # DeepSeek's: a module with a product of its own
            remember_kept(block.gate, WHY_NOT_ROUTERS)
    return len(blocks)


def _group_experts(block: ExpertParallel) -> None:
    """Let this rank's experts be computed by grouped products, where they have FP8 layers and are to be fused."""
    block.fp8_grouped_experts = None
    start = block.expert_start_idx
    own = list(block.experts[start : start + block.num_experts_per_ep])
    layers = [layer for expert in own for layer in expert.modules() if isinstance(layer, FP8Layer)]
    # another pipeline stage's are shells
    if layers and all(layer.held_weight is not None and layer.fp8_config.fused for layer in layers):
        block.fp8_grouped_experts = GroupedExperts(own)
