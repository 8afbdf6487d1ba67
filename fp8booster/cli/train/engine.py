"""A boosted model and its step, under any plugin: what plugins ask for, and where they differ."""

from __future__ import annotations

import fp8booster.colossal  # noqa: F401  isort: skip  (mends colossalai before it is imported)
import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from colossalai.booster import Booster
from colossalai.booster.plugin.plugin_base import Plugin
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fp8booster.monitor.traffic import bytes_sent

from .batches import Replica
from .parallel import Parallel

CLIPPED_BY_CALLER = ("ddp", "fsdp")
"""The plugins that do not clip gradients in their optimizer's step."""


def plugin_arguments(parallel: Parallel, max_norm: float, network: nn.Module) -> dict[str, Any]:
    """The arguments of a plugin's constructor, ours or native, for BF16 and what `parallel` says.

    Args:
        max_norm: gradients are clipped to this norm; 0: not clipped.
        network: the model that will be boosted, from transformers.
    """
    match parallel.plugin:
        case "low_level_zero":
            return {"precision": "bf16", "max_norm": max_norm, "stage": parallel.zero_stage}
        case "gemini":
            return {
                "precision": "bf16",
                "max_norm": max_norm or math.inf,
                "placement_policy": "static",
                "tp_size": parallel.tp,
                "enable_gradient_accumulation": parallel.micro_batches > 1,
            }
        case "hybrid":
            return {
                "precision": "bf16",
                "max_norm": max_norm or math.inf,
                "tp_size": parallel.tp,
                "pp_size": parallel.pp,
                "zero_stage": parallel.zero_stage,
                **_vocabulary(parallel.tp, network),
                **_pipeline(parallel),
                **_sequence_parallelism(parallel),
            }
        case "fsdp":
            return {
                "mixed_precision": MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16),
                "auto_wrap_policy": ModuleWrapPolicy(_blocks(network)),
            }
    return {}


def _vocabulary(tp: int, network: nn.Module) -> dict[str, Any]:
    """Shards of the vocabulary without padding.

    Colossal-AI pads each to a multiple of 64 by itself, and then saves no optimizer (checkpoint_io/utils.py:128).

    Raises:
        ValueError: the vocabulary cannot be divided.
    """
    size = network.config.vocab_size
    if size % tp:
        raise ValueError(
            f"The model has {size} embeddings, which --tp {tp} cannot divide; give another --tp, or save the model "
            "with more of them (resize_token_embeddings)"
        )
    return {"make_vocab_size_divisible_by": math.gcd(64, size // tp)}


def _pipeline(parallel: Parallel) -> dict[str, Any]:
    return {"num_microbatches": parallel.micro_batches} if parallel.pp > 1 else {}


def _sequence_parallelism(parallel: Parallel) -> dict[str, Any]:
    if parallel.sp_mode is None:
        return {}
    return {"enable_sequence_parallelism": True, "sequence_parallelism_mode": parallel.sp_mode, "sp_size": parallel.sp}


def _blocks(network: nn.Module) -> set[type[nn.Module]]:
    """The classes of a model's repeated blocks, each of which FSDP gathers by itself.

    Raises:
        ValueError: the model does not say which they are.
    """
    names = getattr(network, "_no_split_modules", None) or ()
    blocks = {type(module) for module in network.modules() if type(module).__name__ in names}
    if not blocks:
        raise ValueError(
            f"{type(network).__name__} does not say which blocks it repeats (_no_split_modules), and FSDP gathers "
            "block by block; use another --plugin"
        )
    return blocks


def replica_of(plugin: Plugin) -> Replica:
    """The place of this rank among those that read different tokens."""
    if hasattr(plugin, "dp_axis"):  # hybrid
        return Replica(*(int(of(plugin.dp_axis)) for of in (plugin.pg_mesh.coordinate, plugin.pg_mesh.size)))
    sharing = getattr(plugin, "tp_size", 1)  # Gemini lays tensor parallel ranks side by side
    return Replica(dist.get_rank() // sharing, dist.get_world_size() // sharing)


@dataclass(frozen=True, kw_only=True)
class Engine:
    """A boosted model on this rank."""

    name: str
    """The plugin's in `parallel.PLUGINS`."""
    booster: Booster
    model: ModelWrapper
    optimizer: OptimizerWrapper
    unseen_bytes: int
    """Bytes that this rank sends in a step past `torch.distributed`'s Python functions."""

    @classmethod
    def boost(
        cls,
        name: str,
        plugin: Plugin,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        mixed_precision: str | None = None,
    ) -> Engine:
        """Boost a model; `mixed_precision` is for plugins that leave it to Booster, as DDP."""
        unseen = _unseen_bytes(name, plugin, network)
        booster = Booster(plugin=plugin, mixed_precision=mixed_precision)
        model, optimizer, *_ = booster.boost(network, optimizer)
        return cls(name=name, booster=booster, model=model, optimizer=optimizer, unseen_bytes=unseen)

    @property
    def replica(self) -> Replica:
        return replica_of(self.booster.plugin)

    @property
    def pipelined(self) -> bool:
        return getattr(self.booster.plugin, "pp_size", 1) > 1

    def forward_backward(self, micro_batches: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Gradients of one optimizer step; returns the mean loss  [], None on pipeline stages but the last.

        `micro_batches`  [batch, sequence] each, of equal size, as many as the plugin was told.
        """
        if self.pipelined:
            tokens = torch.cat(list(micro_batches))
            return self.booster.execute_pipeline(
                iter([{"input_ids": tokens, "labels": tokens}]),
                self.model,
                lambda outputs, _: outputs.loss,
                self.optimizer,
                return_loss=True,
            )["loss"]
        losses = []
        for number, tokens in enumerate(micro_batches, 1):
            unsynchronized = number < len(micro_batches) and self._accumulates
            with self.booster.no_sync(self.model, self.optimizer) if unsynchronized else nullcontext():
                loss = self.model(input_ids=tokens, labels=tokens).loss / len(micro_batches)
                self.booster.backward(loss, self.optimizer)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @property
    def _accumulates(self) -> bool:
        """Whether whole gradients wait on a rank for the last micro-batch.

        Stage 2 keeps only shards of them, so it reduces each micro-batch's; HybridParallel does not say so itself.
        """
        plugin = self.booster.plugin
        return plugin.support_no_sync() and getattr(plugin, "zero_stage", 1) != 2

    def before_update(self, check: Callable[[], object]) -> None:
        """Call `check` in each step when the gradients' norm is known and no weight has changed."""
        if hasattr(self.optimizer, "before_update"):
            self.optimizer.before_update = check
        else:
            self.optimizer.unwrap().register_step_pre_hook(lambda *_: check())

    def clip(self, max_norm: float) -> torch.Tensor | None:
        """Clip gradients where the optimizer's step does not; returns their norm  [], None where the step clips."""
        if self.name not in CLIPPED_BY_CALLER:
            return None
        return self.optimizer.clip_grad_by_norm(max_norm or math.inf)


def _unseen_bytes(name: str, plugin: Plugin, network: nn.Module) -> int:
    """What DDP's reducer in C++ sends where no hook of Python reduces gradients."""
    if name != "ddp" or getattr(plugin, "reduces_in_fp8", plugin.fp8_communication):
        return 0
    payload = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    return bytes_sent("all_reduce", payload, dist.get_world_size())
