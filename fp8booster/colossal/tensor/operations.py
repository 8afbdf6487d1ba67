"""Collectives and operations of shardformer's layers in 16 bits over the groups given to `compress_groups`.

`compat/layers.py` leads the calls of functions of the same names in Colossal-AI here, with what they are given by name.
With `fp8_communication` shardformer calls `*_fp8` collectives (quantization/fp8.py), which never compress sums, and the
rest only between nodes. These compress by size (`comm.threshold`), and count what they send. Colossal-AI's formats are
not used: with a scale for each block E4M3 has the range.

Features of outputs are gathered as they are: they are the logits of a vocabulary head or a router, or a position bias,
and rounded they would not be what a product in 16 bits is there for.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from colossalai.shardformer.layer import _operation
from torch.nn import functional as F

from fp8booster import comm
from fp8booster.colossal.compressed_groups import encoding_of
from fp8booster.comm.observer import observer
from fp8booster.comm.threshold import minimum_bytes
from fp8booster.nn.linear.functional import once_differentiable

Group = dist.ProcessGroup


def all_reduce_fp8(
    tensor: torch.Tensor, group: Group, op: Any = dist.ReduceOp.SUM, async_op: bool = False, **_: Any
) -> Any:
    if tensor.is_contiguous():
        return comm.all_reduce(tensor, op, group, async_op, encoding=encoding_of(group))
    # callers read the sum in their own tensor, so what is not contiguous is copied back; nothing to wait for is left
    values = tensor.contiguous()
    comm.all_reduce(values, op, group, encoding=encoding_of(group))
    tensor.copy_(values)
    return None


def reduce_scatter_fp8(
    output: torch.Tensor, input_list: list[torch.Tensor], group: Group, async_op: bool = False, **_: Any
) -> Any:
    encoding = encoding_of(group)
    return comm.reduce_scatter(output, list(input_list), group=group, async_op=async_op, encoding=encoding)


def all_gather_fp8(
    output_list: list[torch.Tensor], input_: torch.Tensor, group: Group, async_op: bool = False, **_: Any
) -> Any:
    return comm.all_gather(output_list, input_.contiguous(), group, async_op, encoding=encoding_of(group))


def all_to_all_fp8(
    output_list: list[torch.Tensor], input_list: list[torch.Tensor], group: Group, async_op: bool = False, **_: Any
) -> Any:
    inputs = [tensor.contiguous() for tensor in input_list]
    # the smallest payload to compress is agreed on where all ranks have equal ones, as shardformer's do
    is_even = len({tensor.numel() for tensor in (*inputs, *output_list)}) == 1
    least = minimum_bytes("all_to_all", inputs[0].device, group) if is_even else None
    return comm.all_to_all(output_list, inputs, group, async_op, encoding=encoding_of(group), min_bytes=least)


def all_to_all_single_fp8(
    output: torch.Tensor,
    input: torch.Tensor,
    group: Group,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    async_op: bool = False,
    **_: Any,
) -> Any:
    sizes = output_split_sizes, input_split_sizes
    return comm.all_to_all_single(output, input.contiguous(), *sizes, group, async_op, encoding=encoding_of(group))


class _GatherFeatures(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, part: torch.Tensor, group: Group, grad_scale: float | None
    ) -> torch.Tensor:
        ctx.group, ctx.grad_scale = group, grad_scale
        part = part.contiguous()
        parts = [torch.empty_like(part) for _ in range(group.size())]
        observer.count_plain("all_gather", group.size(), part.nbytes, "features such as logits")
        dist.all_gather(parts, part, group)
        return torch.cat(parts, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: torch.Tensor) -> tuple:
        if ctx.grad_scale is not None:
            gradient = gradient * ctx.grad_scale
        return gradient.chunk(ctx.group.size(), -1)[dist.get_rank(ctx.group)].contiguous(), None, None


def gather_forward_split_backward(
    input_: torch.Tensor, dim: int, process_group: Group, grad_scale: float | None = None, **_: Any
) -> torch.Tensor:
    """Gather a sequence compressed, and features as they are."""
    if process_group.size() > 1 and dim % input_.dim() == input_.dim() - 1:
        return _GatherFeatures.apply(input_, process_group, grad_scale)
    return _operation._GatherForwardSplitBackward.apply(input_, dim, process_group, grad_scale, True)


# A ring, which the three below may be asked for, gives the result of a gather.


def linear_gather_forward_reducescatter_backward(
    input_: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    process_group: Group,
    dim: int,
    use_zbv: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Run a column parallel layer in 16 bits on a sequence that is gathered compressed."""
    gathered = _operation.gather_forward_reducescatter_backward(input_, process_group, dim, True)
    return _linear(gathered, weight, bias, use_zbv)


def linear_reducescatter_forward_gather_backward(
    input_: torch.Tensor,
    weight: torch.Tensor,
    process_group: Group,
    bias: torch.Tensor | None = None,
    dim: int = 1,
    use_zbv: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Run a row parallel layer in 16 bits, and reduce and scatter the result compressed."""
    output = _linear(input_, weight, bias, use_zbv)
    return _operation.reducescatter_forward_gather_backward(output, process_group, dim, True)


def matmul_gather_forward_reducescatter_backward(
    input_: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    process_group: Group,
    dim: int,
    use_zbv: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Run a column parallel layer with a weight of [input features, output features]."""
    gathered = _operation.gather_forward_reducescatter_backward(input_, process_group, dim, True)
    return _operation.matmul_with_grad_comm(gathered, weight, bias, False, use_zbv)


def _linear(input_: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, use_zbv: bool) -> torch.Tensor:
    if use_zbv:
        return _operation.linear_with_grad_accum(input_, weight, bias, False, use_zbv=True)
    return F.linear(input_, weight, bias)
