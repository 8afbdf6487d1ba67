"""What happens to a gradient when backward has made it: into its chunk, and the chunk to all ranks once it is full.

Stands in the place of `GeminiDDP.grad_handle` (zero/gemini/gemini_ddp.py:359), which takes one way for all chunks. Here
the gradients of 16-bit weights take the weights' place where nothing accumulates, as there, and those of FP8 weights
have memory of their own. Earlier micro-batches are added to after the reduction, so that a sum is not rounded again and
again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.shardformer.layer.utils import SeqParallelUtils
from colossalai.zero.gemini.chunk import TensorState
from torch import nn

from fp8booster import comm
from fp8booster.colossal.gemini.chunks import FP8Chunk, ReducedChunk, take_memory
from fp8booster.colossal.gemini.groups import GroupedChunkManager
from fp8booster.reading import first_of


class ReducingModel(Protocol):
    """What is asked of the model wrapper whose gradients are kept: `FP8GeminiDDP`."""

    chunk_manager: GroupedChunkManager
    param2name: Mapping[nn.Parameter, str]
    trained_since_step: set[nn.Parameter]
    """Who has had a gradient since the last step."""
    grads_device: Mapping[nn.Parameter, torch.device]
    """Where the optimizer steps."""
    mixed_precision: torch.dtype
    enable_async_reduce: bool
    async_reduce_stream: torch.cuda.Stream | None
    offloads_weights: bool


def sum_partial_gradients(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Make each gradient whole that a rank of sequence parallelism finds from its part of the sequence alone.

    Call it before the model is wrapped, so that what is summed is what reaches the chunk. Native Gemini lacks it: there
    the ranks' norms drift apart.

    Args:
        model: sharded; shardformer has marked such parameters.
        group: the ranks that share a sequence.
    """

    def add(gradient: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunction():
            whole = gradient.contiguous().clone()
            comm.all_reduce(whole, dist.ReduceOp.SUM, group)
            return whole

    for parameter in model.parameters():
        if parameter.requires_grad and SeqParallelUtils.is_sp_partial_derived_param(parameter):
            parameter.register_hook(add)


def takes_the_weights_place(chunk: ReducedChunk, manager: GroupedChunkManager) -> bool:
    """Whether a chunk's gradients are written over its weights."""
    return manager.reuse_fp16_chunk and not isinstance(chunk, FP8Chunk)


def gradient_chunk(chunk: ReducedChunk, manager: GroupedChunkManager) -> ReducedChunk | None:
    """The chunk that holds the gradients of a chunk of weights; None before the first."""
    return chunk if takes_the_weights_place(chunk, manager) else chunk.grad_chunk


def keep_gradient(gradient: torch.Tensor, *, model: ReducingModel, parameter: nn.Parameter) -> torch.Tensor:
    """Put a gradient into its chunk, and reduce the chunk if that was the last one missing.

    Args:
        gradient: of the parameter, in this backward.
        model, parameter: what it belongs to.

    Returns:
        A gradient of the same shape without memory, for autograd.

    Raises:
        RuntimeError: something read the parameter past Gemini's hooks.
    """
    parameter._gemini_reduced = True
    model.trained_since_step.add(parameter)
    placeholder = torch.empty_like(gradient)
    take_memory(placeholder)
    with torch._C.DisableTorchFunction():
        manager = model.chunk_manager
        chunk = manager.get_chunk(parameter)
        if chunk.tensors_info[parameter].state != TensorState.HOLD_AFTER_BWD:
            raise RuntimeError(
                f"the gradient of `{model.param2name[parameter]}` came while its chunk was in use: an operator read "
                "the parameter where Gemini does not see it; read it by torch functions alone"
            )
        instead = takes_the_weights_place(chunk, manager)
        target = chunk if instead else _open(chunk, manager)
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
        stream = model.async_reduce_stream
        if stream is not None:
            stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            _reduce(target, chunk, model, parameter)
    return placeholder


def no_gradient(names: Sequence[str]) -> RuntimeError:
    """The error of a step in which trained parameters have no gradient: their chunks hold something else, or nothing.

    Args:
        names: of these parameters, at least one.
    """
    shown = first_of([f"`{name}`" for name in names])
    return RuntimeError(
        f"no gradient for {shown}: Gemini trains a layer in every step or not at all; call requires_grad_(False) "
        "on layers that are not trained before booster.boost, or add 0 * output.sum() of a layer to the loss of the "
        "steps that do not use it"
    )


def _open(chunk: ReducedChunk, manager: GroupedChunkManager) -> ReducedChunk:
    """The chunk for the gradients of this backward, with what earlier micro-batches gave beside it."""
    target = chunk.grad_chunk
    if target is not None and target in manager.accessed_chunks:
        return target
    earlier = None
    if manager.accumulating_grads and target is not None:
        earlier = target.payload.clone() if target.is_gathered else target.payload
    target = manager.init_grad_chunk(chunk)
    target.earlier = earlier
    return target


def _reduce(target: ReducedChunk, chunk: ReducedChunk, model: ReducingModel, parameter: nn.Parameter) -> None:
    """Average the gradients over the ranks, look at them, and move them to where the optimizer steps."""
    manager, device = model.chunk_manager, model.grads_device[parameter]
    manager.reduce_chunk(target)
    if model.mixed_precision is torch.float16:  # BF16 has no loss scale, so nothing reads it
        manager.overflow_counter += target.has_inf_or_nan
    if chunk.l2_norm_flag:
        target.l2_norm = None
        target.set_l2_norm()
    manager.move_chunk(target, device, force_copy=True, async_move=model.enable_async_reduce)
    # without FP8 the optimizer writes into the weights' chunk, or copies masters into it, where they lie
    if target is not chunk and (model.offloads_weights or not isinstance(chunk, FP8Chunk)):
        if chunk.cuda_shard is not None and chunk.cuda_shard.is_cuda:
            # made on another stream, whose next shard must not overwrite it while it goes to the host
            chunk.cuda_shard.record_stream(torch.cuda.current_stream(chunk.cuda_shard.device))
        manager.move_chunk(chunk, device, force_copy=True, async_move=model.enable_async_reduce)
