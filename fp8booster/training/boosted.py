"""A boosted model and its step, under any plugin."""

from __future__ import annotations

import fp8booster.colossal  # noqa: F401  isort: skip  (patches colossalai before it is imported)
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin.plugin_base import Plugin
from torch import nn

from fp8booster.colossal.zero.rank_files import load_master_weights, load_moments, save_master_weights, save_moments
from fp8booster.monitor.traffic import bytes_sent
from fp8booster.nn.held_casts import forget_step, remembered_amaxes
from fp8booster.optim.states_8bit import State

from .adapters import adapted, load_adapters, save_adapters
from .batches import Replica
from .parallel import WITH_MASTERS

_CLIPPED_BY_CALLER = ("ddp", "fsdp")
"""The plugins that do not clip gradients in their optimizer's step."""


class BoostedModel:
    """A model on this rank, its optimizer and the step that suits its plugin."""

    def __init__(self, name: str, plugin: Plugin, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Boost `network`; `name` is the plugin's in `parallel.PLUGINS`."""
        self.name = name
        self.unseen_bytes = _unseen_bytes(name, plugin, network)
        """Bytes that this rank sends in a step past `torch.distributed`'s Python functions."""
        # DDP leaves the 16-bit type of FP32 weights to Booster; the other plugins were told
        trained = next(parameter for parameter in network.parameters() if parameter.requires_grad)
        mixed = name == "ddp" and trained.dtype == torch.float32
        self.booster = Booster(plugin=plugin, mixed_precision="bf16" if mixed else None)
        self.model, self.optimizer, *_ = self.booster.boost(network, optimizer)
        self._norm: torch.Tensor | None = None

    @property
    def replica(self) -> Replica:
        """The place of this rank among those that read different tokens."""
        plugin = self.booster.plugin
        if hasattr(plugin, "moe_dp_axis"):  # copies of experts, and in each the ranks that share them
            copies, experts = (plugin.pg_mesh.coordinate(axis) for axis in (plugin.moe_dp_axis, plugin.ep_axis))
            return Replica(int(copies * plugin.ep_size + experts), int(plugin.moe_dp_size * plugin.ep_size))
        if hasattr(plugin, "dp_axis"):  # hybrid
            return Replica(*(int(of(plugin.dp_axis)) for of in (plugin.pg_mesh.coordinate, plugin.pg_mesh.size)))
        sharing = getattr(plugin, "tp_size", 1)  # Gemini lays tensor parallel ranks side by side
        return Replica(dist.get_rank() // sharing, dist.get_world_size() // sharing)

    @property
    def pipelined(self) -> bool:
        return getattr(self.booster.plugin, "pp_size", 1) > 1

    def forward_backward(self, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> torch.Tensor | None:
        """Compute gradients of one optimizer step; return the mean loss  [], None on pipeline stages but the last.

        Args:
            micro_batches: as many as the plugin was told, with `input_ids` and `labels`  [batch, sequence] each.
        """
        if self.pipelined:  # the schedule cuts the batch into micro-batches by itself
            whole = {name: torch.cat([part[name] for part in micro_batches]) for name in micro_batches[0]}
            return self.booster.execute_pipeline(
                iter([whole]), self.model, lambda outputs, _: outputs.loss, self.optimizer, return_loss=True
            )["loss"]
        losses = []
        for number, part in enumerate(micro_batches, 1):
            unsynchronized = number < len(micro_batches) and self._accumulates
            with self.booster.no_sync(self.model, self.optimizer) if unsynchronized else nullcontext():
                # divided before backward, so that gradients add up to those of the mean
                loss = self.model(**part).loss / len(micro_batches)
                self.booster.backward(loss, self.optimizer)
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    @property
    def _accumulates(self) -> bool:
        """True where whole gradients wait on a rank for the last micro-batch."""
        plugin = self.booster.plugin
        # stage 2 keeps only shards of them, so it reduces each micro-batch's; HybridParallel does not say so itself
        return plugin.support_no_sync() and getattr(plugin, "zero_stage", 1) != 2

    def update(self, max_norm: float) -> None:
        """Clip gradients to `max_norm` where the optimizer's step does not, step, and set gradients to zero."""
        if self.name in _CLIPPED_BY_CALLER:
            # without a limit too, for the norm is recorded and checked
            self._norm = self.optimizer.clip_grad_by_norm(max_norm or math.inf)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def abandon(self) -> None:
        """Leave the step out that `forward_backward` began or `update` broke off: nothing of it stays."""
        # gradients that are not finite would be added to the next step's
        self.optimizer.zero_grad()
        # of DDP and FSDP it leaves what scaling noted, which would count for the next step
        forget_step(self.model)

    def before_update(self, check: Callable[[float], object]) -> None:
        """Call `check` in each step with the gradients' norm, when no weight has changed."""

        def call() -> None:
            check(float(self.optimizer.get_grad_norm() if self._norm is None else self._norm))

        if hasattr(self.optimizer, "before_update"):
            self.optimizer.before_update = call
        else:  # Colossal-AI's wrapper has clipped when it steps the optimizer in it
            self.optimizer.unwrap().register_step_pre_hook(lambda *_: call())

    def gather_masters(self) -> None:
        """Give the weights the values of their masters under ZeRO, as checkpoints do; every rank calls it.

        Between steps those of FP8 layers have the values of their FP8 copies.
        """
        if hasattr(self.model, "_force_wait_all_gather"):
            self.model._force_wait_all_gather()

    def save(self, folder: Path, codes: bool = False) -> None:
        """Write `model/`, in Hugging Face's format, `optimizer/`, as Booster does, and `masters/`; every rank calls it.

        Of a model with adapters `model/` holds these alone, as peft writes them.

        Args:
            folder: on a disk that all ranks share. Under Gemini, DDP and FSDP `masters/` is empty.
            codes: write `moments/`, the codes of an `fp8booster.optim.AdamW`, in place of `optimizer/`; for plugins
                that keep masters.
        """
        if dist.get_rank() == 0:
            for name in ("model", "moments" if codes else "optimizer", "masters"):
                (folder / name).mkdir()
        # no rank may write before rank 0 has made the folders
        dist.barrier()
        if (holder := self._adapters) is not None:
            # Colossal-AI copies the whole model to the host for it, finds no adapters in mixed precision under DDP, and
            # has nothing for FSDP
            self.gather_masters()
            save_adapters(holder, folder / "model", writes=dist.get_rank() == 0)
        else:
            self.booster.save_model(self.model, str(folder / "model"), shard=True, use_safetensors=True)
        # codes are loaded as they are: decoded and gathered states would be four times as large
        if codes:
            save_moments(self.model.unwrap(), self.optimizer, folder / "moments")
        else:
            self.booster.save_optimizer(self.optimizer, str(folder / "optimizer"), shard=True)
        if self.name in WITH_MASTERS:
            save_master_weights(self.model.unwrap(), self.optimizer, folder / "masters")

    @property
    def adapted(self) -> Any:
        """Return the peft model; None for a model that trains all its weights."""
        return adapted(self.model)

    @property
    def _adapters(self) -> nn.Module | None:
        """Return the module whose state dict has adapters as peft names them; None: there are none."""
        # FSDP gathers its shards when its own module is asked
        return self.model.unwrap() if self.name == "fsdp" and self.adapted is not None else self.adapted

    def is_finite(self) -> bool:
        """Tell whether trained weights, optimizer states and remembered amaxes are finite on all ranks.

        Every rank calls it, between two steps. It waits for the device.
        """
        found: dict[torch.device, list[torch.Tensor]] = {torch.device("cpu"): []}
        for each in self._kept():
            if each.is_floating_point() and each.numel():
                # a NaN stays one, and no mask is made of what may fill a GPU
                norm = torch.linalg.vector_norm(each.detach(), math.inf, dtype=torch.float32)
                found.setdefault(each.device, []).append(norm)
        bad = any(not bool(torch.stack(norms).isfinite().all()) for norms in found.values() if norms)
        # ranks hold different shards, and all must go on or stop alike
        shared = torch.tensor(float(bad), dtype=torch.float32, device=get_accelerator().get_current_device())
        dist.all_reduce(shared)
        return not bool(shared)

    def _kept(self) -> Iterator[torch.Tensor]:
        """Yield the tensors that this rank's steps read; under ZeRO and Gemini masters in the place of weights."""
        inside = self.optimizer.unwrap()
        chunks = getattr(self.optimizer, "param_to_chunk16", {})  # Gemini's, whose parameters are empty between steps
        for group in inside.param_groups:
            for parameter in group["params"]:
                # a chunk holds many parameters, and its payload has the values of all
                if (chunk := chunks.get(parameter)) is None:
                    yield parameter
                else:
                    yield chunk.paired_chunk.payload if self.optimizer.module.master_weights else chunk.payload
        for state in inside.state.values():
            kept = state.codes if isinstance(state, State) else state
            yield from (value for value in kept.values() if isinstance(value, torch.Tensor))
        for amaxes in remembered_amaxes(self.model).values():
            yield from amaxes.values()

    def load(self, folder: Path) -> None:
        """Set model and optimizer to the content of a folder of `save`'s; every rank calls it."""
        if (holder := self._adapters) is not None:
            load_adapters(holder, folder / "model")
        else:
            self.booster.load_model(self.model, str(folder / "model"))
        # the folder tells, not the options: a resumed run may change how it saves
        if (folder / "moments").is_dir():
            load_moments(self.model.unwrap(), self.optimizer, folder / "moments")
        else:
            self.booster.load_optimizer(self.optimizer, str(folder / "optimizer"))
        # Colossal-AI leaves "step" where the file was read (load_states_into_optimizer, checkpoint_io/utils.py:808);
        # the fused AdamW wants it beside its parameter.
        for parameter, values in self.optimizer.unwrap().state.items():
            if isinstance(values.get("step"), torch.Tensor):
                values["step"] = values["step"].to(parameter.device)
        if self.name in WITH_MASTERS:
            # after the model, whose load sets masters to 16-bit values
            load_master_weights(self.model.unwrap(), self.optimizer, folder / "masters")


def causal(tokens: torch.Tensor, separator: int | None = None) -> dict[str, torch.Tensor]:
    """Return a batch in which each token predicts the next, from `tokens`  [batch, sequence].

    Args:
        separator: the token that ends a document. Positions begin anew behind it, which packs documents
            (`nn.fused.packing`), and it predicts none. None: each row is one.
    """
    if separator is None:
        return {"input_ids": tokens, "labels": tokens}
    begins = torch.zeros_like(tokens, dtype=torch.bool)
    # the separator itself still belongs to the document that it ends
    begins[:, 1:] = tokens[:, :-1] == separator
    place = torch.arange(tokens.shape[1], dtype=torch.int64, device=tokens.device).expand_as(tokens)
    positions = place - torch.where(begins, place, 0).cummax(1).values
    return {"input_ids": tokens, "labels": tokens.masked_fill(begins, -100), "position_ids": positions}


def _unseen_bytes(name: str, plugin: Plugin, network: nn.Module) -> int:
    """Return the bytes that DDP's reducer in C++ sends where no hook of Python reduces gradients."""
    if name != "ddp" or getattr(plugin, "sends_fp8", plugin.fp8_communication):
        return 0
    trained = (parameter for parameter in network.parameters() if parameter.requires_grad)
    payload = sum(parameter.numel() * parameter.element_size() for parameter in trained)
    return bytes_sent("all_reduce", payload, dist.get_world_size())
