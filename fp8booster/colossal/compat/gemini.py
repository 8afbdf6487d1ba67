"""Mends of Gemini."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from time import time
from types import ModuleType
from typing import Any

import psutil
import torch

from fp8booster.colossal.compat.distributed import _local_world_size
from fp8booster.colossal.compat.registry import mend
from fp8booster.colossal.patch import Patch
from fp8booster.optim import HybridAdam

_GEMINI = "colossalai.zero.gemini"


def get_accelerator() -> Any:
    """colossalai's, once it can be imported."""
    from colossalai.accelerator import get_accelerator

    return get_accelerator()


@mend(
    module=f"{_GEMINI}.gemini_optimizer",
    place="zero/gemini/gemini_optimizer.py:43",
    needed_when="colossalai's optimizers cannot be compiled",
)
def gemini_takes_an_uncompiled_optimizer(module: ModuleType, patch: Patch) -> None:
    """Gemini accepts `fp8booster.optim.HybridAdam` beside FusedAdam, CPUAdam and HybridAdam.

    Without it: AssertionError: You should use an optimizer in the available list, all of which need a compiler for the
    machine's GPU and processor. No longer needed when one of them runs without.
    """
    patch.set(module, "_AVAIL_OPTIM_LIST", {*module._AVAIL_OPTIM_LIST, HybridAdam})


@mend(
    module="colossalai.nn.optimizer.hybrid_adam",
    place="nn/optimizer/hybrid_adam.py:126",
    needed_when="Gemini offloads the optimizer in BF16",
)
def offloaded_gradients_are_scaled(module: ModuleType, patch: Patch) -> None:
    """BF16 gradients on the host are divided by `div_scale` in HybridAdam, as all others are.

    Without it clipping does nothing to them. No longer needed when `HybridAdam.step(div_scale=2.0)` halves such a
    gradient.
    """
    upstream = module.HybridAdam.step

    @functools.wraps(upstream)
    def step(self, closure: Any = None, div_scale: float = -1) -> Any:
        if div_scale > 0:
            for group in self.param_groups:
                for parameter in group["params"]:
                    gradient = parameter.grad
                    if gradient is not None and (gradient.device.type, gradient.dtype) == ("cpu", torch.bfloat16):
                        gradient.data.div_(div_scale)
        return upstream(self, closure, div_scale)

    patch.set(module.HybridAdam, "step", step)


@mend(
    module=f"{_GEMINI}.gemini_optimizer",
    place="zero/gemini/gemini_optimizer.py:240-247",
    needed_when="Gemini accumulates gradients in FP16",
)
def gemini_forgets_gradients_that_overflowed(module: ModuleType, patch: Patch) -> None:
    """A skipped step ends the accumulation of gradients, as any other step does.

    Without it the next backward adds to gradients that are infinite, so that every step from then on is skipped. No
    longer needed when `chunk_manager.accumulating_grads` is False after a step that was skipped.
    """
    upstream = module.GeminiOptimizer.step

    @functools.wraps(upstream)
    def step(self, *args: Any, **kwargs: Any) -> Any:
        result = upstream(self, *args, **kwargs)
        self.module.chunk_manager.accumulating_grads = False
        return result

    patch.set(module.GeminiOptimizer, "step", step)


@mend(
    module=f"{_GEMINI}.gemini_ddp",
    place="zero/gemini/gemini_ddp.py:260-272",
    needed_when="Gemini evaluates with max_prefetch",
)
def evaluation_leaves_nothing_on_the_way(module: ModuleType, patch: Patch) -> None:
    """What the last operator of an evaluation fetches ahead has arrived, and is forgotten, before chunks are released.

    Without it the next forward takes such a chunk for a gathered one and reads memory that is gone: a crash at the
    second evaluation, or at the next training step. No longer needed when `gemini_manager.async_works` is empty after
    a forward without gradients.
    """
    upstream = module.GeminiDDP._post_forward

    @functools.wraps(upstream)
    def _post_forward(self) -> None:
        works = self.gemini_manager.async_works
        for work in works.values():
            work.wait()
        works.clear()
        upstream(self)

    patch.set(module.GeminiDDP, "_post_forward", _post_forward)


@mend(
    module=f"{_GEMINI}.chunk.manager",
    place="zero/gemini/chunk/manager.py:287-289",
    needed_when="Gemini accumulates gradients in a chunk that is kept gathered, as all are in small models",
)
def accumulated_gradients_count_once(module: ModuleType, patch: Patch) -> None:
    """Gradients of earlier micro-batches that every rank holds are not multiplied by the number of ranks.

    Without it they weigh more: each rank adds them before the sum over ranks, which the division by their number
    undoes, and a factor is applied that is right for shards, which one rank adds. No longer needed when a model under
    `min_chunk_size_m` gives the same gradients from two micro-batches as from one batch of both.
    """
    upstream = module.ChunkManager.rearrange_accumulated_grad_chunk

    @functools.wraps(upstream)
    def rearrange_accumulated_grad_chunk(self, chunk: Any) -> Any:
        if chunk.grad_chunk is not None and chunk.grad_chunk.is_gathered:
            chunk.grad_chunk.cuda_global_chunk.div_(chunk.pg_size)
        return upstream(self, chunk)

    patch.set(module.ChunkManager, "rearrange_accumulated_grad_chunk", rearrange_accumulated_grad_chunk)


_SHARDING = ("dist_layout", "shard_fn", "gather_fn", "_padding_dim")
"""What a parameter carries that tensor parallelism has sharded or padded."""


@mend(
    module=f"{_GEMINI}.gemini_optimizer",
    place="zero/gemini/gemini_optimizer.py:545-568",
    needed_when="Gemini saves an optimizer under tensor parallelism",
)
def tensor_parallel_states_are_gathered(module: ModuleType, patch: Patch) -> None:
    """States of parameters that tensor parallelism has sharded are collected whole.

    Without it the number of steps is taken for a sharded tensor: AssertionError: Cannot compare difference for two
    sharding specs with different length; and of what is gathered nothing is kept. No longer needed when
    `GeminiOptimizer.state_dict()` returns with tp_size=2.
    """
    upstream = module.GeminiOptimizer.collect_states

    @functools.wraps(upstream)
    def collect_states(self, param_id: int, only_rank_0: bool = True) -> dict[str, torch.Tensor]:
        parameter = self.id_to_real_params[param_id]
        sharding = {name: vars(parameter)[name] for name in _SHARDING if name in vars(parameter)}
        if not sharding or self.chunk_manager.get_chunk(parameter).keep_gathered:
            return upstream(self, param_id, only_rank_0)
        for name in sharding:
            delattr(parameter, name)
        try:
            states = upstream(self, param_id, only_rank_0)
        finally:
            for name, value in sharding.items():
                setattr(parameter, name, value)
        return {name: state if name == "step" else whole(state, parameter) for name, state in states.items()}

    def whole(state: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
        state = state.reshape(parameter.shape).to(parameter.device)
        if module.is_distributed_tensor(parameter):
            state = module.init_as_dtensor(
                state,
                device_mesh=module.get_device_mesh(parameter),
                sharding_spec=module.get_sharding_spec(parameter),
                global_shape=module.get_global_shape(parameter),
            )
        elif module.is_customized_distributed_tensor(parameter):
            module.init_tensor_as_customization_distributed(
                state, shard_fn=parameter.shard_fn, gather_fn=parameter.gather_fn
            )
        state = module.gather_distributed_param(state, keep_vars=False).cpu()
        if module.is_padded_tensor(parameter):
            lengths = parameter._current_length, parameter._origin_length, parameter._padding_dim
            state = module.to_unpadded_tensor(module.init_as_padded_tensor(state, *lengths))
        return state

    patch.set(module.GeminiOptimizer, "collect_states", collect_states)


@mend(
    module="colossalai.shardformer.layer.loss",
    place="shardformer/layer/loss.py:132; tensor/colo_tensor.py:6",
    needed_when="Gemini trains with tensor parallelism",
)
def loss_of_a_sharded_vocabulary_scales_its_gradient(module: ModuleType, patch: Patch) -> None:
    """The gradient of the loss over a sharded vocabulary is that of the mean over tokens, under Gemini too.

    Without it all gradients are as many times too large as there are tokens: the scaling in place makes a copy that is
    dropped, since in ColoTensors, which Gemini's activations are, `mul_` is a `mul`. No longer needed when
    `cross_entropy_1d` of a ColoTensor has the gradient that it has of a tensor.
    """
    upstream = module.DistCrossEntropy.backward

    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple:
        with torch._C.DisableTorchFunction():
            return upstream(ctx, grad_output)

    patch.set(module.DistCrossEntropy, "backward", staticmethod(backward))


@mend(
    module="colossalai.shardformer.layer.loss",
    place="shardformer/layer/loss.py:232",
    needed_when="Gemini trains with tensor parallelism",
)
def loss_is_of_the_ranks_own_tokens(module: ModuleType, patch: Patch) -> None:
    """The loss is summed over the ranks that share a sequence, which is no other where no group is named.

    Without it all ranks of the job are taken where none is named, as Gemini does: gradients are divided by their
    number. No longer needed when `dist_cross_entropy` with `ShardConfig(enable_tensor_parallelism=False)` is that of
    its arguments.
    """
    upstream = module.reduce_forward

    @functools.wraps(upstream)
    def reduce_forward(input_: torch.Tensor, process_group: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return input_ if process_group is None else upstream(input_, process_group, *args, **kwargs)

    patch.set(module, "reduce_forward", reduce_forward)


class _Stream(torch.cpu.Stream):
    """The CPU's only stream, on which all work has ended when a call returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


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


@mend(module=_GEMINI, place="zero/gemini/chunk/chunk.py:201,304,329,369", needed_when="no CUDA or NPU device")
def gemini_runs_on_cpu(module: ModuleType, patch: Patch) -> None:
    """Gemini keeps apart what lies on the accelerator and what is offloaded where both are the CPU's memory.

    It decides by the device's type. Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator
    backend, and shards that were offloaded are not found again. No longer needed when GeminiPlugin trains
    on a machine without a GPU.
    """
    if get_accelerator().name != "cpu":
        return
    chunk_module = sys.modules[f"{_GEMINI}.chunk.chunk"]
    accelerator = _Accelerator(get_accelerator())
    for name, other in list(sys.modules.items()):
        if name.startswith(_GEMINI) and hasattr(other, "get_accelerator"):
            patch.set(other, "get_accelerator", lambda: accelerator)

    chunk_class, manager_class = chunk_module.Chunk, sys.modules[f"{_GEMINI}.chunk.manager"].ChunkManager
    construct, close = chunk_class.__init__, chunk_class.close_chunk
    shard_move, move_chunk = chunk_class.shard_move, manager_class.move_chunk

    @functools.wraps(construct)
    def __init__(self, *args: Any, pin_memory: bool = False, **kwargs: Any) -> None:
        construct(self, *args, pin_memory=False, **kwargs)

    @functools.wraps(close)
    def close_chunk(self) -> None:
        close(self)
        if self.shard_device.index is not None and not self.keep_gathered:
            self.cuda_shard, self.cpu_shard = self.cpu_shard, None

    @functools.wraps(shard_move)
    def move_shard(self, device: torch.device, force_copy: bool = False, non_blocking: bool = False) -> None:
        if device.index is None:
            shard_move(self, device, force_copy, non_blocking)
        elif not self.optim_sync_flag:
            self._Chunk__paired_shard_move()
            self.optim_sync_flag = True
        elif self.cuda_shard is None:
            self.cuda_shard, self.cpu_shard = self.cpu_shard.clone(), None

    @functools.wraps(move_chunk)
    def move(self, chunk: Any, device: torch.device, force_copy: bool = False, async_move: bool = False) -> None:
        on_host = chunk.device_type == "cpu"
        if chunk.can_move and on_host != (device.index is None):
            self._ChunkManager__sub_memory_usage(chunk.memory_usage)
            chunk.shard_move(device, force_copy)
            self._ChunkManager__add_memory_usage(chunk.memory_usage)

    patch.set(chunk_class, "__init__", __init__)
    patch.set(chunk_class, "close_chunk", close_chunk)
    patch.set(chunk_class, "shard_move", move_shard)
    patch.set(manager_class, "move_chunk", move)


@mend(
    module=_GEMINI,
    place="zero/gemini/gemini_ddp.py:929,950; zero/gemini/gemini_optimizer.py:838",
    needed_when="no CUDA or NPU device",
)
def gemini_states_are_not_pinned(module: ModuleType, patch: Patch) -> None:
    """Gemini saves in the background (`use_async=True`) from plain memory where there is no device to pin it for.

    Without it: RuntimeError: pin_memory=True requires a CUDA or other accelerator backend. No longer needed when
    `GeminiDDP.state_dict_shard(pinned_state_dicts={})` yields on a machine without a GPU.
    """
    if get_accelerator().name != "cpu":
        return

    def without_pinning(upstream: Callable[..., Iterator]) -> Callable[..., Iterator]:
        @functools.wraps(upstream)
        def shards(self, *args: Any, pinned_state_dicts: dict | None = None, **kwargs: Any) -> Iterator:
            return upstream(self, *args, **kwargs)

        return shards

    patch.set(module.GeminiDDP, "state_dict_shard", without_pinning(module.GeminiDDP.state_dict_shard))
    patch.set(module.GeminiOptimizer, "state_shard", without_pinning(module.GeminiOptimizer.state_shard))


@mend(
    module=f"{_GEMINI}.memory_tracer.memory_monitor",
    place="zero/gemini/memory_tracer/memory_monitor.py:130-148",
    needed_when="no CUDA or NPU device",
)
def gemini_measures_memory_on_cpu(module: ModuleType, patch: Patch) -> None:
    """placement_policy="auto" asks the accelerator, not CUDA, for the peak of its memory.

    Without it CUDA's absence raises. No longer needed when `SyncCudaMemoryMonitor().start()` returns on a machine
    without a GPU.
    """
    accelerator = get_accelerator()
    if accelerator.name != "cpu":
        return

    def start(self) -> None:
        accelerator.reset_peak_memory_stats()

    def finish(self) -> int:
        self.time_stamps.append(time())
        self.mem_stats.append(accelerator.max_memory_allocated())
        return self.mem_stats[-1]

    patch.set(module.SyncCudaMemoryMonitor, "start", start)
    patch.set(module.SyncCudaMemoryMonitor, "finish", finish)


@mend(module="colossalai.legacy.utils.memory", place="legacy/utils/memory.py:110", needed_when="no CUDA or NPU device")
def memory_of_the_cpu_is_shared(module: ModuleType, patch: Patch) -> None:
    """The capacity of a rank on the CPU is its part of the machine's memory.

    Without it the number of processes is the -1 that nothing has set, and placement_policy="auto" finds that it has
    less than no memory. No longer needed when `colo_device_memory_capacity(torch.device("cpu"))` is positive.
    """
    upstream = module.colo_device_memory_capacity
    if module.gpc.num_processes_on_current_node != -1:
        return

    def colo_device_memory_capacity(device: torch.device) -> float:
        if device.type != "cpu":
            return upstream(device)
        return psutil.virtual_memory().total / _local_world_size()

    patch.set_function(module, "colo_device_memory_capacity", colo_device_memory_capacity)
