"""Expert parallelism of any model whose experts are known: lists of modules, or parameters of three dimensions.

    a block with a list of experts   one that a trial knows (`mixture`): its router stays, its loop does not
    experts in one parameter         whatever block calls them with tokens, their experts and weights
                                     (`fp8_experts.are_experts`): the block stays as it is

What a block computes besides, as shared experts, and what it returns, is its own. In FP8 the same classes compute as on
one rank (`mixture.Mixture`, `fp8_experts.FP8Experts`). Over a group of one rank nothing is sent, and all of it is as on
one rank, but that experts in a list have gradients, of zeros, also where they got no tokens.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.nn.experts.fp8_experts import are_experts, why_not_called_so
from fp8booster.nn.experts.fp8_rows import values_of
from fp8booster.nn.experts.loads import note_choice
from fp8booster.nn.experts.mixture import mixin_of
from fp8booster.nn.experts.one_by_one import scale_gradient
from fp8booster.nn.experts.routing import Routed, Routes, rows_of, weighted_sum
from fp8booster.nn.experts.spread import EXCHANGED, Run, Spread, mark_spread
from fp8booster.nn.graphs.eager import COUNTED
from fp8booster.nn.modules import change_class, mixed_class, run_with
from fp8booster.nn.weights.casting import Casts


class SpreadExperts(nn.Module):
    """Mixin of a module whose parameters hold the experts of this rank, and which is called with those of all."""

    fp8_spread: Spread

    @property
    def why_eager(self) -> str:
        """The reason why no graph can hold the experts."""
        return EXCHANGED if self.fp8_spread.sends else COUNTED

    @property
    def breaks_itself(self) -> bool:
        """Tell whether its code breaks graphs (`graphs.eager`): it does where tokens are sent to other ranks."""
        return self.fp8_spread.sends

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return [T, H], of tokens [T, H] with their experts and these' weights, [T, k]."""
        reason, spread = why_not_called_so(args, kwargs), self.fp8_spread
        if not spread.sends:
            if reason is None:
                self.note_choice(args[1])
            original: Any = super().forward  # of the module's class
            return original(*args, **kwargs)
        if reason is not None:
            raise ValueError(f"{type(self).__name__}'s experts are spread over ranks, and are {reason}")
        mix = spread.mix
        if torch.compiler.is_compiling():  # the host reads how many rows a rank gets
            mix = torch.compiler.disable(mix)
        tokens, chosen, weights = args
        return mix(tokens, chosen, weights, self)

    def note_choice(self, chosen: torch.Tensor) -> None:
        """Remember the choice of this rank's tokens (`spread.HeldExperts`)."""
        note_choice(self, chosen, self.fp8_spread.experts)

    def input_casts(self, tokens: torch.Tensor) -> Casts | None:
        """Return None: the module's class reads high precision (`spread.HeldExperts`)."""
        return None

    def are_trained(self) -> bool:
        """Tell whether a parameter here needs a gradient (`spread.HeldExperts`)."""
        return any(parameter.requires_grad for parameter in self.parameters())

    def prepare(self, tokens: torch.Tensor, rows: int) -> Run:
        """Return what computes the experts (`spread.HeldExperts`)."""
        return self.run

    def run(self, routed: Routed, factor: float) -> torch.Tensor:
        """Compute the experts of this rank as the module's class does: a `spread.Run`."""
        # a row for each choice: the class knows no choices of experts elsewhere
        routes = Routes.of(routed.chosen, self.fp8_spread.held, routed.rows)
        x = rows_of(values_of(routed.tokens), routes)
        owners, weights = (
            each.reshape(-1, 1).index_select(0, routes.choices) for each in (routed.chosen, routed.weights)
        )
        if not len(x):
            # parameters must have gradients, of zeros, on each rank, and the rows too, which backward sends
            x, owners, weights = (torch.cat([each, each.new_zeros(1, each.shape[1])]) for each in (x, owners, weights))
        # times the factor behind the experts and its inverse before them: their parameters alone see the factor
        x, weights = (scale_gradient(each, 1 / factor) for each in (x, weights.to(x.dtype)))
        parts = {}
        if vars(self).get("has_post_expert_norm"):
            norm: Any = self.post_expert_norm  # of whose parameters each rank has a copy, and a part of the gradient
            parts["post_expert_norm"] = lambda x: scale_gradient(norm(scale_gradient(x, factor)), 1 / factor)
        made = scale_gradient(run_with(_forward_of_class, self, parts, x, owners, weights), factor)
        made = made[: len(routes.choices)]
        return weighted_sum(made, made.new_ones(routed.weights.shape), routes)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        # of a checkpoint with all experts, whatever the number of ranks that wrote it
        state_dict = dict(state_dict)
        for name in self._parameters:
            whole = state_dict.get(prefix + name)
            if whole is not None and len(whole) == self.fp8_spread.experts:
                state_dict[prefix + name] = self.fp8_spread.own(whole)
        super()._load_from_state_dict(state_dict, prefix, *args)


def _forward_of_class(module: SpreadExperts, *args: torch.Tensor) -> torch.Tensor:
    """Return what the module's class makes of tokens, experts and weights, by which it multiplies."""
    forward: Any = super(SpreadExperts, module).forward
    return forward(*args)


def blocks_to_spread(model: nn.Module) -> list[nn.Module]:
    """Return the modules that `spread_experts` changes: blocks with a list of experts, or modules of stacked ones."""
    found = []
    for module in model.modules():
        held_as_list = isinstance(module._modules.get("experts"), nn.ModuleList)
        if are_experts(module) or (held_as_list and mixin_of(module) is not None):
            found.append(module)
    return found


def spread_experts(model: nn.Module, group: dist.ProcessGroup) -> list[Spread]:
    """Spread the experts of a model's blocks over ranks, in place: each keeps its own, and others' have no memory.

    Parameters stay the same objects with the same names. Those of lists of experts are None on other ranks; those of
    all experts shrink to this rank's.

    Args:
        model: on every rank the same, not converted to FP8 yet.
        group: over which the experts of a block are spread.

    Returns:
        The ranks of each block.

    Raises:
        ValueError: a number of experts is no multiple of the number of ranks.
    """
    return [
        _spread_stack(block, group) if are_experts(block) else _spread_list(block, group)
        for block in blocks_to_spread(model)
    ]


def _spread_stack(experts: Any, group: dist.ProcessGroup) -> Spread:
    spread = Spread(len(experts.down_proj), group)
    for parameter in experts._parameters.values():
        if parameter is not None and len(parameter) == spread.experts:
            # a view would keep the memory of all experts
            parameter.data = spread.own(parameter.data).clone()
            mark_spread(parameter, spread)
    experts.num_experts = spread.held  # by which the class's own forward counts
    change_class(experts, mixed_class(SpreadExperts, type(experts)))
    experts.fp8_spread = spread
    return spread


def _spread_list(block: Any, group: dist.ProcessGroup) -> Spread:
    experts = cast(nn.ModuleList, block._modules["experts"])
    spread = Spread(len(experts), group)
    own = spread.own(list(experts))
    for elsewhere in experts:
        if elsewhere not in own:
            for module in elsewhere.modules():
                module._parameters.update(dict.fromkeys(module._parameters))
    for expert in own:
        for parameter in expert.parameters():
            mark_spread(parameter, spread)
    change_class(block, mixed_class(cast(type, mixin_of(block)), type(block)))
    vars(block).update(fp8_spread=spread, fp8_grouped_experts=None)
    return spread
