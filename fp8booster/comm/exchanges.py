"""All-to-alls with FP8 on the wire, under the names, arguments and semantics of `torch.distributed`."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from typing_extensions import Unpack

from fp8booster.comm.call import Call
from fp8booster.comm.encoding import Options, decode_pieces, encode_pieces
from fp8booster.comm.threshold import Group, ranks_of
from fp8booster.comm.transport import flat, new_message, require_one_for_each
from fp8booster.comm.work import Transfer
from fp8booster.kernels.message_layout import MessageLayout


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

    Splits count rows. Without them the values are divided evenly, whatever the shape, as torch does.

    With splits it goes in FP8 at any size, for payloads may differ: give `min_bytes` where they do not.
    """
    even = not (output_split_sizes or input_split_sizes)  # known to all ranks
    values = input.numel() if even else f"rows of {math.prod(input.shape[1:])}"
    # of an empty part nothing arrives
    call = Call("all_to_all_single", input, group, async_op, options, {"values": values}, on_arrival=even)
    encoding, ranks = call.encoding, call.ranks
    if call.goes_uncompressed(alike=even):
        splits = (output_split_sizes, input_split_sizes)
        return call.finish(dist.all_to_all_single(output, input, *splits, call.group, async_op), [output])
    arriving, flat_input = flat(output, "output"), flat(input, "input")
    received_layout = encoding.uneven(_split_counts(output, output_split_sizes, ranks, "output"))
    layout = encoding.uneven(_split_counts(input, input_split_sizes, ranks, "input"))
    if even and arriving.numel() != flat_input.numel():
        raise ValueError(
            f"output has {arriving.numel()} values and input {flat_input.numel()}; give as many, or sizes of splits"
        )
    return _exchange(call, [flat_input], [arriving], layout, received_layout, [output], even)


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
    if ranks < 1:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    # of an empty part nothing arrives
    call = Call("all_to_all", input_tensor_list[0], group, async_op, options, {}, on_arrival=False)
    if call.goes_uncompressed(given=sum(tensor.nbytes for tensor in input_tensor_list), alike=False):
        work = dist.all_to_all(output_tensor_list, input_tensor_list, call.group, async_op)
        return call.finish(work, output_tensor_list)
    arriving = [flat(tensor, "output_tensor_list") for tensor in output_tensor_list]
    inputs = [flat(tensor, "input_tensor_list") for tensor in input_tensor_list]
    received_layout = call.encoding.uneven([tensor.numel() for tensor in arriving])
    layout = call.encoding.uneven([tensor.numel() for tensor in inputs])
    return _exchange(call, inputs, arriving, layout, received_layout, output_tensor_list, even=False)


def _exchange(
    call: Call,
    inputs: list[Tensor],
    arriving: list[Tensor],
    layout: MessageLayout,
    received_layout: MessageLayout,
    outputs: list[Tensor],
    even: bool,
) -> Work | None:
    """Send each rank its piece; the pieces lie in one tensor on either side, or in one for each."""
    encoding = call.encoding
    received_sizes, sizes = (None, None) if even else (received_layout.sizes, layout.sizes)

    def begin(asynchronous: bool) -> Transfer:
        message, received = new_message(inputs[0], layout.bytes), new_message(inputs[0], received_layout.bytes)
        encode_pieces(inputs, message, layout, encoding)
        work = dist.all_to_all_single(received, message, received_sizes, sizes, call.group, asynchronous)
        finish = lambda: decode_pieces(received, arriving, received_layout, encoding)  # noqa: E731
        return Transfer(work, finish, (received, message))

    return call.run({"all_to_all_single": layout.bytes}, begin, inputs, outputs)


def _split_counts(tensor: Tensor, split_sizes: Sequence[int] | None, ranks: int, what: str) -> list[int]:
    """Values that belong to each rank."""
    if not split_sizes:
        if tensor.numel() % ranks:
            raise ValueError(
                f"{what} has {tensor.numel()} values, which do not divide by {ranks} ranks; give {what}_split_sizes"
            )
        return [tensor.numel() // ranks] * ranks
    rows = tensor.shape[0]
    if len(split_sizes) != ranks or sum(split_sizes) != rows:
        raise ValueError(
            f"{what}_split_sizes is {list(split_sizes)}; give {ranks} sizes, one for each rank, that add up to {rows}"
        )
    row = math.prod(tensor.shape[1:])
    return [size * row for size in split_sizes]
