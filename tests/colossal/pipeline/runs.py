"""Train tiny LLaMAs in pipelines of two stages, by Colossal-AI's plugin, its point-to-point in FP8 or not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)
from tests.colossal.models import tiny_llama, token_batch

MICRO_BATCHES = 4
HIDDEN = 64
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"pp_style": "1f1b"},
    "interleaved": {"pp_style": "interleaved", "num_model_chunks": 2, "overlap_p2p": False},
    "interleaved, overlapped": {"pp_style": "interleaved", "num_model_chunks": 2},
    "zero-bubble": {"pp_style": "zbv", "num_model_chunks": 2},
}


def batch() -> torch.Tensor:
    """Tokens of as many micro-batches as the pipelines take, of one row each."""
    return token_batch(seed=0, batch=MICRO_BATCHES)


@dataclass
class Pipeline:
    """A boosted model and what trains it."""

    booster: Any
    plugin: Any
    model: Any
    optimizer: Any

    def forward_backward(self, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of a batch, on all ranks."""
        batches = iter([{"input_ids": tokens, "labels": tokens}])
        loss = self.booster.execute_pipeline(
            batches, self.model, lambda outputs, _: outputs.loss, self.optimizer, return_loss=True
        )["loss"]
        found = torch.zeros(()) if loss is None else loss.detach().float().clone()
        dist.all_reduce(found)  # the stage that ends the pipeline has it, the others have none
        return found

    def step(self, tokens: torch.Tensor) -> float:
        """One optimizer step; returns the loss."""
        loss = self.forward_backward(tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def train(self, steps: int) -> list[float]:
        """Losses of as many steps on one batch, which is alike on all ranks."""
        return [self.step(batch()) for _ in range(steps)]

    def gradients(self) -> dict[str, torch.Tensor]:
        """Those of all stages' parameters after one batch, by name."""
        self.forward_backward(batch())
        own = {
            name: parameter.grad.clone()
            for name, parameter in self.model.unwrap().named_parameters()
            if parameter.grad is not None
        }
        stages = [None] * dist.get_world_size()
        dist.all_gather_object(stages, own)
        return {name: gradient for stage in stages for name, gradient in stage.items()}


def pipeline(
    schedule: str, *, sends_fp8: bool = False, products: bool = False, network: Any = None, **options: Any
) -> Pipeline:
    """A tiny LLaMA of 4 layers under a schedule of `SCHEDULES`.

    Args:
        schedule: whose name.
        sends_fp8: compress the point-to-point.
        products: turn its linear layers into FP8 layers.
        network: options of `tiny_llama`.
        options: of Colossal-AI's plugin.
    """
    from colossalai.booster import Booster
    from colossalai.booster.plugin import HybridParallelPlugin

    from fp8booster import FP8Config
    from fp8booster.colossal.pipeline import compress_pipeline, zero_bubble_schedule
    from fp8booster.colossal.tensor import convert_sharded_to_fp8

    arguments = SCHEDULES[schedule] | {"precision": "bf16", "num_microbatches": MICRO_BATCHES} | options
    if arguments["pp_style"] == "zbv":
        arguments["scheduler_nodes"] = zero_bubble_schedule(2, arguments["num_microbatches"])
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, **arguments)
    if sends_fp8:
        compress_pipeline(plugin)
    booster = Booster(plugin=plugin)
    model = tiny_llama(num_hidden_layers=4, hidden_size=HIDDEN, **network or {})
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=3e-3))
    if products:
        convert_sharded_to_fp8(model.unwrap(), FP8Config(), communication=False)
    return Pipeline(booster, plugin, model.train(), optimizer)
