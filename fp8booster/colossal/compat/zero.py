"""Patches of ZeRO and Gemini, and of the optimizers and the loss that they run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from time import time
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import torch
from torch import nn

from fp8booster.colossal.compat.accelerator import NO_DEVICE, get_accelerator, patch_on_cpu, wrap_on_cpu
from fp8booster.colossal.compat.environment import local_world_size
from fp8booster.colossal.compat.registry import Kind, Replacements, patch, wrap
from fp8booster.colossal.temporarily import temporarily
from fp8booster.optim.one_pass import OURS

_ZERO = "zero.low_level.low_level_optim"
_OPTIMIZER = "zero.gemini.gemini_optimizer:GeminiOptimizer"


@patch(_ZERO, "254", NO_DEVICE, kind=Kind.CPU)
def zero_runs_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """Without it: AssertionError: device is required."""
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


@wrap_on_cpu(f"{_ZERO}:LowLevelZeroOptimizer._run_reduction", "343")
def zero_overlaps_without_streams(upstream: Callable, self: Any) -> None:
    """Without it `Tensor.record_stream`, which no CPU tensor has, raises RuntimeError: unknown parameter type."""
    # the flag alone decides about streams here; hooks have started the reduction during backward already
    with temporarily(self, _overlap_communication=False):
        upstream(self)


@wrap(
    f"{_ZERO}:LowLevelZeroOptimizer.__init__",
    "105",
    "a pipeline stage holds no parameter of the optimizer's first group, or that group is empty",
)
def zero_runs_where_a_group_is_empty(upstream: Callable, self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
    """Without it a rank without parameters of the first group raises IndexError: list index out of range, and the other
    stages wait for it for ever.
    """
    groups = optimizer.param_groups
    if not groups[0]["params"]:
        # it reads the dtype there, and drops what is frozen afterwards
        trained = [parameter for group in groups for parameter in group["params"]]
        dtype = trained[0].dtype if trained else torch.float32
        groups[0]["params"] = [nn.Parameter(torch.empty(0, dtype=dtype, device="cpu"), requires_grad=False)]
    upstream(self, optimizer, *args, **kwargs)


class _Stream(torch.cpu.Stream):
    """The CPU's only stream, on which all work has ended when a call returns."""

    def synchronize(self) -> None:
        """Return at once."""


class _Accelerator:
    """The CPU's accelerator, told from the host by its name and by its device's index."""

    name = "cuda"

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def get_current_device(self) -> torch.device:
        return torch.device("cpu", 0)

    def Stream(self, *args: Any, **kwargs: Any) -> _Stream:
        return _Stream()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)


@patch_on_cpu("zero.gemini", "zero/gemini/chunk/chunk.py:201,304,329,369")
def gemini_runs_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """Without it, since the device's type decides: RuntimeError: pin_memory=True requires a CUDA or other accelerator
    backend, and shards that were offloaded are not found again.
    """
    accelerator = _Accelerator(get_accelerator())
    for name, other in list(sys.modules.items()):
        if name.startswith(module.__name__) and hasattr(other, "get_accelerator"):
            replacements.set(other, "get_accelerator", lambda: accelerator)

    # pinned memory speeds copies to a GPU up, and there is none
    def construct(upstream: Callable, self: Any, *args: Any, pin_memory: bool = False, **kwargs: Any) -> None:
        upstream(self, *args, pin_memory=False, **kwargs)

    def close(upstream: Callable, self: Any) -> None:
        upstream(self)
        if self.shard_device.index is not None and not self.keep_gathered:
            self.cuda_shard, self.cpu_shard = self.cpu_shard, None

    def move_shard(upstream: Callable, self: Any, device: torch.device, *args: Any, **kwargs: Any) -> None:
        # the index tells the "GPU" from the host here: both are the CPU
        if device.index is None:
            upstream(self, device, *args, **kwargs)
        elif not self.optim_sync_flag:
            self._Chunk__paired_shard_move()
            self.optim_sync_flag = True
        elif self.cuda_shard is None:
            self.cuda_shard, self.cpu_shard = self.cpu_shard.clone(), None

    def move_chunk(
        upstream: Callable,
        self: Any,
        chunk: Any,
        device: torch.device,
        force_copy: bool = False,
        async_move: bool = False,
    ) -> None:
        on_host = chunk.device_type == "cpu"
        if chunk.can_move and on_host != (device.index is None):
            self._ChunkManager__sub_memory_usage(chunk.memory_usage)
            chunk.shard_move(device, force_copy)
            self._ChunkManager__add_memory_usage(chunk.memory_usage)

    chunks, managers = (sys.modules[f"{module.__name__}.chunk.{name}"] for name in ("chunk", "manager"))
    replacements.wrap(chunks, "Chunk.__init__", construct)
    replacements.wrap(chunks, "Chunk.close_chunk", close)
    replacements.wrap(chunks, "Chunk.shard_move", move_shard)
    replacements.wrap(managers, "ChunkManager.move_chunk", move_chunk)


@patch_on_cpu("zero.gemini.memory_tracer.memory_monitor", "130-148")
def gemini_measures_memory_on_cpu(module: ModuleType, replacements: Replacements) -> None:
    """Without it CUDA's absence raises."""
    accelerator = get_accelerator()

    def start(self) -> None:
        accelerator.reset_peak_memory_stats()

    def finish(self) -> int:
        self.time_stamps.append(time())
        self.mem_stats.append(accelerator.max_memory_allocated())
        return self.mem_stats[-1]

    replacements.set(module.SyncCudaMemoryMonitor, "start", start)
    replacements.set(module.SyncCudaMemoryMonitor, "finish", finish)


@wrap(
    "legacy.utils.memory:colo_device_memory_capacity",
    "110",
    NO_DEVICE,
    kind=Kind.CPU,
    only_if=lambda module: module.gpc.num_processes_on_current_node == -1,
)
def memory_of_the_cpu_is_shared(upstream: Callable, device: torch.device) -> float:
    """Without it the number of processes is the -1 that nothing has set, and placement_policy="auto" finds that it has
    less than no memory.
    """
    return psutil.virtual_memory().total / local_world_size() if device.type == "cpu" else upstream(device)


@patch("zero.gemini.gemini_optimizer", "43", "Gemini trains with an optimizer that needs no compiler", kind=Kind.FP8)
def gemini_takes_an_uncompiled_optimizer(module: ModuleType, replacements: Replacements) -> None:
    """Without it: AssertionError: You should use an optimizer in the available list, all of which need a compiler for
    the machine's GPU and processor. No longer needed when one of them runs without, and finds amaxes.
    """
    replacements.set(module, "_AVAIL_OPTIM_LIST", {*module._AVAIL_OPTIM_LIST, *OURS})


@wrap("nn.optimizer.hybrid_adam:HybridAdam.step", "126", "Gemini offloads the optimizer in BF16")
def offloaded_gradients_are_scaled(upstream: Callable, self: Any, closure: Any = None, div_scale: float = -1) -> Any:
    """Without it clipping does nothing to BF16 gradients on the host."""
    # -1 is Colossal-AI's word for a division by nothing
    for parameter in (each for group in self.param_groups for each in group["params"] if div_scale > 0):
        gradient = parameter.grad
        if gradient is not None and (gradient.device.type, gradient.dtype) == ("cpu", torch.bfloat16):
            gradient.data.div_(div_scale)
    return upstream(self, closure, div_scale)


@wrap(f"{_OPTIMIZER}.step", "240-247", "Gemini accumulates gradients in FP16")
def gemini_forgets_gradients_that_overflowed(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Without it the next backward adds to gradients that are infinite, so that every step from then on is skipped."""
    result = upstream(self, *args, **kwargs)
    self.module.chunk_manager.accumulating_grads = False
    return result


@wrap("zero.gemini.gemini_ddp:GeminiDDP._post_forward", "260-272", "Gemini evaluates with max_prefetch")
def evaluation_leaves_nothing_on_the_way(upstream: Callable, self: Any) -> None:
    """Without it the next forward takes such a chunk for a gathered one and reads memory that is gone: a crash at the
    second evaluation, or at the next training step.
    """
    works = self.gemini_manager.async_works
    # waited for and not dropped: a gather under way writes into memory that is released next
    for work in works.values():
        work.wait()
    works.clear()
    upstream(self)


@wrap(
    "zero.gemini.chunk.manager:ChunkManager.rearrange_accumulated_grad_chunk",
    "287-289",
    "Gemini accumulates gradients in a chunk that is kept gathered, as all are in small models",
)
def accumulated_gradients_count_once(upstream: Callable, self: Any, chunk: Any) -> Any:
    """Without it gradients of earlier micro-batches weigh more: each rank adds them before the sum over ranks, which
    the division by their number undoes, and a factor is applied that is right for shards, which one rank adds.
    """
    if chunk.grad_chunk is not None and chunk.grad_chunk.is_gathered:
        chunk.grad_chunk.cuda_global_chunk.div_(chunk.pg_size)
    return upstream(self, chunk)


_SHARDING = ("dist_layout", "shard_fn", "gather_fn", "_padding_dim")
"""Attributes of a parameter that tensor parallelism has sharded or padded."""


@wrap(f"{_OPTIMIZER}.collect_states", "545-568", "Gemini saves an optimizer under tensor parallelism")
def tensor_parallel_states_are_gathered(
    upstream: Callable, self: Any, param_id: int, only_rank_0: bool = True
) -> dict[str, torch.Tensor]:
    """Without it the number of steps is taken for a sharded tensor: AssertionError: Cannot compare difference for two
    sharding specs with different length; and of what is gathered nothing is kept.
    """
    parameter = self.id_to_real_params[param_id]
    sharding = {name: vars(parameter)[name] for name in _SHARDING if name in vars(parameter)}
    if not sharding or self.chunk_manager.get_chunk(parameter).keep_gathered:
        return upstream(self, param_id, only_rank_0)
    # without these upstream takes the parameter for a whole one, and collects the states as they are
    for name in sharding:
        delattr(parameter, name)
    try:
        states = upstream(self, param_id, only_rank_0)
    finally:
        for name, value in sharding.items():
            setattr(parameter, name, value)
    return {name: state if name == "step" else _whole(state, parameter) for name, state in states.items()}


def _whole(state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    from colossalai.tensor import d_tensor, padded_tensor
    from colossalai.zero.gemini.gemini_optimizer import gather_distributed_param

    state = state.reshape(parameter.shape).to(parameter.device)
    if d_tensor.is_distributed_tensor(parameter):
        state = d_tensor.init_as_dtensor(
            state,
            device_mesh=d_tensor.get_device_mesh(parameter),
            sharding_spec=d_tensor.get_sharding_spec(parameter),
            global_shape=d_tensor.get_global_shape(parameter),
        )
    elif d_tensor.is_customized_distributed_tensor(parameter):
        d_tensor.init_tensor_as_customization_distributed(
            state, shard_fn=parameter.shard_fn, gather_fn=parameter.gather_fn
        )
    state = gather_distributed_param(state, keep_vars=False).cpu()
    if padded_tensor.is_padded_tensor(parameter):
        lengths = parameter._current_length, parameter._origin_length, parameter._padding_dim
        state = padded_tensor.to_unpadded_tensor(padded_tensor.init_as_padded_tensor(state, *lengths))
    return state
