"""Shardformer's operations on the process groups given to `compress_groups`: all that they send goes compressed.

Natively a model's policy or a mode of sequence parallelism may not pass `fp8_communication` on: GPT-2 splits its input
without it, and linear layers along a sequence send BF16 in every case (shardformer/layer/_operation.py:585,770). The
layers that compute in FP8 do not come here; these are the operations of the others.

Features of outputs are gathered as they are: they are the logits of a vocabulary head or a router, or a position bias,
and rounded on the way they would not be what a product in 16 bits is there for.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from colossalai.quantization import fp8
from colossalai.shardformer.layer import _operation, attn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from fp8booster.colossal.patch import Patch
from fp8booster.colossal.tensor import collectives, compressed_groups, ring
from fp8booster.colossal.tensor.compressed_groups import is_compressed
from fp8booster.comm.statistics import count_plain


def compress_groups(*groups: dist.ProcessGroup | None) -> None:
    """Let what Colossal-AI sends over some groups by its `*_fp8` collectives go through `fp8booster.comm`.

    Args:
        groups: None is left out, so that a mode's groups can be given as they are. A group stays registered as long as
            it lives.
    """
    _install()
    compressed_groups.register(*groups)


@functools.cache
def _install() -> None:
    """Put functions that look at the group in the place of native ones, wherever a module of colossalai holds one."""
    patch = Patch()
    for ours in (
        collectives.all_reduce_fp8,
        collectives.reduce_scatter_fp8,
        collectives.all_gather_fp8,
        collectives.all_to_all_fp8,
        collectives.all_to_all_single_fp8,
    ):
        patch.set_function(fp8, ours.__name__, _by_group(getattr(fp8, ours.__name__), ours))
    for name in ("_reduce", "_gather", "_all_to_all", "_all_to_all_single"):
        theirs = getattr(_operation, name)
        patch.set_function(
            _operation, name, _by_group(theirs, functools.partial(_compressing, theirs, inspect.signature(theirs)))
        )
    for ours in (
        gather_forward_split_backward,
        linear_gather_forward_reducescatter_backward,
        linear_reducescatter_forward_gather_backward,
        matmul_gather_forward_reducescatter_backward,
    ):
        patch.set_function(_operation, ours.__name__, _by_group(getattr(_operation, ours.__name__), ours))
    theirs = attn.RingAttention.attention
    patch.set(attn.RingAttention, "attention", staticmethod(functools.partial(_attention, theirs)))


def _by_group(theirs: Callable, ours: Callable) -> Callable:
    """`ours` for the groups that are compressed, else `theirs`."""

    @functools.wraps(theirs)
    def call(*args: Any, **kwargs: Any) -> Any:
        group = kwargs.get("group") or kwargs.get("process_group")
        if group is None:
            group = next((argument for argument in args if isinstance(argument, dist.ProcessGroup)), None)
        return (ours if is_compressed(group) else theirs)(*args, **kwargs)

    return call


def _compressing(theirs: Callable, signature: inspect.Signature, *args: Any, **kwargs: Any) -> Any:
    bound = signature.bind(*args, **kwargs)
    bound.arguments["fp8_communication"] = True
    return theirs(*bound.args, **bound.kwargs)


def _attention(
    theirs: Callable,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sp_axis: int,
    *args: Any,
    pg_mesh: Any = None,
    **kwargs: Any,
) -> Any:
    compressed = is_compressed(pg_mesh.get_group_along_axis(sp_axis))
    return (ring.attention if compressed else theirs)(q, k, v, sp_axis, *args, pg_mesh=pg_mesh, **kwargs)


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, part: torch.Tensor, group: dist.ProcessGroup, grad_scale: float | None
    ) -> torch.Tensor:
        ctx.group, ctx.grad_scale = group, grad_scale
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        count_plain("all_gather", group.size(), part.nbytes, "features such as logits")
        dist.all_gather(parts, part, group)
        return torch.cat(parts, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple:
        if ctx.grad_scale is not None:
            gradient = gradient * ctx.grad_scale
        return gradient.chunk(ctx.group.size(), -1)[dist.get_rank(ctx.group)].contiguous(), None, None


# Signatures as in shardformer/layer/_operation.py. A ring gives the result of a gather.


def gather_forward_split_backward(
    input_: torch.Tensor,
    dim: int,
    process_group: dist.ProcessGroup,
    grad_scale: float | None = None,
    fp8_communication: bool = False,
) -> torch.Tensor:
    """A sequence gathered compressed; features as they are."""
    if process_group.size() > 1 and dim % input_.dim() == input_.dim() - 1:
        return _GatherFeatures.apply(input_, process_group, grad_scale)
    return _operation._GatherForwardSplitBackward.apply(input_, dim, process_group, grad_scale, True)


def linear_gather_forward_reducescatter_backward(
    input_: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    process_group: dist.ProcessGroup,
    async_grad_reduce_scatter: bool,
    dim: int,
    ring: bool = False,
    use_zbv: bool = False,
) -> torch.Tensor:
    """A column parallel layer in 16 bits of a sequence that is gathered compressed."""
    gathered = _operation.gather_forward_reducescatter_backward(input_, process_group, dim, True)
    return _linear(gathered, weight, bias, use_zbv)


def linear_reducescatter_forward_gather_backward(
    input_: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    process_group: dist.ProcessGroup | None = None,
    dim: int = 1,
    ring: bool = False,
    use_zbv: bool = False,
) -> torch.Tensor:
    """A row parallel layer in 16 bits whose result is reduced and scattered compressed."""
    output = _linear(input_, weight, bias, use_zbv)
    return _operation.reducescatter_forward_gather_backward(output, process_group, dim, True)


def matmul_gather_forward_reducescatter_backward(
    input_: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    process_group: dist.ProcessGroup,
    async_grad_reduce_scatter: bool,
    dim: int,
    ring: bool = False,
    fp8_communication: bool = False,
    use_zbv: bool = False,
) -> torch.Tensor:
    """`linear_gather_forward_reducescatter_backward` with a weight of [input features, output features]."""
    gathered = _operation.gather_forward_reducescatter_backward(input_, process_group, dim, True)
    return _operation.matmul_with_grad_comm(gathered, weight, bias, False, use_zbv)


def _linear(input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, use_zbv: bool) -> torch.Tensor:
    if use_zbv:
        return _operation.linear_with_grad_accum(input_, weight, bias, False, use_zbv=True)
    return F.linear(input_, weight, bias)
