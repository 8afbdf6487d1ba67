"""Shardformer's operations of layers in 16 bits over compressed groups, as `compat/fp8/communication.py` asks for them.

Features of outputs are gathered as they are: they are the logits of a vocabulary head or a router, or a position bias,
and rounded they would not be what a product in 16 bits is there for.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import _operation
from torch.nn import functional as F

from fp8booster.comm.statistics import count_plain
from fp8booster.nn.autograd import once_differentiable


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
