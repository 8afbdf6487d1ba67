"""Patches of ZeRO, FSDP and shardformer's layers, which ask for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullStateDictConfig

from fp8booster.colossal.compat.cpu.no_device import NO_DEVICE, no_device
from fp8booster.colossal.compat.registry import patch, wrap
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.colossal.temporarily import temporarily

_ZERO = "zero.low_level.low_level_optim"
_FSDP = "booster.plugin.torch_fsdp_plugin"


@patch(_ZERO, "254", needed_when=NO_DEVICE)
def zero_runs_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """LowLevelZeroOptimizer accepts the CPU accelerator.

    Without it: AssertionError: device is required.
    """
    try:
        module.LowLevelZeroOptimizer._sanity_checks(SimpleNamespace(optim=SimpleNamespace(param_groups=[])))
        return
    except AssertionError:
        pass

    def _sanity_checks(self) -> None:
        for parameter in (p for group in self.optim.param_groups for p in group["params"]):
            if parameter.dtype != self._dtype and not getattr(parameter, "skip_zero_check", False):
                raise ValueError(
                    f"ZeRO needs parameters of one dtype, but got {parameter.dtype} beside {self._dtype}; "
                    "convert the model before boosting it"
                )

    replacements.set(module.LowLevelZeroOptimizer, "_sanity_checks", _sanity_checks)


@wrap(f"{_ZERO}:LowLevelZeroOptimizer._run_reduction", "343", needed_when=NO_DEVICE, only_if=no_device)
def zero_overlaps_without_streams(upstream: Callable, self: Any) -> None:
    """overlap_communication, on by default, reduces buckets during backward on CPU too, on no side stream.

    Without it `Tensor.record_stream`, which no CPU tensor has, raises RuntimeError: unknown parameter type.
    """
    with temporarily(self, _overlap_communication=False):
        upstream(self)


@patch(_FSDP, "533", needed_when=NO_DEVICE)
def fsdp_runs_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """TorchFSDPPlugin shards a model on the CPU where there is no GPU.

    Without it: AssertionError: Torch not compiled with CUDA enabled (or RuntimeError: no NVIDIA driver).
    """
    if no_device(module):
        # configure asks torch.cuda.current_device() itself: this module alone sees another torch.cuda
        on_cpu = ModuleType("torch")
        vars(on_cpu).update(vars(torch), cuda=SimpleNamespace(current_device=lambda: torch.device("cpu")))
        replacements.set(module, "torch", on_cpu)


@patch(_FSDP, "100", needed_when=NO_DEVICE)
def fsdp_saves_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """TorchFSDPPlugin saves a model that lies on the CPU without moving it there.

    Without it saving raises RuntimeError: setStorage: ... out of bounds for storage of size 0, since FSDP frees what it
    took for the copy on the GPU.
    """

    def config(offload_to_cpu: bool, rank0_only: bool) -> FullStateDictConfig:
        return FullStateDictConfig(offload_to_cpu=False, rank0_only=rank0_only)

    if no_device(module):
        replacements.set(module, "FullStateDictConfig", config)


@wrap(
    "torch.cuda:set_device",
    "shardformer/modeling/gpt2.py:258, opt.py:208, t5.py:177",
    needed_when="no CUDA device",
    only_if=lambda module: not module.is_available(),
)
def a_cpu_is_no_cuda_device_to_set(upstream: Callable, device: Any) -> None:
    """`torch.cuda.set_device` leaves the device as it is when given a CPU.

    Without it GPT-2, OPT and T5 raise ValueError: Expected a cuda device, but got: cpu.
    """
    if not (isinstance(device, torch.device) and device.type == "cpu"):
        upstream(device)


@wrap(
    "shardformer.layer.qkv_fused_linear:gather_fused_qkv_in_gpt2_style",
    "125",
    needed_when="no CUDA device",
    only_if=lambda module: not torch.cuda.is_available(),
)
def fused_weights_are_gathered_on_cpu(
    upstream: Callable,
    qkv: torch.Tensor,
    split_sizes: list[int],
    process_group: dist.ProcessGroup,
    is_transposed: bool = False,
) -> torch.Tensor:
    """Fused q, k, v weights are gathered, as for a checkpoint, on the device that they are on.

    Without it: AssertionError: Torch not compiled with CUDA enabled, or no NVIDIA driver.
    """
    ranks, dimension = dist.get_world_size(process_group), -1 if is_transposed else 0
    parts = [torch.empty_like(qkv, memory_format=torch.contiguous_format) for _ in range(ranks)]
    dist.all_gather(parts, qkv.contiguous(), group=process_group)
    pieces = [part.split([size // ranks for size in split_sizes], dimension) for part in parts]
    # all ranks' q, then all ranks' k, then all ranks' v
    return torch.cat([piece for fused in zip(*pieces, strict=True) for piece in fused], dimension)
