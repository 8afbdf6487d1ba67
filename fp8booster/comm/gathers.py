"""Gathers and broadcasts with FP8 on the wire, under the names, arguments and semantics of `torch.distributed`."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from typing_extensions import Unpack

from fp8booster.comm.call import Call
from fp8booster.comm.encoding import Options, decode_pieces
from fp8booster.comm.threshold import Group, group_or_all, ranks_of
from fp8booster.comm.transport import (
    flat,
    gather_bytes,
    new_message,
    one_tensor,
    require_multiple,
    require_one_for_each,
)
from fp8booster.comm.work import Transfer
from fp8booster.kernels.message_layout import MessageLayout


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False, **options: Unpack[Options]
) -> Work | None:
    """`torch.distributed.all_gather_into_tensor`: every rank's tensor, in one."""
    count, payload = input_tensor.numel(), output_tensor.nbytes
    call = Call("all_gather_into_tensor", input_tensor, group, async_op, options, {"values": count})
    if call.goes_uncompressed(payload=payload):
        work = one_tensor("all_gather")(output_tensor, input_tensor, call.group, async_op)
        return call.finish(work, [output_tensor])
    gathered, values = flat(output_tensor, "output_tensor"), flat(input_tensor, "input_tensor")
    require_multiple(gathered, values, call.ranks, "output_tensor", "input_tensor")
    return _gather(call, values, [gathered], call.encoding.even(count, call.ranks), [output_tensor])


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False, **options: Unpack[Options]
) -> Work | None:
    """`torch.distributed.all_gather`: every rank's tensor, in a list; sizes may differ where the backend allows it."""
    require_one_for_each(tensor_list, ranks_of(group), "tensor_list")
    counts = tuple(gathered.numel() for gathered in tensor_list)
    payload = sum(gathered.nbytes for gathered in tensor_list)
    call = Call("all_gather", tensor, group, async_op, options, {"values": counts})
    if call.goes_uncompressed(payload=payload):
        return call.finish(dist.all_gather(tensor_list, tensor, call.group, async_op), tensor_list)
    own_count = counts[call.group.rank()]
    if own_count != tensor.numel():
        raise ValueError(
            f"tensor has {tensor.numel()} values and this rank's place in tensor_list {own_count}; give the same"
        )
    values = flat(tensor, "tensor")
    outputs = [flat(gathered, "tensor_list") for gathered in tensor_list]
    return _gather(call, values, outputs, call.encoding.uneven(counts), tensor_list)


all_gather_single = all_gather_into_tensor
"""The name of `all_gather_into_tensor` since torch 2.13."""


def _gather(
    call: Call, values: Tensor, gathered: list[Tensor], layout: MessageLayout, outputs: list[Tensor]
) -> Work | None:
    """Gather `values` of every rank, which are pieces of `layout`, in one tensor or in one for each piece."""
    encoding = call.encoding
    piece = encoding.even(values.numel())

    def begin(asynchronous: bool) -> Transfer:
        message, rank = new_message(values, layout.bytes), call.group.rank()
        if layout.is_even:  # a list would be copied once more
            own = message.narrow(0, rank * piece.bytes, piece.bytes)
            encoding.encode(values, own, piece)
            work = gather_bytes(message, own, call.group, asynchronous)
        else:
            own = new_message(values, piece.bytes)
            encoding.encode(values, own, piece)
            work = dist.all_gather(list(message.split(layout.sizes)), own, call.group, asynchronous)
        return Transfer(work, lambda: decode_pieces(message, gathered, layout, encoding), (message,))

    return call.run({call.name: piece.bytes}, begin, [values], outputs)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    async_op: bool = False,
    group_src: int | None = None,
    **options: Unpack[Options],
) -> Work | None:
    """`torch.distributed.broadcast`, but that the source's tensor is rounded too: all ranks hold the same bits."""
    group = group_or_all(group)
    source = src if group_src is None or ranks_of(group) < 1 else dist.get_global_rank(group, group_src)
    compared = {"values": tensor.numel(), "source": source}
    # data arrives from the source alone
    call = Call("broadcast", tensor, group, async_op, options, compared, on_arrival=False)
    if call.goes_uncompressed():
        return call.finish(dist.broadcast(tensor, src, group, async_op, group_src), [tensor])
    values = flat(tensor, "tensor")
    encoding = call.encoding
    layout = encoding.even(values.numel())

    def begin(asynchronous: bool) -> Transfer:
        message = new_message(values, layout.bytes)
        if dist.get_rank() == source:
            encoding.encode(values, message, layout)
        work = dist.broadcast(message, src, group, asynchronous, group_src)
        return Transfer(work, lambda: encoding.decode(message, values, layout), (message,))

    return call.run({"broadcast": layout.bytes}, begin, [values], [tensor])
