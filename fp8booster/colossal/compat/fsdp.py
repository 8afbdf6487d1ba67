"""Mends of Colossal-AI's TorchFSDPPlugin."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig
from torch.optim import AdamW, Optimizer

from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch

_FSDP_PLUGIN = "colossalai.booster.plugin.torch_fsdp_plugin"


@mend(
    module=_FSDP_PLUGIN,
    place="booster/plugin/torch_fsdp_plugin.py:553",
    needed_when="an optimizer has defaults that its constructor does not take, as torch.optim.AdamW has",
)
def fsdp_makes_optimizers_anew(module: ModuleType, patch: Patch) -> None:
    """TorchFSDPPlugin makes the optimizer anew from those of its defaults that its constructor takes.

    Without it: TypeError: AdamW.__init__() got an unexpected keyword argument 'decoupled_weight_decay'. No longer
    needed when the plugin boosts a model with torch.optim.AdamW.
    """
    if not _unknown_defaults(AdamW([torch.zeros(1)])):
        return
    upstream = module.TorchFSDPPlugin.configure

    @functools.wraps(upstream)
    def configure(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Any, **named: Any) -> tuple:
        if optimizer is not None:
            for name in _unknown_defaults(optimizer):
                del optimizer.defaults[name]  # its constructor sets it again
        return upstream(self, model, optimizer, *others, **named)

    patch.set(module.TorchFSDPPlugin, "configure", configure)


@mend(
    module=_FSDP_PLUGIN,
    place="booster/plugin/torch_fsdp_plugin.py:553",
    needed_when="a parameter group has other options than its optimizer's defaults, as a warm-up of the learning rate "
    "makes it, or there are several",
)
def fsdp_keeps_parameter_groups(module: ModuleType, patch: Patch) -> None:
    """TorchFSDPPlugin keeps the optimizer's parameter groups with their options: rates, decay, `initial_lr`.

    Without it there is one group, with the optimizer's defaults: the first step after a warm-up's start is taken at the
    full learning rate, and a schedule of several groups raises ValueError: zip() argument 2 is longer than argument 1
    (PyTorch 2.13). FSDP flattens the parameters of a unit to one unless it is told to keep the original ones; several
    groups need these. No longer needed when the groups and their options are the same after boost.
    """
    upstream = module.TorchFSDPPlugin.configure

    @functools.wraps(upstream)
    def configure(self, model: nn.Module, optimizer: Optimizer | None = None, *others: Any, **named: Any) -> tuple:
        groups = [] if optimizer is None else optimizer.param_groups
        if len(groups) > 1:
            # one group, for which upstream does not warn
            optimizer.param_groups = [{**groups[0], "params": list(model.parameters())}]
            native, self.fsdp_kwargs = self.fsdp_kwargs, self.fsdp_kwargs | {"use_orig_params": True}
        try:
            boosted = upstream(self, model, optimizer, *others, **named)
        finally:
            if len(groups) > 1:
                self.fsdp_kwargs = native
        if len(groups) == 1:
            options = {name: value for name, value in groups[0].items() if name != "params"}
            boosted[1].param_groups[0].update(options)
        elif groups:
            optimizer.param_groups = groups
        return boosted

    patch.set(module.TorchFSDPPlugin, "configure", configure)


def _unknown_defaults(optimizer: Optimizer) -> set[str]:
    """The defaults of an optimizer that its constructor does not take."""
    parameters = inspect.signature(type(optimizer)).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return set()
    return optimizer.defaults.keys() - parameters.keys()


@mend(module=_FSDP_PLUGIN, place="booster/plugin/torch_fsdp_plugin.py:533", needed_when="no CUDA or NPU device")
def fsdp_runs_on_cpu(module: ModuleType, patch: Patch) -> None:
    """TorchFSDPPlugin shards a model on the CPU where there is no GPU.

    Without it: AssertionError: Torch not compiled with CUDA enabled (or RuntimeError: no NVIDIA driver). No longer
    needed when the plugin boosts a model on a machine without a GPU.
    """
    from colossalai.accelerator import get_accelerator

    if get_accelerator().name != "cpu":
        return
    # configure asks torch.cuda.current_device() itself: this module alone sees another torch.cuda
    on_cpu = ModuleType("torch")
    vars(on_cpu).update(vars(torch), cuda=SimpleNamespace(current_device=lambda: torch.device("cpu")))
    patch.set(module, "torch", on_cpu)


@mend(module=_FSDP_PLUGIN, place="booster/plugin/torch_fsdp_plugin.py:414", needed_when="gradients are clipped by norm")
def fsdp_clips_by_the_whole_norm(module: ModuleType, patch: Patch) -> None:
    """FSDP's optimizer clips by the norm of the whole gradient, the same on every rank.

    Without it each rank clips its part of the gradient by that part's norm. No longer needed when
    `optimizer.clip_grad_by_norm` returns the same norm on all ranks.
    """
    if "clip_grad_by_norm" in vars(module.FSDPOptimizerWrapper):
        return

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *_: Any, **__: Any
    ) -> torch.Tensor:
        norm = self.model.module.clip_grad_norm_(max_norm, norm_type)
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped by it")
        return norm

    patch.set(module.FSDPOptimizerWrapper, "clip_grad_by_norm", clip_grad_by_norm)


@mend(module=_FSDP_PLUGIN, place="booster/plugin/torch_fsdp_plugin.py:100", needed_when="no CUDA or NPU device")
def fsdp_saves_on_cpu(module: ModuleType, patch: Patch) -> None:
    """TorchFSDPPlugin saves a model that lies on the CPU without moving it there.

    Without it saving raises RuntimeError: setStorage: ... out of bounds for storage of size 0, since FSDP frees what it
    took for the copy on the GPU. No longer needed when a model is saved on a machine without a GPU.
    """
    from colossalai.accelerator import get_accelerator

    if get_accelerator().name != "cpu":
        return
    patch.set(
        module,
        "FullStateDictConfig",
        lambda offload_to_cpu, rank0_only: FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only),
    )


@mend(
    module="colossalai.checkpoint_io.utils", place="checkpoint_io/utils.py:420,450", needed_when="no CUDA or NPU device"
)
def fsdp_shards_are_not_pinned(module: ModuleType, patch: Patch) -> None:
    """`use_async=True` splits a whole state dict, as FSDP's is, without pinning memory where there is no device for it.

    Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator backend. No longer needed when
    `shard_model_checkpoint(..., pinned_state_dicts={})` can be iterated on a machine without a GPU.
    """
    if module.get_accelerator().name != "cpu":
        return
    for name in ("shard_model_checkpoint", "shard_optimizer_checkpoint"):
        patch.set_function(module, name, _without_pinned_memory(getattr(module, name)))


def _without_pinned_memory(split: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(split)
    def unpinned(state_dict: dict, max_shard_size: int = 1024, pinned_state_dicts: dict | None = None) -> Any:
        return split(state_dict, max_shard_size)

    return unpinned
