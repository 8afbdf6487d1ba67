"""Runs whose gradients and weights are sent in FP8, and what their ranks hold together."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, FP8Linear
from tests.plugins.training import Boosted, ours, rank_batches

if TYPE_CHECKING:
    from fp8booster.plugins import LowLevelZeroPlugin

CLOSE = 1e-2
"""How far a loss may lie from that in 16 bits, in the first steps of `tiny_llama`."""


def wire(**arguments: Any) -> LowLevelZeroPlugin:
    """The plugin with FP8 products layer by layer and FP8 on the wire."""
    return ours(**{"use_fp8": True, "fp8_config": FP8Config(fused=False)} | arguments)


def names(run: Boosted) -> dict[str, nn.Parameter]:
    """The trained parameters by name."""
    masters = run.optimizer.get_working_to_master_map()
    return {name: value for name, value in run.model.unwrap().named_parameters() if id(value) in masters}


def masters(run: Boosted) -> dict[str, torch.Tensor]:
    """The master weights, whole, by name."""
    whole = {}
    for name, working in names(run).items():
        shard = run.optimizer.get_working_to_master_map()[id(working)].detach()
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        whole[name] = torch.cat(shards)[: working.numel()].view(working.shape).clone()
    return whole


def gathered(run: Boosted) -> Iterator[tuple[str, FP8Linear]]:
    """The layers whose weights are sent in FP8, by the name of the weight."""
    for name, module in run.model.unwrap().named_modules():
        if isinstance(module, FP8Linear) and module.held_weight in run.optimizer.gathered_weights:
            yield f"{name}.weight", module


def assert_same_on_all_ranks(tensor: torch.Tensor) -> None:
    """Bit for bit."""
    own = tensor.contiguous().view(torch.uint8)
    first = own.clone()
    dist.broadcast(first, 0)
    assert torch.equal(first, own)


class Layers(nn.Module):
    """Linear layers one after the other with residuals between equal sizes; `dropped` are skipped."""

    def __init__(self, *sizes: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.dropped: set[int] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            if number not in self.dropped:
                y = layer(x).tanh()
                x = x + y if x.shape == y.shape else y
        return x.float().square().mean()


def features(size: int = 64, rows: int = 32) -> torch.Tensor:
    """Random input that differs from rank to rank, in BF16."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.randn(rows, size, generator=generator).bfloat16()


def step(run: Boosted, *inputs: torch.Tensor, forward: Callable[[torch.Tensor], torch.Tensor] | None = None) -> float:
    """One step over inputs, gradients reduced after each; returns the last loss, by default what the model returns."""
    for x in inputs:
        loss = (forward or run.model)(x)
        run.booster.backward(loss, run.optimizer)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return loss.item()


def batch() -> torch.Tensor:
    """One batch of tokens of this rank."""
    return rank_batches(1)[0]


def own_gradients(run: Boosted) -> list[torch.Tensor]:
    """This rank's part of each gradient, as reduced up to now."""
    (store,) = run.optimizer.pg_to_grad_store.values()
    return store.get_working_grads_by_group_id(0)
