"""Patches of Gemini."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fp8booster.colossal.compat.registry import wrap

_OPTIMIZER = "zero.gemini.gemini_optimizer:GeminiOptimizer"


@wrap("nn.optimizer.hybrid_adam:HybridAdam.step", "126", needed_when="Gemini offloads the optimizer in BF16")
def offloaded_gradients_are_scaled(upstream: Callable, self: Any, closure: Any = None, div_scale: float = -1) -> Any:
    """BF16 gradients on the host are divided by `div_scale` in HybridAdam, as all others are.

    Without it clipping does nothing to them.
    """
    for parameter in (each for group in self.param_groups for each in group["params"] if div_scale > 0):
        gradient = parameter.grad
        if gradient is not None and (gradient.device.type, gradient.dtype) == ("cpu", torch.bfloat16):
            gradient.data.div_(div_scale)
    return upstream(self, closure, div_scale)


@wrap(f"{_OPTIMIZER}.step", "240-247", needed_when="Gemini accumulates gradients in FP16")
def gemini_forgets_gradients_that_overflowed(upstream: Callable, self: Any, *args: Any, **kwargs: Any) -> Any:
    """A skipped step ends the accumulation of gradients, as any other step does.

    Without it the next backward adds to gradients that are infinite, so that every step from then on is skipped.
    """
    result = upstream(self, *args, **kwargs)
    self.module.chunk_manager.accumulating_grads = False
    return result


@wrap("zero.gemini.gemini_ddp:GeminiDDP._post_forward", "260-272", needed_when="Gemini evaluates with max_prefetch")
def evaluation_leaves_nothing_on_the_way(upstream: Callable, self: Any) -> None:
    """What the last operator of an evaluation fetches ahead has arrived, and is forgotten, before chunks are released.

    Without it the next forward takes such a chunk for a gathered one and reads memory that is gone: a crash at the
    second evaluation, or at the next training step.
    """
    works = self.gemini_manager.async_works
    for work in works.values():
        work.wait()
    works.clear()
    upstream(self)


@wrap(
    "zero.gemini.chunk.manager:ChunkManager.rearrange_accumulated_grad_chunk",
    "287-289",
    needed_when="Gemini accumulates gradients in a chunk that is kept gathered, as all are in small models",
)
def accumulated_gradients_count_once(upstream: Callable, self: Any, chunk: Any) -> Any:
    """Gradients of earlier micro-batches that every rank holds are not multiplied by the number of ranks.

    Without it they weigh more: each rank adds them before the sum over ranks, which the division by their number
    undoes, and a factor is applied that is right for shards, which one rank adds.
    """
    if chunk.grad_chunk is not None and chunk.grad_chunk.is_gathered:
        chunk.grad_chunk.cuda_global_chunk.div_(chunk.pg_size)
    return upstream(self, chunk)


_SHARDING = ("dist_layout", "shard_fn", "gather_fn", "_padding_dim")
"""What a parameter carries that tensor parallelism has sharded or padded."""


@wrap(f"{_OPTIMIZER}.collect_states", "545-568", needed_when="Gemini saves an optimizer under tensor parallelism")
def tensor_parallel_states_are_gathered(
    upstream: Callable, self: Any, param_id: int, only_rank_0: bool = True
) -> dict[str, torch.Tensor]:
    """States of parameters that tensor parallelism has sharded are collected whole.

    Without it the number of steps is taken for a sharded tensor: AssertionError: Cannot compare difference for two
    sharding specs with different length; and of what is gathered nothing is kept.
    """
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


@wrap(
    "shardformer.layer.loss:DistCrossEntropy.backward",
    "shardformer/layer/loss.py:132; tensor/colo_tensor.py:6",
    needed_when="Gemini trains with tensor parallelism",
)
def loss_of_a_sharded_vocabulary_scales_its_gradient(upstream: Callable, ctx: Any, gradient: torch.Tensor) -> tuple:
    """The gradient of the loss over a sharded vocabulary is that of the mean over tokens, under Gemini too.

    Without it all gradients are as many times too large as there are tokens: the scaling in place makes a copy that is
    dropped, since in ColoTensors, which Gemini's activations are, `mul_` is a `mul`.
    """
    with torch._C.DisableTorchFunction():
        return upstream(ctx, gradient)


@wrap("shardformer.layer.loss:reduce_forward", "232", needed_when="Gemini trains with tensor parallelism")
def loss_is_of_the_ranks_own_tokens(
    upstream: Callable, input_: torch.Tensor, process_group: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """The loss is summed over the ranks that share a sequence, which is no other where no group is named.

    Without it all ranks of the job are taken where none is named, as Gemini does: gradients are divided by their
    number.
    """
    return input_ if process_group is None else upstream(input_, process_group, *args, **kwargs)
