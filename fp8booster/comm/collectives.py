"""Collectives with FP8 on the wire, under the names, arguments and semantics of `torch.distributed`.

Each checks its arguments, encodes, lets torch carry bytes, and decodes what arrived; `Call` decides, observes and runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from numbers import Integral

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from typing_extensions import Unpack

from fp8booster.comm.call import Call, Transfer
from fp8booster.comm.encoding import DEFAULT, Encoding, Options, Parts, ReductionOptions
from fp8booster.comm.threshold import Group, Op, ReduceOp, group_or_all, ranks_of
from fp8booster.comm.transport import (
    add_and_scatter,
    divides,
    flat,
    gather_bytes,
    new_message,
    one_tensor,
    require_multiple,
    require_one_for_each,
)
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.message_layout import side_by_side

BUCKET_BYTES = 64 * 2**20
"""From this size FP8 pays inside a node too (`threshold`)."""


def all_reduce(
    tensor: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **options: Unpack[ReductionOptions],
) -> Work | None:
    """`torch.distributed.all_reduce`: the sum or mean over ranks, in place. Other reductions run plain."""
    count = tensor.numel()
    blocks = not tensor.is_cuda  # in gloo's first exchange
    call = Call("all_reduce", tensor, group, async_op, options, {"values": count}, op=op, blocks=blocks, by_nodes=True)
    encoding, ranks = call.encoding, call.ranks
    if call.uncompressed:
        if divides(op, tensor, ranks):
            # detached: autograd refuses to change a leaf in place
            tensor.detach().div_(ranks)
            op = ReduceOp.SUM
        return call.finish(dist.all_reduce(tensor, op, call.group, async_op), [tensor])
    # pieces of whole 16 values, so that each begins where kernels can move whole vectors; the last is padded
    layout = encoding.layout(aligned(math.ceil(count / ranks)), ranks)
    values, piece, schedule = flat(tensor, "tensor"), layout.piece, call.schedule
    between = schedule.between.size()
    shared, factor = encoding.layout(piece.count, between), factor_of(op, between)

    def begin(asynchronous: bool) -> Transfer:
        message, received = new_message(values, layout.bytes), new_message(values, shared.bytes)
        # in the places where the gathers want them: nothing is copied for that
        share = schedule.share_of_message(message, shared.bytes)
        own = share.narrow(0, schedule.between.rank() * piece.bytes, piece.bytes)
        encoding.encode(schedule.share_of(values, layout.count * layout.pieces, op), share, shared, "all_reduce")
        # waited for, since the sums are made of it: on a GPU by the stream, not by the host
        dist.all_to_all_single(received, share, group=schedule.between)
        # the sum is cast again, so that it is gathered in FP8 too, and every rank decodes the same bytes
        encoding.decode_sum_encode(received, own, shared, factor, "all_reduce")
        work = schedule.gather(message, share, own, asynchronous)
        return Transfer(work, lambda: encoding.decode(message, values, layout), (message,))

    sent = {"all_to_all_single": shared.bytes, "all_gather_into_tensor": piece.bytes}
    padded = layout.count * layout.pieces * values.element_size()
    inside = {"reduce_scatter_tensor": padded, "all_gather_into_tensor": shared.bytes}
    return call.run(sent, begin, [values], [tensor], inside)


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    *,
    encoding: Encoding = DEFAULT,
    bucket_bytes: int = BUCKET_BYTES,
    of: Sequence[str] = (),
) -> None:
    """`all_reduce` of many tensors, in place, side by side in messages of about `bucket_bytes`.

    Args:
        tensors: of any shapes and dtypes; those of one dtype share messages.
        op, group, encoding: as in `all_reduce`. Tensors that share a message share the scales of some blocks.
        bucket_bytes: a message is sent when the next tensor would not fit; a larger tensor is one of its own.
        of: whose values they are, one name for each tensor; ranks that differ in them raise.
    """
    names = dict(zip(map(id, tensors), of, strict=bool(of)))
    for bucket in _buckets(tensors, bucket_bytes):
        # not encoded from where they lie: sums are decoded to one tensor
        message = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        all_reduce(message, op, group, encoding=encoding, of=tuple(names[id(each)] for each in bucket if names))
        copy_parts(bucket, message)


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """Yield the tensors, those of one dtype together, in lists of at most `bucket_bytes` or of one tensor."""
    # no set: its order may differ between ranks, and each message must meet the same one of the others
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        size = 0
        for tensor in tensors:
            if tensor.dtype is not dtype:
                continue
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


@torch.no_grad()
def copy_parts(tensors: Sequence[Tensor], message: Tensor) -> None:
    """Set tensors to the values that lie side by side in a message."""
    parts = message.split([tensor.numel() for tensor in tensors])
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    # all at once: a model has hundreds of tensors, most of them small, and each would be a launch
    torch._foreach_copy_(list(tensors), shaped)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **options: Unpack[ReductionOptions],
) -> Work | None:
    """`torch.distributed.reduce_scatter_tensor`: each rank's part of the sum or mean over ranks, rounded once."""
    compared = {"values": input.numel()}
    call = Call("reduce_scatter_tensor", input, group, async_op, options, compared, op=op, by_nodes=True)
    if call.uncompressed:
        return reduce_scatter_uncompressed(call, output, input)
    sums, values = flat(output, "output"), flat(input, "input")
    require_multiple(values, sums, call.ranks, "input", "output")
    return _sum_parts(call, [values], sums, output)


reduce_scatter_single = reduce_scatter_tensor
"""The name of `reduce_scatter_tensor` since torch 2.13."""


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    async_op: bool = False,
    **options: Unpack[ReductionOptions],
) -> Work | None:
    """`torch.distributed.reduce_scatter`: the sum or mean over ranks of the tensors that each lists for this rank.

    It is `reduce_scatter_tensor` of a copy in which the list's tensors lie one after the other, and counted as that.
    """
    require_one_for_each(input_list, ranks_of(group), "input_list")
    for tensor in input_list:
        if tensor.numel() != output.numel():
            raise ValueError(
                f"a tensor of input_list has {tensor.numel()} values and output {output.numel()}; give tensors of one "
                "size"
            )
    # one message for all ranks, for the price of a copy
    joined = torch.cat([tensor.detach().reshape(-1) for tensor in input_list]) if input_list else output
    return reduce_scatter_tensor(output, joined, op, group, async_op, **options)


def reduce_scatter_coalesced(
    outputs: Tensor,
    inputs: Sequence[Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    **options: Unpack[ReductionOptions],
) -> None:
    """`reduce_scatter_tensor` of many tensors in one message, encoded from where they lie.

    Args:
        outputs: [sum of the sizes / ranks]; written with this rank's part of each input, one after the other. It may
            be FP32 where the inputs have 16 bits: sums are FP32 before they are rounded to it.
        inputs: one or more, contiguous, of one dtype; each size is a multiple of the number of ranks.
        op, group, options: as in `reduce_scatter_tensor`.

    Raises:
        ValueError: sizes that do not fit together.
    """
    ranks = ranks_of(group)
    inputs = [tensor.detach() if tensor.requires_grad else tensor for tensor in inputs]
    sizes = [tensor.numel() for tensor in inputs]
    if not inputs:
        raise ValueError("there are no inputs; give one tensor or more, or leave the call out on every rank")
    if any(size % ranks for size in sizes) or outputs.numel() * ranks != sum(sizes):
        raise ValueError(
            f"the inputs have {sizes} values and outputs {outputs.numel()}; each input must be a multiple of {ranks}, "
            "the number of ranks, and outputs hold one part of each"
        )
    call = Call(
        "reduce_scatter_tensor",
        inputs[0],
        group,
        False,
        options,
        {"values": tuple(sizes)},
        op=op,
        given=sum(sizes) * inputs[0].element_size(),
        claimed_as="reduce_scatter_coalesced",
        by_nodes=True,
    )
    if not call.uncompressed:
        _sum_parts(call, inputs, outputs, outputs)
    elif ranks == 1 and op in (ReduceOp.SUM, ReduceOp.AVG):
        # sum and mean of one rank are its values, which need not be copied side by side first
        torch._foreach_copy_(outputs.split(sizes), [tensor.view(-1) for tensor in inputs])
    else:
        values = side_by_side(inputs, ranks)
        # a plain collective adds in the dtype that it is given, and outputs may have another
        part = torch.empty_like(outputs, dtype=values.dtype)
        reduce_scatter_uncompressed(call, part, values)
        outputs.copy_(part)


def _sum_parts(call: Call, values: Sequence[Tensor], sums: Tensor, output: Tensor) -> Work | None:
    """Write this rank's part of the sum or mean of tensors, side by side, over ranks to `sums` [N], of `output`."""
    encoding, schedule = call.encoding, call.schedule
    between = schedule.between.size()
    layout, factor = encoding.layout(sums.numel(), between), factor_of(call.op, between)

    def begin(asynchronous: bool) -> Transfer:
        message, received = new_message(sums, layout.bytes), new_message(sums, layout.bytes)
        shares = values if schedule.inside is None else schedule.share_of_parts(values, call.op)
        encoding.encode(shares, message, layout, call.name)
        # every rank sends each other one its part: FP8 values cannot be added on their way without rounding each sum
        work = dist.all_to_all_single(received, message, group=schedule.between, async_op=asynchronous)
        # both are kept: the transport reads the one until it has ended, and the sum is made of the other
        return Transfer(work, lambda: encoding.decode_sum(received, sums, layout, factor), (received, message))

    inside = {"reduce_scatter_tensor": sum(tensor.nbytes for tensor in values)}
    return call.run({"all_to_all_single": layout.bytes}, begin, values, [output], inside)


def reduce_scatter_uncompressed(call: Call, output: Tensor, input: Tensor) -> Work | None:
    """`reduce_scatter_tensor` of a call that has a reason for it."""
    return call.finish(add_and_scatter(output, input, call.op, call.group, call.async_op), [output])


def factor_of(op: Op, ranks: int) -> float:
    """Return the number by which each rank's values are multiplied before they are added."""
    # the sum is multiplied by it in FP32 before it is rounded: a mean costs no pass and no rounding of its own
    return 1.0 / ranks if op == ReduceOp.AVG else 1.0


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: Group = None, async_op: bool = False, **options: Unpack[Options]
) -> Work | None:
    """`torch.distributed.all_gather_into_tensor`: every rank's tensor, in one."""
    count, payload = input_tensor.numel(), output_tensor.nbytes
    compared = {"values": count}
    call = Call("all_gather_into_tensor", input_tensor, group, async_op, options, compared, payload=payload)
    if call.uncompressed:
        work = one_tensor("all_gather")(output_tensor, input_tensor, call.group, async_op)
        return call.finish(work, [output_tensor])
    gathered, values = flat(output_tensor, "output_tensor"), flat(input_tensor, "input_tensor")
    require_multiple(gathered, values, call.ranks, "output_tensor", "input_tensor")
    return _gather(call, values, Parts.even(gathered, call.ranks, call.encoding), [output_tensor])


all_gather_single = all_gather_into_tensor
"""The name of `all_gather_into_tensor` since torch 2.13."""


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: Group = None, async_op: bool = False, **options: Unpack[Options]
) -> Work | None:
    """`torch.distributed.all_gather`: every rank's tensor, in a list; sizes may differ where the backend allows it."""
    require_one_for_each(tensor_list, ranks_of(group), "tensor_list")
    counts = tuple(gathered.numel() for gathered in tensor_list)
    payload = sum(gathered.nbytes for gathered in tensor_list)
    call = Call("all_gather", tensor, group, async_op, options, {"values": counts}, payload=payload)
    if call.uncompressed:
        return call.finish(dist.all_gather(tensor_list, tensor, call.group, async_op), tensor_list)
    own_count = counts[call.group.rank()]
    if own_count != tensor.numel():
        raise ValueError(
            f"tensor has {tensor.numel()} values and this rank's place in tensor_list {own_count}; give the same"
        )
    values = flat(tensor, "tensor")
    outputs = [flat(gathered, "tensor_list") for gathered in tensor_list]
    return _gather(call, values, Parts.of_tensors(outputs, call.encoding), tensor_list)


def _gather(call: Call, values: Tensor, parts: Parts, outputs: list[Tensor]) -> Work | None:
    """Gather `values` of every rank, each of which is one of the parts."""
    encoding = call.encoding
    piece = encoding.layout(values.numel())

    def begin(asynchronous: bool) -> Transfer:
        message, rank = new_message(values, parts.bytes), call.group.rank()
        if parts.sizes is None or len(set(parts.sizes)) == 1:  # a list would be copied once more
            own = message.narrow(0, rank * piece.bytes, piece.bytes)
            encoding.encode(values, own, piece, call.name)
            work = gather_bytes(message, own, call.group, asynchronous)
        else:
            own = new_message(values, piece.bytes)
            encoding.encode(values, own, piece, call.name)
            work = dist.all_gather(list(message.split(parts.sizes)), own, call.group, asynchronous)
        return Transfer(work, lambda: parts.decode(message, encoding), (message,))

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
    # by its global rank: some ranks may give `src` and others `group_src`
    compared = {"values": tensor.numel(), "source": source}
    # data arrives from the source alone
    call = Call("broadcast", tensor, group, async_op, options, compared, on_arrival=False)
    if call.uncompressed:
        return call.finish(dist.broadcast(tensor, src, group, async_op, group_src), [tensor])
    values = flat(tensor, "tensor")
    encoding = call.encoding
    layout = encoding.layout(values.numel())

    def begin(asynchronous: bool) -> Transfer:
        message = new_message(values, layout.bytes)
        # the source too decodes the message below, so that all ranks hold the same bits
        if dist.get_rank() == source:
            encoding.encode(values, message, layout, "broadcast")
        work = dist.broadcast(message, src, group, asynchronous, group_src)
        return Transfer(work, lambda: encoding.decode(message, values, layout), (message,))

    return call.run({"broadcast": layout.bytes}, begin, [values], [tensor])


def all_to_all_single(
    output: Tensor,
    input: Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: Group = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None:
    """`torch.distributed.all_to_all_single`: to each rank its part; splits may be uneven and empty.

    Splits count rows. Without them the values are divided evenly, whatever the shape, as torch did before 2.14.

    With splits it goes in FP8 at any size, for payloads may differ: give `min_bytes` where they do not.
    """
    even = not (output_split_sizes or input_split_sizes)  # known to all ranks
    compared = {"values": input.numel() if even else f"rows of {math.prod(input.shape[1:])}"}
    # of an empty part nothing arrives
    call = Call("all_to_all_single", input, group, async_op, options, compared, alike=even, on_arrival=even)
    encoding, ranks, row = call.encoding, call.ranks, math.prod(input.shape[1:])
    arriving, flat_input = flat(output, "output"), flat(input, "input")
    if call.uncompressed:
        splits = (output_split_sizes, input_split_sizes)
        plain = (arriving, flat_input) if even else (output, input)
        return call.finish(dist.all_to_all_single(*plain, *splits, call.group, async_op), [output])
    if even:
        for tensor, what in ((output, "output"), (input, "input")):
            _require_even(tensor, ranks, what)
        if arriving.numel() != flat_input.numel():
            raise ValueError(
                f"output has {arriving.numel()} values and input {flat_input.numel()}; give as many, or sizes of splits"
            )
        received, sent = (Parts.even(each, ranks, encoding) for each in (arriving, flat_input))
    else:
        _require_rows(output, input)
        received_values = [row * split for split in _splits(output, output_split_sizes, ranks, "output")]
        sent_values = [row * split for split in _splits(input, input_split_sizes, ranks, "input")]
        received = Parts.of_tensors(arriving.split(received_values), encoding)
        sent = Parts.of_tensors(flat_input.split(sent_values), encoding)
    return _exchange(call, sent, received, [output])


def all_to_all(
    output_tensor_list: list[Tensor],
    input_tensor_list: list[Tensor],
    group: Group = None,
    async_op: bool = False,
    **options: Unpack[Options],
) -> Work | None:
    """`torch.distributed.all_to_all`: to each rank its tensor; `min_bytes` as in `all_to_all_single`."""
    ranks = ranks_of(group)
    require_one_for_each(input_tensor_list, ranks, "input_tensor_list")
    require_one_for_each(output_tensor_list, ranks, "output_tensor_list")
    # a rank outside the group may give empty lists, which have no first tensor to decide by
    if ranks < 1:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    given = sum(tensor.nbytes for tensor in input_tensor_list)
    first = input_tensor_list[0]
    # of an empty part nothing arrives
    call = Call("all_to_all", first, group, async_op, options, {}, given=given, alike=False, on_arrival=False)
    if call.uncompressed:
        work = dist.all_to_all(output_tensor_list, input_tensor_list, call.group, async_op)
        return call.finish(work, output_tensor_list)
    arriving = [flat(tensor, "output_tensor_list") for tensor in output_tensor_list]
    inputs = [flat(tensor, "input_tensor_list") for tensor in input_tensor_list]
    sent, received = (Parts.of_tensors(tensors, call.encoding) for tensors in (inputs, arriving))
    return _exchange(call, sent, received, output_tensor_list)


def _exchange(call: Call, sent: Parts, received: Parts, outputs: list[Tensor]) -> Work | None:
    """Send each rank its part."""
    encoding, like = call.encoding, sent.tensors[0]

    def begin(asynchronous: bool) -> Transfer:
        message, arriving = new_message(like, sent.bytes), new_message(like, received.bytes)
        sent.encode(message, encoding, call.name)
        # without sizes torch takes its path for even parts
        work = dist.all_to_all_single(arriving, message, received.sizes, sent.sizes, call.group, asynchronous)
        return Transfer(work, lambda: received.decode(arriving, encoding), (arriving, message))

    return call.run({"all_to_all_single": sent.bytes}, begin, list(sent.tensors), outputs)


def _require_even(tensor: Tensor, ranks: int, what: str) -> None:
    if tensor.numel() % ranks:
        raise ValueError(
            f"{what} has {tensor.numel()} values, which do not divide by {ranks} ranks; give {what}_split_sizes"
        )


def _require_rows(output: Tensor, input: Tensor) -> None:
    # where nothing arrives, any shape without values does
    alike = output.numel() == 0 or output.shape[1:].numel() == input.shape[1:].numel()
    if not (output.dim() and input.dim() and alike):
        raise ValueError(
            f"output is {list(output.shape)} and input {list(input.shape)}, of which splits divide rows; give tensors "
            "of one dimension or more, with as many values in each row"
        )


def _splits(tensor: Tensor, split_sizes: Sequence[int] | None, ranks: int, what: str) -> list[int]:
    """Return how many rows belong to each rank."""
    rows = tensor.shape[0]
    if not split_sizes:
        if rows % ranks:
            raise ValueError(f"{what} has {rows} rows, which do not divide by {ranks} ranks; give {what}_split_sizes")
        return [rows // ranks] * ranks
    if not all(isinstance(size, Integral) for size in split_sizes):
        raise TypeError(f"{what}_split_sizes is {list(split_sizes)}; give whole numbers")
    # a rank that expects less than it is sent would die without an error of Python
    if len(split_sizes) != ranks or sum(split_sizes) != rows or min(split_sizes) < 0:
        raise ValueError(
            f"{what}_split_sizes is {list(split_sizes)}; give {ranks} sizes, one for each rank and none below zero, "
            f"that add up to {rows}"
        )
    return list(split_sizes)
