"""Colossal-AI's `*_fp8` collectives by `fp8booster.comm`, for the groups that ask for it.

With `fp8_communication` shardformer calls `all_reduce_fp8`, `reduce_scatter_fp8`, `all_gather_fp8`, `all_to_all_fp8`
and `all_to_all_single_fp8` of quantization/fp8.py, of which the first two never compress, and the others only between
nodes. For the process groups given to `compress_groups` they compress by size (`comm.threshold`), and count what they
send. For all other groups they stay what they are, so that a native plugin with `fp8_communication=True` is not
changed. `operations.py` leads what shardformer sends without these functions to them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm.threshold import minimum_bytes

# Signatures as in quantization/fp8.py. Its formats are not used: with a scale for each block E4M3 has the range.


def all_reduce_fp8(
    tensor: torch.Tensor,
    fp8_format: str = "e4m3",
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    if tensor.is_contiguous():
        return comm.all_reduce(tensor, op, group, async_op)
    values = tensor.contiguous()
    comm.all_reduce(values, op, group)
    tensor.copy_(values)
    return None


def reduce_scatter_fp8(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    group: dist.ProcessGroup | None,
    fp8_format: str = "e5m2",
    async_op: bool = False,
) -> Any:
    return comm.reduce_scatter(output, list(input_list), group=group, async_op=async_op)


def all_gather_fp8(
    output_list: list[torch.Tensor],
    input_: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    fp8_format: str = "e5m2",
    async_op: bool = False,
) -> Any:
    return comm.all_gather(output_list, input_.contiguous(), group, async_op)


def all_to_all_fp8(
    output_list: list[torch.Tensor],
    input_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    fp8_format: str = "e5m2",
    async_op: bool = False,
) -> Any:
    inputs = [tensor.contiguous() for tensor in input_list]
    return comm.all_to_all(output_list, inputs, group, async_op, min_bytes=_if_even(inputs, output_list, group))


def all_to_all_single_fp8(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    fp8_format: str = "e5m2",
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
) -> Any:
    return comm.all_to_all_single(output, input.contiguous(), output_split_sizes, input_split_sizes, group, async_op)


def _if_even(inputs: list[torch.Tensor], outputs: list[torch.Tensor], group: dist.ProcessGroup | None) -> int | None:
    """The smallest payload to compress where all ranks have equal ones, as shardformer's do; None is any."""
    if len({tensor.numel() for tensor in (*inputs, *outputs)}) > 1:
        return None
    return minimum_bytes("all_to_all_single", inputs[0].device, group)
