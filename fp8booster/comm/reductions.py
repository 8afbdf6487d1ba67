"""Sums and means over ranks with FP8 on the wire, under the names, arguments and semantics of `torch.distributed`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from typing_extensions import Unpack

from fp8booster.comm.call import Call
from fp8booster.comm.encoding import Options
from fp8booster.comm.threshold import Group, Op, ReduceOp, ranks_of
from fp8booster.comm.transport import (
    flat,
    gather_bytes,
    new_message,
    one_tensor,
    require_multiple,
    require_one_for_each,
)
from fp8booster.comm.work import Transfer
from fp8booster.kernels.alignment import aligned


def all_reduce(
    tensor: Tensor, op: Op = ReduceOp.SUM, group: Group = None, async_op: bool = False, **options: Unpack[Options]
) -> Work | None:
    """`torch.distributed.all_reduce`: the sum or mean over ranks, in place. Other reductions run plain."""
    count = tensor.numel()
    blocks = not tensor.is_cuda  # in gloo's first exchange
    call = Call("all_reduce", tensor, group, async_op, options, {"values": count}, op=op, blocks=blocks)
    encoding, ranks = call.encoding, call.ranks
    layout = encoding.even(aligned(math.ceil(count / ranks)), ranks)
    if call.goes_uncompressed():
        if divides(op, tensor, ranks):
            tensor.detach().div_(ranks)
            op = ReduceOp.SUM
        return call.finish(dist.all_reduce(tensor, op, call.group, async_op), [tensor])
    values, piece, factor = flat(tensor, "tensor"), layout.piece, factor_of(op, ranks)

    def begin(asynchronous: bool) -> Transfer:
        message, received = new_message(values, layout.bytes), new_message(values, layout.bytes)
        encoding.encode(values, message, layout)
        dist.all_to_all_single(received, message, group=call.group)
        own = message.narrow(0, call.group.rank() * piece.bytes, piece.bytes)
        encoding.decode_sum_encode(received, own, layout, factor)
        work = gather_bytes(message, own, call.group, asynchronous)
        return Transfer(work, lambda: encoding.decode(message, values, layout), (message,))

    sent = {"all_to_all_single": layout.bytes, "all_gather_into_tensor": piece.bytes}
    return call.run(sent, begin, [values], [tensor])


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None:
    """`torch.distributed.reduce_scatter_tensor`: each rank's part of the sum or mean over ranks, rounded once."""
    call = Call("reduce_scatter_tensor", input, group, async_op, options, {"values": input.numel()}, op=op)
    if call.goes_uncompressed():
        return reduce_scatter_uncompressed(call, output, input)
    sums, values = flat(output, "output"), flat(input, "input")
    require_multiple(values, sums, call.ranks, "input", "output")
    return sum_parts(call, [values], sums, output)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None:
    """`torch.distributed.reduce_scatter`: the sum or mean over ranks of what each has for this rank in its list.

    It is `reduce_scatter_tensor` of a copy in which the list's tensors lie one after the other, and counted as that.
    """
    require_one_for_each(input_list, ranks_of(group), "input_list")
    for tensor in input_list:
        if tensor.numel() != output.numel():
            raise ValueError(
                f"a tensor of input_list has {tensor.numel()} values and output {output.numel()}; give tensors of one "
                "size"
            )
    joined = torch.cat([tensor.detach().reshape(-1) for tensor in input_list]) if input_list else output
    return reduce_scatter_tensor(output, joined, op, group, async_op, **options)


reduce_scatter_single = reduce_scatter_tensor
"""The name of `reduce_scatter_tensor` since torch 2.13."""


def sum_parts(call: Call, values: Sequence[Tensor], sums: Tensor, output: Tensor) -> Work | None:
    """Write this rank's part of the sum or mean of tensors, side by side, over ranks to `sums` [N], of `output`."""
    encoding = call.encoding
    layout, factor = encoding.even(sums.numel(), call.ranks), factor_of(call.op, call.ranks)

    def begin(asynchronous: bool) -> Transfer:
        message, received = new_message(sums, layout.bytes), new_message(sums, layout.bytes)
        encoding.encode(values, message, layout)
        work = dist.all_to_all_single(received, message, group=call.group, async_op=asynchronous)
        return Transfer(work, lambda: encoding.decode_sum(received, sums, layout, factor), (received, message))

    return call.run({"all_to_all_single": layout.bytes}, begin, values, [output])


def reduce_scatter_uncompressed(call: Call, output: Tensor, input: Tensor) -> Work | None:
    """`reduce_scatter_tensor` of a call that has a reason for it."""
    op = call.op
    if divides(op, input, call.ranks):
        input, op = input.detach() / call.ranks, ReduceOp.SUM
    return call.finish(one_tensor("reduce_scatter")(output, input, op, call.group, call.async_op), [output])


def divides(op: Op, tensor: Tensor, ranks: int) -> bool:
    """Whether a plain mean is a sum of what ranks have divided: gloo, on the CPU, knows none.

    Divided first, as NCCL does, for the sum of what has a finite mean may overflow.
    """
    return op == ReduceOp.AVG and tensor.is_floating_point() and not tensor.is_cuda and ranks > 0


def factor_of(op: Op, ranks: int) -> float:
    """What each rank's values are multiplied by before they are added."""
    return 1.0 / ranks if op == ReduceOp.AVG else 1.0
