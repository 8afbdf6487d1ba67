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

import math
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fp8booster.nn.experts.gated import readers_in_fp8
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.experts.loads import note_choice
from fp8booster.nn.experts.one_by_one import run_experts
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.experts.spread import EXCHANGED, Run, Spread, sent_over, spread_of
from fp8booster.nn.fused.trials import computes, numbers, on_numbers
from fp8booster.nn.graphs.breaks import call_eagerly, run_eagerly
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import cached_by_class, change_class, class_without, mixed_class
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import as_rows

LOOKED_AT = "experts that are modules are looked at in every call"
"""The reason why CUDA graphs break at those of one rank: each call finds whether they run as one, by which weights."""


class Mixture(nn.Module):
    """Mixin of a block with a list of experts."""

    tried: ClassVar[tuple[type[Any], Callable]]  # the class that the block was, and what it computed then

    fp8_grouped_experts: GroupedExperts | None
    """The experts of this rank, where grouped products compute them; None: they run one by one."""

    fp8_reads_fp8 = False
    """Each of this rank's experts read its tokens in FP8 alone when they were last looked at."""

    fp8_spread: Spread | None = None
    """The ranks over which the experts are spread; None: this one holds all of them."""

    breaks_itself = True
    """Its code runs the experts between CUDA graphs, and all else may be in these."""

    @property
    def why_eager(self) -> str:
        """The reason why no graph can hold the experts."""
        return LOOKED_AT if sent_over(self) is None else EXCHANGED

    def mix(
        self, tokens: Tensor, chosen: Tensor, weights: Tensor, beside: Callable[[], Tensor] | None = None
    ) -> Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Args:
            tokens: [T, H].
            chosen: int64 [T, k].
            weights: [T, k].
            beside: gives what is added, [T, H], as shared experts do; None: nothing.

        Returns:
            [T, H] of the tokens' dtype.
        """
        over, compiling = sent_over(self), torch.compiler.is_compiling()
        if over is not None and not compiling:
            return over.mix(tokens, chosen, weights, self, beside)
        mix = self._mixed_here if over is None else partial(over.mix, experts=self)
        if compiling:  # the host may read how many rows an expert or a rank gets
            mix = torch.compiler.disable(mix)
        mixed = run_eagerly(mix, tokens, chosen, weights)
        return mixed if beside is None else mixed + beside()

    def _mixed_here(self, tokens: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute `mix` where this rank holds all experts."""
        self.note_choice(chosen)
        grouped = self._experts_now()
        routed = Routed(tokens, chosen, weights)
        mixed = None if grouped is None else grouped.mix(routed)
        return (run_experts(routed, own_experts(self)) if mixed is None else mixed).to(tokens.dtype)

    def note_choice(self, chosen: Tensor) -> None:
        """Remember the choice of this rank's tokens (`spread.HeldExperts`)."""
        note_choice(self, chosen, len(cast(nn.ModuleList, self._modules["experts"])))

    def input_casts(self, tokens: Tensor) -> Casts | None:
        """Return what casts the inputs of gates and ups (`spread.HeldExperts`)."""
        # one for all: an adapter, for one, is put around the layers of each
        readers = readers_in_fp8(own_experts(self)[0]) if self.fp8_reads_fp8 else []
        if not readers:
            return None
        grouped = self._experts_now()
        if grouped is not None and self.training:
            return grouped.input_casts(readers[0].fp8_config)
        casts = readers[0].fp8_casts
        # one by one an expert's own layers cast too, and are observed: nobody observes this cast
        return casts if self.training and casts.state is not None else casts.evaluation

    def are_trained(self) -> bool:
        """Tell whether a parameter of this rank's experts needs a gradient (`spread.HeldExperts`)."""
        return any(each.requires_grad for expert in own_experts(self) for each in expert.parameters())

    def prepare(self, tokens: Tensor, rows: int) -> Run:
        """Look at the experts, and return what computes them (`spread.HeldExperts`)."""
        own, grouped = own_experts(self), self._experts_now()
        as_one = None if grouped is None else grouped.prepared(tokens, rows)

        def run(routed: Routed, factor: float) -> Tensor:
            mixed = None if as_one is None else as_one(routed, factor)
            return run_experts(routed, own, factor) if mixed is None else mixed

        return run

    def _runs_own_code(self, called_so: bool, is_as_tried: bool, draws_noise: bool = False) -> bool:
        """Tell whether the block's own code must run, where what was tried does not stand for it.

        Raises:
            ValueError: it must, and knows nothing of experts on other ranks.
        """
        reason = "the block draws noise" if draws_noise else None
        if not is_as_tried:
            reason = "the code of the block's class was replaced"
        if not called_so:
            reason = "the block is called otherwise than its class was tried"
        if sent_over(self) is not None and reason is not None:
            raise ValueError(
                f"the experts of {type(self).__name__} are spread over ranks, of which its own code knows nothing, and "
                f"{reason}; use ep_size=1"
            )
        if reason is not None and self.fp8_grouped_experts is not None:
            self.fp8_grouped_experts.note(reason)
        return reason is not None or (sent_over(self) is None and torch.compiler.is_compiling())

    def _experts_now(self) -> GroupedExperts | None:
        """Return the experts that the block holds, of which some may have been replaced or wrapped since."""
        own, grouped = own_experts(self), self.fp8_grouped_experts
        if grouped is not None and tuple(own) != grouped.experts:
            grouped = self.fp8_grouped_experts = grouped.of_others(own)
        return grouped


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

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Return [B, S, H] of [B, S, H], and the router's logits, [B S, experts]."""
        original, forward = self.tried
        tried_so = (len(args) == 1 and not kwargs) or (not args and kwargs.keys() == {"hidden_states"})
        draws_noise = self.training and getattr(self, "jitter_noise", 0) > 0
        if self._runs_own_code(tried_so, original.forward is forward, draws_noise):
            return call_eagerly(super().forward, args, kwargs)
        hidden_states = args[0] if args else kwargs["hidden_states"]
        tokens = as_rows(hidden_states)
        logits = self.gate(tokens)
        weights, chosen = F.softmax(logits, dim=1, dtype=torch.float).topk(self.top_k, dim=-1)
        if self.routing.always_divides or self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        shared = partial(self._shared, tokens) if self.routing.shares else None
        mixed = self.mix(tokens, chosen, weights.to(tokens.dtype), shared)
        return mixed.view(hidden_states.shape), logits

    def _shared(self, tokens: Tensor) -> Tensor:
        """Return what the shared expert makes of tokens."""
        return F.sigmoid(self.shared_expert_gate(tokens)) * self.shared_expert(tokens)


class ChosenMixture(Mixture):
    """Mixin of a block whose method `moe` is given the experts of each token."""

    @classmethod
    def members_before(cls, original: type[Any]) -> dict[str, Any]:
        """As `mixed_class` asks."""
        return {"tried": (original, original.moe)}

    def moe(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return [T, H] of tokens [T, H] with their experts and these' weights, [T, k]."""
        original, moe = self.tried
        if self._runs_own_code(len(args) == 3 and not kwargs, original.moe is moe):
            return call_eagerly(partial(original.moe, self), args, kwargs)
        return self.mix(*args)


class Routing(NamedTuple):
    """The weights of the experts that a block chooses."""

    always_divides: bool
    """The weights of a token are divided by their sum; else only where `norm_topk_prob` is true."""

    shares: bool
    """It adds what a shared expert makes of all tokens."""


_EXPERTS, _FEATURES = 5, 8

_TRIALS = tuple(product((1, 2, _EXPERTS), (1.0, 1e-3, 300.0)))
"""How many experts a token has, all of them where each expert gets all tokens; how large numbers are."""

_TOKENS = (2, 35)


def _stand_ins() -> list[Callable[[Tensor], Tensor]]:
    """Return experts of different computations; torch's modules would be watched."""
    return [partial(lambda x, factor: factor * x.abs(), factor=float(number + 1)) for number in range(_EXPERTS)]


@cached_by_class
@on_numbers
def _routing(cls: type[nn.Module], forward: Callable) -> Routing | None:
    """Return how a class's blocks weigh their experts; None: they compute something else."""
    for routing in map(Routing._make, product((True, False), (False, True))):
        if all(_routes_so(cls, forward, routing, *each) for each in product((True, False), (True, False), _TRIALS)):
            return routing
    return None


def _routes_so(
    cls: type[nn.Module], forward: Callable, routing: Routing, divides: bool, training: bool, trial: tuple[int, float]
) -> bool:
    top_k, size = trial
    weight, of_shared = numbers(_EXPERTS, _FEATURES), numbers(1, _FEATURES)
    experts = _stand_ins()
    held: dict[str, Any] = {
        "gate": lambda x: x @ weight.t(),
        "experts": experts,
        "num_experts": _EXPERTS,
        "top_k": top_k,
        "norm_topk_prob": divides,
        "jitter_noise": 0.0,
        "training": training,
    }
    if routing.shares:
        held |= {"shared_expert": lambda x: 7 * x, "shared_expert_gate": lambda x: x @ of_shared.t()}
    x = size * numbers(*_TOKENS, _FEATURES)
    tokens = x.flatten(0, 1)
    logits = tokens @ weight.t()
    weights, chosen = logits.softmax(1).topk(top_k)
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
    experts, count = _stand_ins(), math.prod(_TOKENS)
    for top_k, size in _TRIALS:
        tokens = size * numbers(count, _FEATURES)
        weights, chosen = numbers(count, _EXPERTS).topk(top_k)
        right = _mixed(experts, tokens, chosen, weights)
        if not computes(cls, moe, {"experts": experts}, right, tokens, chosen, weights):
            return False
    return True


def mixin_of(block: nn.Module) -> type[Mixture] | None:
    """Return the mixin for a block, by what its class computes; None: there is none."""
    cls: type[Any] = type(block)
    if "forward" not in vars(block) and _routing(cls, cls.forward) is not None:
        return SoftmaxMixture
    if "moe" not in vars(block) and _mixes_chosen(cls, getattr(cls, "moe", None)):
        return ChosenMixture
    return None


def own_experts(block: nn.Module) -> list[nn.Module]:
    """Return the experts of a block with a list of them that are this rank's: all, unless they are spread."""
    held, spread = list(cast(nn.ModuleList, block._modules["experts"])), spread_of(block)
    return held if spread is None else spread.own(held)


def group_mixtures(model: nn.Module, grouped: bool = True) -> None:
    """Let blocks whose experts are modules with FP8 layers compute them in grouped products, in place.

    Blocks that an earlier call changed, and whose experts are no longer so, are what they were.

    Args:
        model: converted before; blocks that compute something else than these mixins stay as they are.
        grouped: whether any block is to compute so.
    """
    for block in list(model.modules()):
        wanted = grouped and _are_in_fp8(block)
        if isinstance(block, Mixture):
            if block.fp8_spread is not None:
                group_experts(block)
            elif not wanted:
                del block.fp8_grouped_experts, block.fp8_reads_fp8
                change_class(block, class_without(Mixture, type(block)))
            continue
        mixin = mixin_of(block) if wanted else None
        if mixin is not None:
            group_experts(change_class(block, mixed_class(mixin, type(block))))


def group_experts(block: Mixture) -> None:
    """Let this rank's experts of a block be computed by grouped products, where they are in FP8 and to be fused."""
    in_fp8 = _are_in_fp8(block)
    block.fp8_reads_fp8 = in_fp8 and all(map(readers_in_fp8, own_experts(block)))
    fused = in_fp8 and all(layer.fp8_config.fused for layer in _layers_in_fp8(own_experts(block)[0]))
    block.fp8_grouped_experts = GroupedExperts(own_experts(block)) if fused else None


def _are_in_fp8(block: nn.Module) -> bool:
    """Tell whether a block has several experts in a list, and each of this rank's an FP8 layer, and its weights."""
    experts = block._modules.get("experts")
    if not isinstance(experts, nn.ModuleList) or len(experts) < 2:
        return False
    by_expert = [_layers_in_fp8(expert) for expert in own_experts(block)]
    # another pipeline stage's are shells
    return all(layers and all(each.held_weight is not None for each in layers) for layers in by_expert)


def _layers_in_fp8(expert: nn.Module) -> list[FP8Layer]:
    return [layer for layer in expert.modules() if isinstance(layer, FP8Layer)]
