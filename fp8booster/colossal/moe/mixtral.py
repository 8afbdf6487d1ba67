"""A Mixtral of transformers 5 as Colossal-AI shards one: its experts are modules with linear layers, as in 4.51.

In transformers 5 the experts of a block are two parameters, [experts, out, in], which have no linear layers to shard,
to spread over ranks or to compute in FP8. Here each expert has the names that it has in files: `experts.0.w1.weight`,
which transformers 5 reads as well.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from fp8booster.colossal.moe.adapters import refuse_adapters_of_all


class MixtralBlockSparseTop2MLP(nn.Module):
    """An expert, `w2(act_fn(w1(x)) * w3(x))`."""

    # transformers 4.51 has this class there: what knows its name and place fuses and groups these experts too
    __module__ = "transformers.models.mixtral.modeling_mixtral"

    def __init__(
        self, gate_up: torch.Tensor, down: torch.Tensor, act_fn: nn.Module, trained: tuple[bool, bool]
    ) -> None:
        """Copy an expert's weights, [2 F, H] and [H, F]; `trained` says of each whether it gets gradients."""
        super().__init__()
        gate, up = gate_up.chunk(2)
        self.w1, self.w2, self.w3 = _linear(gate, trained[0]), _linear(down, trained[1]), _linear(up, trained[0])
        self.act_fn = act_fn

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        return self.w2(self.act_fn(self.w1(hidden_states)) * self.w3(hidden_states))


def _linear(weight: torch.Tensor, requires_grad: bool) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    # a view would keep the memory of all experts alive on ranks that hold a few
    layer.weight = nn.Parameter(weight.detach().clone(), requires_grad)
    return layer


class SplitMixtralBlock(nn.Module):
    """A block whose router is a linear layer, and whose experts are modules."""

    def __init__(self, block: Any) -> None:
        """Copy the weights of a block of transformers 5, and keep its router's parameter."""
        super().__init__()
        experts = block.experts
        self.returns_logits = False  # layers of transformers 5 add the output; also when the class has become another
        self.num_experts, self.top_k, self.jitter_noise = experts.num_experts, block.top_k, block.jitter_noise
        self.gate = nn.Linear(*reversed(block.gate.weight.shape), bias=False, device="meta")
        # the parameter itself: optimizers know it, and the experts' alone are replaced there
        self.gate.weight = block.gate.weight
        trained = experts.gate_up_proj.requires_grad, experts.down_proj.requires_grad
        self.experts = nn.ModuleList(
            MixtralBlockSparseTop2MLP(gate_up, down, experts.act_fn, trained)
            for gate_up, down in zip(experts.gate_up_proj, experts.down_proj, strict=True)
        )

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Tokens [B, S, H] to [B, S, H]."""
        if self.training and self.jitter_noise > 0:
            noise = torch.empty_like(hidden_states).uniform_(1 - self.jitter_noise, 1 + self.jitter_noise)
            hidden_states = hidden_states * noise
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        # in FP32, as in transformers: likelihoods that differ little would be equal in 16 bits, and other experts
        # chosen
        probabilities = F.softmax(self.gate(tokens), dim=-1, dtype=torch.float)
        weights, chosen = probabilities.topk(self.top_k, dim=-1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(tokens.dtype)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            mixed = mixed.index_add(0, rows, expert(tokens[rows]) * weights[rows, places, None])
        return mixed.view_as(hidden_states)


def is_split(model: nn.Module) -> bool:
    """Tell whether no block of a Mixtral holds its experts as parameters."""
    return not any(_is_whole(module) for module in model.modules())


def _is_whole(module: nn.Module) -> bool:
    return type(module).__name__ == "MixtralSparseMoeBlock" and not isinstance(module.experts, nn.ModuleList)


def split_experts(model: nn.Module, optimizer: Optimizer | None) -> None:
    """Split the experts of a Mixtral of transformers 5, in place; what is none, or is split, stays as it is.

    Args:
        model: not sharded yet.
        optimizer: of its parameters: it takes the new ones in place of the old ones, in their groups.

    Raises:
        ValueError: the optimizer has taken a step, or adapters are of whole experts.
    """
    from colossalai.lazy import LazyInitContext

    if not is_split(model):
        refuse_adapters_of_all(model)
    replaced: dict[nn.Parameter, list[nn.Parameter]] = {}
    for layer in model.modules():
        for name, block in list(layer._modules.items()):
            if block is None or not _is_whole(block):
                continue
            LazyInitContext.materialize(block)  # lazy parameters have no values to copy
            split = SplitMixtralBlock(block).train(block.training)
            setattr(layer, name, split)
            experts = list(split.experts)
            replaced[block.experts.gate_up_proj] = [
                weight for each in experts for weight in (each.w1.weight, each.w3.weight)
            ]
            replaced[block.experts.down_proj] = [each.w2.weight for each in experts]
    if not replaced or optimizer is None:
        return
    # found before the optimizer's groups change; moments of the stacked parameter fit none of its parts
    if any(parameter in replaced for parameter in optimizer.state):
        raise ValueError(
            "the optimizer holds states of a Mixtral's experts, which are split for sharding; boost a new optimizer, "
            "and load its states with booster.load_optimizer"
        )
    # in place of the old ones, so that each expert keeps its group's learning rate and decay
    for group in optimizer.param_groups:
        group["params"] = [new for old in group["params"] for new in replaced.get(old, [old])]
