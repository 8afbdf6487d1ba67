"""Gemini's model wrapper with FP8 chunks.

`FP8GeminiDDP._keep_gradient` stands in the place of `GeminiDDP.grad_handle` (zero/gemini/gemini_ddp.py:359), which
takes one way for all chunks. Here the gradients of 16-bit weights take the weights' place where nothing accumulates, as
there, and those of FP8 weights have memory of their own. Earlier micro-batches are added to after the reduction, so
that a sum is not rounded again and again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.logging import DistributedLogger
from colossalai.shardformer.layer.utils import SeqParallelUtils
from colossalai.utils import is_ddp_ignored
from colossalai.zero.gemini import GeminiDDP
from colossalai.zero.gemini.chunk import Chunk, TensorState
from torch import nn
from torch.utils._pytree import tree_map_only

from fp8booster import comm
from fp8booster.colossal.gemini.chunks import FP8Chunk, ReducedChunk, take_memory
from fp8booster.colossal.gemini.groups import GroupedChunkManager, Plan
from fp8booster.colossal.gemini.layers import FP8GeminiHook, gather_for_layers
from fp8booster.colossal.gemini.masters import Masters, Part
from fp8booster.colossal.temporarily import temporarily
from fp8booster.comm import Encoding
from fp8booster.config import FP8Config
from fp8booster.reading import first_of


class QuietLogger:
    """Colossal-AI's logger, which hands on a debug message only if it is shown.

    Colossal-AI looks up every frame of the call stack, with its source, before it asks whether the message is shown
    (logging/logger.py: __get_call_info), and Gemini has one such message after each backward. It costs the host tens
    of milliseconds, more the more modules are imported.
    """

    def __init__(self, logger: DistributedLogger) -> None:
        self._shown = logger

    def debug(self, message: str, ranks: list[int] | None = None) -> None:
        """As `DistributedLogger.debug`."""
        if self._shown._logger.isEnabledFor(logging.DEBUG):
            self._shown.debug(message, ranks)

    def __getattr__(self, name: str) -> object:
        return getattr(self._shown, name)


class GatheringGeminiDDP(GeminiDDP):
    """GeminiDDP over FP8 layers, with native chunks: everything is sent in 16 bits.

    Args:
        module: converted to FP8 layers, and sharded where it shall be.
        tp_group: the ranks of tensor parallelism, or None.
        arguments: of GeminiDDP, its own FP8 off.
    """

    def __init__(self, module: nn.Module, *, tp_group: dist.ProcessGroup | None, **arguments: Any) -> None:
        if tp_group is not None:
            _sum_partial_gradients(module, tp_group)
        super().__init__(module, **arguments)
        self._logger = QuietLogger(self._logger)
        gather_for_layers(module)

    def _setup_grads_ptr(self) -> None:
        # Colossal-AI walks over all modules for their parameters
        with torch._C.DisableTorchFunction():
            for parameter in self.param2name:
                if not is_ddp_ignored(parameter):
                    parameter.grad = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        if not torch.is_inference_mode_enabled():
            return super().forward(*args, **kwargs)
        # chunks that are made in inference mode can never be changed again
        with torch.inference_mode(False), torch.no_grad():
            args, kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
            return super().forward(*args, **kwargs)


class FP8GeminiDDP(GatheringGeminiDDP):
    """GeminiDDP whose FP8 layers' weights lie in memory and are sent in FP8, and whose gradients are reduced in FP8.

    Args:
        module: converted to FP8 layers, and sharded where it shall be.
        config: of these layers.
        arguments: as in `GatheringGeminiDDP`.
    """

    def __init__(self, module: nn.Module, config: FP8Config, **arguments: Any) -> None:
        self._plan = Plan(module, config, arguments["master_weights"], arguments["mixed_precision"])
        self._built_in = {parameter: parameter.dtype for parameter in module.parameters()}
        self._encoding = config.messages or Encoding()
        policy, frac = arguments["placement_policy"], arguments["offload_param_frac"]
        self.offloads_weights = policy != "static" or frac > 0
        """Weights wait on the host for the next step, as their gradients do."""

        self.trained_since_step: set[nn.Parameter] = set()
        """Parameters that have got a gradient since the optimizer stepped last."""

        super().__init__(module, **arguments)
        self.param_op_hook = self.hooks[0] = FP8GeminiHook(self.gemini_manager)
        for parameter in module.parameters():
            if parameter.requires_grad and not is_ddp_ignored(parameter):
                # Colossal-AI's constructor has registered its own hook, which reduces in 16 bits
                parameter._grad_handle.remove()
                parameter._grad_handle = parameter.register_hook(partial(self._keep_gradient, parameter))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module.

        Raises:
            RuntimeError: gradients of an earlier backward lie where weights did.
        """
        if self.trained_since_step and self.chunk_manager.reuse_fp16_chunk:
            raise RuntimeError(
                "gradients lie where weights did until the optimizer steps; call step() or zero_grad() before the next "
                "forward, or give GeminiPlugin(enable_gradient_accumulation=True)"
            )
        return super().forward(*args, **kwargs)

    def _init_chunks(self, *args: Any, **kwargs: Any) -> None:
        ranks = dist.get_world_size(self.zero_group)
        gathered = self.chunk_manager.kwargs_config[ranks].get("keep_gathered", False)
        native_saves_masters = gathered and self.chunk_manager.reuse_fp16_chunk
        # before `_init_chunks` registers parameters, which decides about their chunks
        GroupedChunkManager.convert_in_place(self.chunk_manager, self._plan, self._encoding, ranks)
        super()._init_chunks(*args, **kwargs)
        self.fp8_chunks = [
            chunk for chunk in self.chunk_manager.get_chunks(self.fp16_params) if isinstance(chunk, FP8Chunk)
        ]
        self._dtypes_in_checkpoints = {
            master: torch.float32 if native_saves_masters else self._built_in[parameter]
            for parameter, master in zip(self.fp16_params, self.fp32_params, strict=False)
        }
        """By master, the dtype that the model was built in, or FP32 where Colossal-AI writes masters as they are, which
        is where all weights fit into a chunk. None without masters: then weights are written as they are."""

        self._masters = Masters(self.fp8_chunks, self._plan.layers, self._plan.merged)
        self.publish_masters()

    def publish_masters(self, known: Mapping[Part, torch.Tensor] | None = None) -> None:
        """Cast all FP8 weights from their masters; every rank calls it. `known` is as in `Masters.publish`."""
        self._masters.publish(known)

    def count_weights(self) -> tuple[int, int]:
        """Return (weights that are sent in FP8, all trained parameters)."""
        return sum(len(chunk.tensors_info) for chunk in self.fp8_chunks), len(self.fp16_params)

    def require_gradients(self) -> None:
        """Raise RuntimeError where a trained parameter has got no gradient since the optimizer stepped last.

        Else a chunk without gradients would be stepped by what lies in it: weights, or an earlier step's gradients.
        """
        self._raise_without(lambda parameter: parameter in self.trained_since_step)
        self.trained_since_step.clear()

    def _raise_without(self, has_gradient: Callable[[nn.Parameter], bool]) -> None:
        """Raise RuntimeError with the names of trained parameters that have no gradient, where there are some.

        Their chunks hold something else, or nothing.
        """
        without = [
            f"`{name}`"
            for parameter, name in self.param2name.items()
            if not (is_ddp_ignored(parameter) or has_gradient(parameter))
        ]
        if without:
            raise RuntimeError(
                f"no gradient for {first_of(without)}: Gemini trains a layer in every step or not at all; call "
                "requires_grad_(False) on layers that are not trained before booster.boost, or add 0 * output.sum() of "
                "a layer to the loss of the steps that do not use it"
            )

    def _keep_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> torch.Tensor:
        """Put a gradient into its chunk, and reduce the chunk if that was the last one missing.

        Returns:
            A gradient of the same shape without memory, for autograd.

        Raises:
            RuntimeError: something read the parameter past Gemini's hooks.
        """
        parameter._gemini_reduced = True
        self.trained_since_step.add(parameter)
        # Autograd checks the shape of what a hook returns, and would keep a real gradient beside the chunk. Contiguous,
        # as the gradient may not be: what lies otherwise than the parameter is copied, and there is nothing to read.
        placeholder = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        take_memory(placeholder)
        # Gemini gathers what a torch function reads, and this chunk is about to be released
        with torch._C.DisableTorchFunction():
            manager = self.chunk_manager
            chunk = manager.get_chunk(parameter)
            if chunk.tensors_info[parameter].state != TensorState.HOLD_AFTER_BWD:
                raise RuntimeError(
                    f"the gradient of `{self.param2name[parameter]}` came while its chunk was in use: an operator read "
                    "the parameter where Gemini does not see it; read it by torch functions alone"
                )
            instead = manager.takes_the_weights_place(chunk)
            target = chunk if instead else self._open(chunk)
            if not instead:
                chunk.set_state(parameter, TensorState.HOLD)
            target.set_state(parameter, TensorState.READY_FOR_REDUCE)
            target.copy_tensor_to_chunk_slice(parameter, gradient, update_ptr=instead)
            if not target.can_reduce:
                return placeholder
            if not instead:
                if chunk.keep_gathered:
                    manager.fake_release_chunk(chunk)
                else:
                    manager.release_chunk(chunk)
            stream = self.async_reduce_stream
            if stream is not None:
                # backward has written these gradients on the current stream
                stream.wait_stream(get_accelerator().current_stream())
            with get_accelerator().stream(stream):
                self._reduce(target, chunk, self.grads_device[parameter])
        return placeholder

    def _open(self, chunk: ReducedChunk) -> ReducedChunk:
        """Return the chunk for the gradients of this backward, with what earlier micro-batches gave beside it."""
        manager, target = self.chunk_manager, chunk.grad_chunk
        if target is not None and target in manager.accessed_chunks:
            return target
        earlier = None
        if manager.accumulating_grads and target is not None:
            # what stays gathered is written to again, a shard is not
            earlier = target.payload.clone() if target.is_gathered else target.payload
        target = manager.init_grad_chunk(chunk)
        target.earlier = earlier
        return target

    def _reduce(self, target: ReducedChunk, chunk: ReducedChunk, device: torch.device) -> None:
        """Average the gradients over the ranks, look at them, and move them to where the optimizer steps."""
        manager = self.chunk_manager
        manager.reduce_chunk(target)
        if self.mixed_precision is torch.float16:  # BF16 has no loss scale, so nothing reads it
            manager.overflow_counter += target.has_inf_or_nan
        if chunk.l2_norm_flag:
            target.l2_norm = None
            target.set_l2_norm()
        manager.move_chunk(target, device, force_copy=True, async_move=self.enable_async_reduce)
        # without FP8 the optimizer writes into the weights' chunk, or copies masters into it, where they lie
        if target is not chunk and (self.offloads_weights or not isinstance(chunk, FP8Chunk)):
            if chunk.cuda_shard is not None and chunk.cuda_shard.is_cuda:
                # made on another stream, whose next shard must not overwrite it while it goes to the host
                chunk.cuda_shard.record_stream(torch.cuda.current_stream(chunk.cuda_shard.device))
            manager.move_chunk(chunk, device, force_copy=True, async_move=self.enable_async_reduce)

    def _post_backward(self) -> None:
        # memory in use behind backward is of a chunk that waits for gradients
        if self.chunk_manager.accessed_mem != 0:
            self._raise_without(lambda parameter: parameter._gemini_reduced)
        waits_on_host = self.enable_async_reduce
        if waits_on_host and not any(device.type == "cpu" for device in self.grads_device.values()):
            # Colossal-AI waits on the host, which only what lies there needs
            get_accelerator().current_stream().wait_stream(self.async_reduce_stream)
            waits_on_host = False
        with temporarily(self, enable_async_reduce=waits_on_host):
            super()._post_backward()

    def _masters_are_the_weights(self) -> AbstractContextManager[None]:
        """Let checkpoints read and write the masters, as Colossal-AI's do where gradients take the weights' place."""
        return temporarily(self.chunk_manager, reuse_fp16_chunk=self.master_weights)

    def _in_fp32(self) -> AbstractContextManager[None]:
        """Gather chunks of masters in FP32: in Colossal-AI in 16 bits, unless they stay gathered."""
        return temporarily(self, mixed_precision=torch.float32 if self.master_weights else self.mixed_precision)

    def _get_chunk_to_save_data(self, chunk: Chunk, only_rank_0: bool) -> dict:
        with self._in_fp32():
            data = super()._get_chunk_to_save_data(chunk, only_rank_0)
        return {
            parameter: value.to(self._dtypes_in_checkpoints.get(parameter, self.mixed_precision))
            for parameter, value in data.items()
        }

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._masters_are_the_weights():
            super()._save_to_state_dict(*args, **kwargs)

    def state_dict_shard(self, *args: Any, **kwargs: Any) -> Iterator[tuple[dict, int]]:
        """Yield the weights in parts: the masters, in the dtypes of `_dtypes_in_checkpoints`."""
        with self._masters_are_the_weights():
            yield from super().state_dict_shard(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        with self._masters_are_the_weights(), self._in_fp32():
            super()._load_from_state_dict(*args, **kwargs)
        # the load wrote to masters, and layers read bytes that are cast from them
        self.publish_masters()


def _sum_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make each gradient whole that a rank of sequence parallelism finds from its part of the sequence alone.

    Call it before the model is wrapped, so that what is summed is what reaches the chunk. Native Gemini lacks it: there
    the ranks' norms drift apart.

    Args:
        model: sharded; shardformer has marked such parameters.
        group: the ranks that share a sequence.
    """

    def add(gradient: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            # autograd may hand the same tensor to other hooks, and the sum is made in place
            whole = gradient.contiguous().clone()
            comm.all_reduce(whole, dist.ReduceOp.SUM, group)
            return whole

    for parameter in model.parameters():
        if parameter.requires_grad and SeqParallelUtils.is_sp_partial_derived_param(parameter):
            parameter.register_hook(add)
