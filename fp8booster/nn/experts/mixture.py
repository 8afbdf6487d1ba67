"""Mixtures whose experts are modules, as transformers 4 has them: grouped products in place of a loop over experts.

    logits = gate(tokens)
    weights, chosen = the largest of softmax(logits), divided by their sum or not
    y = sum over a token's experts of weight * expert(token)
    y + sigmoid(shared_expert_gate(token)) * shared_expert(token), in some

For a loop the host waits for the tokens of each expert, one expert after the other. What the forward of a class
computes is tried out, as for all that is fused (`nn.fused.trials`). The gate of DeepSeek-V3 chooses otherwise; its loop
is a method of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8booster.nn.experts.dispatch import run_experts
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.host_copy import HostCopy
from fp8booster.nn.experts.routing import Routes, count_rows, spread, weighted_sum
from fp8booster.nn.fused.trials import computes, numbers, on_numbers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import cached_by_class, change_class, mixed_class


class Mixture(nn.Module):
    """Mixin of a block with a list of experts."""

    tried: ClassVar[tuple[type[Any], Callable]]  # the class that the block was, and what it computed then
    fp8_grouped_experts: GroupedExperts

    def mix(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Args:
            tokens: [T, H].
            chosen: int64 [T, k].
            weights: [T, k].

        Returns:
            [T, H] of the tokens' dtype.
        """
        grouped = self.fp8_grouped_experts
        routes = Routes.of(chosen, len(grouped.experts))
        counts = HostCopy(count_rows(chosen, len(grouped.experts)).view(1, -1))
        made = run_experts(spread(tokens, routes), counts, grouped.experts, grouped=grouped)
        return weighted_sum(made, weights, routes).to(tokens.dtype)


class SoftmaxMixture(Mixture):
    """Mixin of a block that chooses the largest of a softmax over all experts, in its forward."""

    routing: ClassVar[Routing]

    gate: Callable[[Tensor], Tensor]
    top_k: int
    norm_topk_prob: bool
    shared_expert: Callable[[Tensor], Tensor]
    shared_expert_gate: Callable[[Tensor], Tensor]

    @classmethod
    def members_before(cls, original: type[nn.Module]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return {"tried": (original, original.forward), "routing": _routing(original, original.forward)}

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return [B, S, H] of [B, S, H], and the router's logits, [B S, experts]."""
        original, forward = self.tried
        noisy = self.training and getattr(self, "jitter_noise", 0) > 0  # the block's own code draws it
        if noisy or original.forward is not forward or torch.compiler.is_compiling():
            return super().forward(hidden_states)
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        logits = self.gate(tokens)
        weights, chosen = F.softmax(logits, dim=1, dtype=torch.float).topk(self.top_k, dim=-1)
        if self.routing.always_divides or self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        mixed = self.mix(tokens, chosen, weights.to(tokens.dtype))
        if self.routing.shares:
            mixed = mixed + F.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)
        return mixed.view(hidden_states.shape), logits


class ChosenMixture(Mixture):
    """Mixin of a block whose method `moe` is given the experts of each token."""

    @classmethod
    def members_before(cls, original: type[Any]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return {"tried": (original, original.moe)}

    def moe(self, hidden_states: Tensor, topk_indices: Tensor, topk_weights: Tensor) -> Tensor:
        """Return [T, H] of tokens [T, H] with their experts and these' weights, [T, k]."""
        original, moe = self.tried
        if original.moe is not moe or torch.compiler.is_compiling():
            return original.moe(self, hidden_states, topk_indices, topk_weights)
        return self.mix(hidden_states, topk_indices, topk_weights)


class Routing(NamedTuple):
    """How a block weighs the experts that it chooses."""

    always_divides: bool
    """By the sum of a token's weights; else where `norm_topk_prob` says so."""

    shares: bool
    """It adds what a shared expert makes of all tokens."""


_EXPERTS, _CHOSEN, _FEATURES = 5, 2, 8


def _stand_ins() -> list[Callable[[Tensor], Tensor]]:
    """Return experts of different computations; torch's modules would be watched."""
    return [partial(lambda x, factor: factor * x.abs(), factor=float(number + 1)) for number in range(_EXPERTS)]


@cached_by_class
@on_numbers
def _routing(cls: type[nn.Module], forward: Callable) -> Routing | None:
    """Return how a class's blocks weigh their experts; None: they compute something else."""
    for routing in map(Routing._make, product((True, False), (False, True))):
        if all(_routes_so(cls, forward, routing, divides) for divides in (True, False)):
            return routing
    return None


def _routes_so(cls: type[nn.Module], forward: Callable, routing: Routing, divides: bool) -> bool:
    weight, of_shared = numbers(_EXPERTS, _FEATURES), numbers(1, _FEATURES)
    experts = _stand_ins()
    held: dict[str, Any] = {
        "gate": lambda x: x @ weight.t(),
        "experts": experts,
        "num_experts": _EXPERTS,
        "top_k": _CHOSEN,
        "norm_topk_prob": divides,
        "jitter_noise": 0.0,
        "training": True,
    }
    if routing.shares:
        held |= {"shared_expert": lambda x: 7 * x, "shared_expert_gate": lambda x: x @ of_shared.t()}
    x = numbers(3, 7, _FEATURES)
    tokens = x.flatten(0, 1)
    logits = tokens @ weight.t()
    weights, chosen = logits.softmax(1).topk(_CHOSEN)
    if routing.always_divides or divides:
        weights = weights / weights.sum(-1, keepdim=True)
    right = _mixed(experts, tokens, chosen, weights)
    if routing.shares:
        right = right + (tokens @ of_shared.t()).sigmoid() * 7 * tokens
    both = (right.view(x.shape), logits)
    return all(
        computes(cls, lambda self, x, number=number: _one_of_two(forward(self, x), number), held, each, x)
        for number, each in enumerate(both)
    )


def _one_of_two(found: Any, number: int) -> Any:
    return found[number] if isinstance(found, tuple) and len(found) == 2 else None


def _mixed(experts: list[Callable[[Tensor], Tensor]], tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    made = torch.stack([expert(tokens) for expert in experts], 1)  # [T, experts, H]
    own = made.gather(1, chosen.unsqueeze(2).expand(-1, -1, made.shape[2]))
    return (own * weights.unsqueeze(2)).sum(1)


@cached_by_class
@on_numbers
def _mixes_chosen(cls: type[nn.Module], moe: Callable | None) -> bool:
    """Tell whether a class's `moe` gives the weighted sum of the experts that it is told."""
    if not callable(moe):
        return False
    experts, tokens = _stand_ins(), numbers(21, _FEATURES)
    weights, chosen = numbers(21, _EXPERTS).topk(_CHOSEN)
    right = _mixed(experts, tokens, chosen, weights)
    return computes(cls, moe, {"experts": experts}, right, tokens, chosen, weights)


def _mixin_of(block: nn.Module) -> type[Mixture] | None:
    """Return the mixin for a block, by what its class computes; None: there is none."""
    cls: type[Any] = type(block)
    if "forward" not in vars(block) and _routing(cls, cls.forward) is not None:
        return SoftmaxMixture
    if "moe" not in vars(block) and _mixes_chosen(cls, getattr(cls, "moe", None)):
        return ChosenMixture
    return None


def group_mixtures(model: nn.Module) -> None:
    """Let blocks whose experts are modules with FP8 layers compute them in grouped products, in place.

    Args:
        model: converted before; blocks that compute something else than these mixins stay as they are.
    """
    for block in list(model.modules()):
        experts = block._modules.get("experts")
        if isinstance(block, Mixture) or not isinstance(experts, nn.ModuleList) or len(experts) < 2:
            continue
        if not all(any(isinstance(layer, FP8Layer) for layer in expert.modules()) for expert in experts):
            continue
        mixin = _mixin_of(block)
        if mixin is not None:
            change_class(block, mixed_class(mixin, type(block)))
            vars(block)["fp8_grouped_experts"] = GroupedExperts(list(experts))
