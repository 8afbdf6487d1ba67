"""The collectives of `torch.distributed` with FP8 on the wire: same names, arguments and semantics.

Two keyword arguments come on top: `encoding` (`Encoding`) and `min_bytes`, the smallest payload that is sent in FP8
(`threshold`). All ranks of a call must give the same. What goes uncompressed, and why, is in `statistics`.

Every value is rounded once on its way, and in `all_reduce` twice whatever the number of ranks: pieces are exchanged,
added in FP32 from the first rank to the last, cast again and gathered. A rank decodes its own piece from the message as
the others do, so all ranks hold the same bits, at every run.

An infinity or a NaN arrives as NaN, with the block that shares its scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from fp8booster.comm.agreement import Claim, claim
from fp8booster.comm.encoding import DEFAULT, Encoding
from fp8booster.comm.one_sided import Mailbox, mailbox_of, transfer
from fp8booster.comm.statistics import count_encoded, count_plain
from fp8booster.comm.threshold import ranks_of, why_plain
from fp8booster.comm.work import Transfer, finish_plain, run
from fp8booster.kernels.alignment import aligned
from fp8booster.kernels.message_layout import MessageLayout

ReduceOp = dist.ReduceOp
Op = dist.ReduceOp | dist.ReduceOp.RedOpType


def all_reduce(
    tensor: torch.Tensor,
    op: Op = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.all_reduce`: the sum or mean over ranks, in place. Other reductions run plain."""
    group = group or dist.group.WORLD  # looked up once
    ranks = ranks_of(group)
    claimed = claim(
        group,
        "all_reduce",
        async_op=async_op and tensor.is_cuda,  # gloo's first exchange blocks
        values=tensor.numel(),
        dtype=tensor.dtype,
        op=name_of(op),
        encoding=encoding,
        min_bytes=min_bytes,
    )
    count = aligned(math.ceil(tensor.numel() / ranks))
    layout = encoding.even(count, ranks)
    mailbox = mailbox_of(group, tensor, layout.bytes)
    reason = why_plain("all_reduce", tensor, tensor.nbytes, group, min_bytes, op, one_sided=mailbox is not None)
    if reason is not None:
        count_plain("all_reduce", ranks, tensor.nbytes, reason)
        if divides(op, tensor, ranks):
            tensor.detach().div_(ranks)
            op = ReduceOp.SUM
        return finish_plain(dist.all_reduce(tensor, op, group, async_op), [tensor], claimed)
    values, piece = flat(tensor, "tensor"), encoding.even(count)
    count_encoded(
        "all_reduce", ranks, tensor.nbytes, {"all_to_all_single": layout.bytes, "all_gather_into_tensor": piece.bytes}
    )

    def begin(asynchronous: bool) -> Transfer:
        if mailbox is not None:
            mailbox.all_reduce(values, layout, piece, encoding, factor_of(op, ranks))
            return transfer(asynchronous, [tensor])
        message, received = new_message(values, layout.bytes), new_message(values, layout.bytes)
        encoding.encode(values, message, layout)
        dist.all_to_all_single(received, message, group=group)
        own = _place_of_own(message, piece, group)
        encoding.decode_sum_encode(received, own, layout, factor_of(op, ranks))
        work = gather_bytes(message, own, group, asynchronous)
        return Transfer(work, lambda: encoding.decode(message, values, layout), (message,))

    return run(begin, inputs=[values], outputs=[tensor], group=group, async_op=async_op, claimed=claimed)


def reduce_scatter_tensor(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.reduce_scatter_tensor`: each rank's part of the sum or mean over ranks, rounded once."""
    group = group or dist.group.WORLD  # looked up once
    ranks = ranks_of(group)
    claimed = claim(
        group,
        "reduce_scatter_tensor",
        async_op=async_op,
        values=input.numel(),
        dtype=input.dtype,
        op=name_of(op),
        encoding=encoding,
        min_bytes=min_bytes,
    )
    mailbox = mailbox_of(group, output, encoding.even(output.numel(), ranks).bytes)
    reason = why_plain(
        "reduce_scatter_tensor", input, input.nbytes, group, min_bytes, op, one_sided=mailbox is not None
    )
    if reason is not None:
        return reduce_scatter_plainly(output, input, op, group, async_op, reason, claimed)
    sums, values = flat(output, "output"), flat(input, "input")
    require_multiple(values, sums, ranks, "input", "output")

    def begin(asynchronous: bool) -> Transfer:
        return sums_of_parts([values], sums, op, group, encoding, mailbox, asynchronous)

    return run(begin, inputs=[values], outputs=[output], group=group, async_op=async_op, claimed=claimed)


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Op = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.reduce_scatter`: the sum or mean over ranks of what each has for this rank in its list.

    It is `reduce_scatter_tensor` of a copy in which the list's tensors lie one after the other, and counted as that.
    """
    require_one_for_each(input_list, group, "input_list")
    for tensor in input_list:
        if tensor.numel() != output.numel():
            raise ValueError(
                f"a tensor of input_list has {tensor.numel()} values and output {output.numel()}; give tensors of one "
                "size"
            )
    joined = torch.cat([tensor.detach().reshape(-1) for tensor in input_list]) if input_list else output
    return reduce_scatter_tensor(output, joined, op, group, async_op, encoding=encoding, min_bytes=min_bytes)


def all_gather_into_tensor(
    output_tensor: torch.Tensor,
    input_tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.all_gather_into_tensor`: every rank's tensor, in one."""
    group = group or dist.group.WORLD  # looked up once
    ranks = ranks_of(group)
    claimed = claim(
        group,
        "all_gather_into_tensor",
        async_op=async_op,
        values=input_tensor.numel(),
        dtype=input_tensor.dtype,
        encoding=encoding,
        min_bytes=min_bytes,
    )
    piece = encoding.even(input_tensor.numel())
    mailbox = mailbox_of(group, input_tensor, piece.bytes)
    reason = why_plain(
        "all_gather_into_tensor", input_tensor, output_tensor.nbytes, group, min_bytes, one_sided=mailbox is not None
    )
    if reason is not None:
        count_plain("all_gather_into_tensor", ranks, input_tensor.nbytes, reason)
        work = one_tensor("all_gather")(output_tensor, input_tensor, group, async_op)
        return finish_plain(work, [output_tensor], claimed)
    gathered, values = flat(output_tensor, "output_tensor"), flat(input_tensor, "input_tensor")
    require_multiple(gathered, values, ranks, "output_tensor", "input_tensor")
    layout = encoding.even(values.numel(), ranks)
    count_encoded("all_gather_into_tensor", ranks, input_tensor.nbytes, {"all_gather_into_tensor": piece.bytes})

    def begin(asynchronous: bool) -> Transfer:
        if mailbox is not None:
            mailbox.all_gather(values, gathered, layout, piece, encoding)
            return transfer(asynchronous, [output_tensor])
        message, work = _encode_and_gather(values, layout, piece, encoding, group, asynchronous)
        return Transfer(work, lambda: encoding.decode(message, gathered, layout), (message,))

    return run(begin, inputs=[values], outputs=[output_tensor], group=group, async_op=async_op, claimed=claimed)


def all_gather(
    tensor_list: list[torch.Tensor],
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.all_gather`: every rank's tensor, in a list; sizes may differ where the backend allows it."""
    group = group or dist.group.WORLD  # looked up once
    ranks = ranks_of(group)
    require_one_for_each(tensor_list, group, "tensor_list")
    claimed = claim(
        group,
        "all_gather",
        async_op=async_op,
        values=tuple(gathered.numel() for gathered in tensor_list),
        dtype=tensor.dtype,
        encoding=encoding,
        min_bytes=min_bytes,
    )
    payload = sum(gathered.nbytes for gathered in tensor_list)
    reason = why_plain("all_gather", tensor, payload, group, min_bytes)
    if reason is not None:
        count_plain("all_gather", ranks, tensor.nbytes, reason)
        return finish_plain(dist.all_gather(tensor_list, tensor, group, async_op), tensor_list, claimed)
    own_count = tensor_list[group.rank()].numel()
    if own_count != tensor.numel():
        raise ValueError(
            f"tensor has {tensor.numel()} values and this rank's place in tensor_list {own_count}; give the same"
        )
    values = flat(tensor, "tensor")
    outputs = [flat(gathered, "tensor_list") for gathered in tensor_list]
    layout = encoding.uneven([gathered.numel() for gathered in outputs])
    piece = encoding.even(values.numel())
    count_encoded("all_gather", ranks, tensor.nbytes, {"all_gather": piece.bytes})

    def begin(asynchronous: bool) -> Transfer:
        if layout.is_even:  # a list would be copied once more
            message, work = _encode_and_gather(values, layout, piece, encoding, group, asynchronous)
            parts = message.split(layout.sizes)
        else:
            own = new_message(values, piece.bytes)
            encoding.encode(values, own, piece)
            message = new_message(values, layout.bytes)
            parts = message.split(layout.sizes)
            work = dist.all_gather(list(parts), own, group, asynchronous)
        return Transfer(work, lambda: _decode_each(parts, outputs, encoding), (message,))

    return run(begin, inputs=[values], outputs=tensor_list, group=group, async_op=async_op, claimed=claimed)


def all_to_all_single(
    output: torch.Tensor,
    input: torch.Tensor,
    output_split_sizes: list[int] | None = None,
    input_split_sizes: list[int] | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.all_to_all_single`: to each rank its part; splits may be uneven and empty.

    Splits count rows. Without them the values are divided evenly, whatever the shape, as torch does.

    With splits it goes in FP8 at any size, for payloads may differ: give `min_bytes` where they do not.
    """
    group = group or dist.group.WORLD  # looked up once
    ranks = ranks_of(group)
    even = not (output_split_sizes or input_split_sizes)  # known to all ranks
    claimed = claim(
        group,
        "all_to_all_single",
        async_op=async_op,
        on_arrival=even,  # of an empty part nothing arrives
        values=input.numel() if even else f"rows of {math.prod(input.shape[1:])}",
        dtype=input.dtype,
        encoding=encoding,
        min_bytes=min_bytes,
    )
    mailbox = mailbox_of(group, input, encoding.even(input.numel() // ranks, ranks).bytes) if even else None
    reason = why_plain(
        "all_to_all_single", input, input.nbytes, group, min_bytes, one_sided=mailbox is not None, alike=even
    )
    if reason is not None:
        count_plain("all_to_all_single", ranks, input.nbytes, reason)
        splits = (output_split_sizes, input_split_sizes)
        return finish_plain(dist.all_to_all_single(output, input, *splits, group, async_op), [output], claimed)
    arriving, values = flat(output, "output"), flat(input, "input")
    received_counts = _split_counts(output, output_split_sizes, ranks, "output")
    counts = _split_counts(input, input_split_sizes, ranks, "input")
    if even and arriving.numel() != values.numel():
        raise ValueError(
            f"output has {arriving.numel()} values and input {values.numel()}; give as many, or sizes of splits"
        )
    layout, received_layout = encoding.uneven(counts), encoding.uneven(received_counts)
    sizes = (None, None) if even else (received_layout.sizes, layout.sizes)
    count_encoded("all_to_all_single", ranks, input.nbytes, {"all_to_all_single": layout.bytes})

    def begin(asynchronous: bool) -> Transfer:
        if mailbox is not None:
            mailbox.all_to_all(values, arriving, layout, encoding)
            return transfer(asynchronous, [output])
        message, received = new_message(values, layout.bytes), new_message(values, received_layout.bytes)
        encoding.encode(values, message, layout)
        work = dist.all_to_all_single(received, message, *sizes, group, asynchronous)
        return Transfer(work, lambda: encoding.decode(received, arriving, received_layout), (received, message))

    return run(begin, inputs=[values], outputs=[output], group=group, async_op=async_op, claimed=claimed)


def all_to_all(
    output_tensor_list: list[torch.Tensor],
    input_tensor_list: list[torch.Tensor],
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.all_to_all`: to each rank its tensor; `min_bytes` as in `all_to_all_single`."""
    group = group or dist.group.WORLD
    ranks = ranks_of(group)
    require_one_for_each(input_tensor_list, group, "input_tensor_list")
    require_one_for_each(output_tensor_list, group, "output_tensor_list")
    if ranks < 1:
        return dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
    claimed = claim(
        group,
        "all_to_all",
        async_op=async_op,
        on_arrival=False,  # of an empty part nothing arrives
        dtype=input_tensor_list[0].dtype,
        encoding=encoding,
        min_bytes=min_bytes,
    )
    payload = sum(tensor.nbytes for tensor in input_tensor_list)
    reason = why_plain("all_to_all", input_tensor_list[0], payload, group, min_bytes, alike=False)
    if reason is not None:
        count_plain("all_to_all", ranks, payload, reason)
        work = dist.all_to_all(output_tensor_list, input_tensor_list, group, async_op)
        return finish_plain(work, output_tensor_list, claimed)
    outputs = [flat(tensor, "output_tensor_list") for tensor in output_tensor_list]
    inputs = [flat(tensor, "input_tensor_list") for tensor in input_tensor_list]
    received_layout = encoding.uneven([tensor.numel() for tensor in outputs])
    layout = encoding.uneven([tensor.numel() for tensor in inputs])
    count_encoded("all_to_all", ranks, payload, {"all_to_all_single": layout.bytes})

    def begin(asynchronous: bool) -> Transfer:
        message, received = (new_message(inputs[0], layout.bytes), new_message(inputs[0], received_layout.bytes))
        for part, values in zip(message.split(layout.sizes), inputs, strict=True):
            encoding.encode(values, part, encoding.even(values.numel()))
        work = dist.all_to_all_single(received, message, received_layout.sizes, layout.sizes, group, asynchronous)
        parts = received.split(received_layout.sizes)
        return Transfer(work, lambda: _decode_each(parts, outputs, encoding), (received, message))

    return run(begin, inputs=inputs, outputs=output_tensor_list, group=group, async_op=async_op, claimed=claimed)


def broadcast(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    group_src: int | None = None,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.broadcast`, but that the source's tensor is rounded too: all ranks hold the same bits."""
    group = group or dist.group.WORLD
    ranks = ranks_of(group)
    source = src if group_src is None or ranks < 1 else dist.get_global_rank(group, group_src)
    claimed = claim(
        group,
        "broadcast",
        async_op=async_op,
        on_arrival=False,  # of the source alone
        values=tensor.numel(),
        dtype=tensor.dtype,
        source=source,
        encoding=encoding,
        min_bytes=min_bytes,
    )
    reason = why_plain("broadcast", tensor, tensor.nbytes, group, min_bytes)
    if reason is not None:
        count_plain("broadcast", ranks, tensor.nbytes, reason)
        work = dist.broadcast(tensor, src, group, async_op, group_src)
        return finish_plain(work, [tensor], claimed)
    values = flat(tensor, "tensor")
    is_source = dist.get_rank() == source
    layout = encoding.even(values.numel())
    count_encoded("broadcast", ranks, tensor.nbytes, {"broadcast": layout.bytes})

    def begin(asynchronous: bool) -> Transfer:
        message = new_message(values, layout.bytes)
        if is_source:
            encoding.encode(values, message, layout)
        work = dist.broadcast(message, src, group, asynchronous, group_src)
        return Transfer(work, lambda: encoding.decode(message, values, layout), (message,))

    return run(begin, inputs=[values], outputs=[tensor], group=group, async_op=async_op, claimed=claimed)


all_gather_single = all_gather_into_tensor
"""The name of `all_gather_into_tensor` since torch 2.13."""
reduce_scatter_single = reduce_scatter_tensor
"""The name of `reduce_scatter_tensor` since torch 2.13."""


def sums_of_parts(
    values: Sequence[torch.Tensor],
    sums: torch.Tensor,
    op: Op,
    group: dist.ProcessGroup | None,
    encoding: Encoding,
    mailbox: Mailbox | None,
    asynchronous: bool = False,
) -> Transfer:
    """Begin to write this rank's part of the sum or mean of tensors, side by side, over ranks to `sums`; counts it."""
    ranks = ranks_of(group)
    factor = factor_of(op, ranks)
    layout = encoding.even(sums.numel(), ranks)
    payload = ranks * sums.numel() * values[0].element_size()
    count_encoded("reduce_scatter_tensor", ranks, payload, {"all_to_all_single": layout.bytes})
    if mailbox is not None:
        mailbox.reduce_scatter(values, sums, layout, encoding, factor)
        return transfer(asynchronous, [sums])
    message, received = new_message(sums, layout.bytes), new_message(sums, layout.bytes)
    encoding.encode(values, message, layout)
    work = dist.all_to_all_single(received, message, group=group, async_op=asynchronous)
    return Transfer(work, lambda: encoding.decode_sum(received, sums, layout, factor), (received, message))


def flat(tensor: torch.Tensor, what: str) -> torch.Tensor:
    """A tensor's values in one dimension, without a copy.

    Raises:
        ValueError: they do not lie one after the other.
    """
    if not tensor.is_contiguous():
        raise ValueError(f"{what} is not contiguous; call .contiguous() on it first")
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if tensor.dim() == 1 else tensor.view(-1)


def new_message(beside: torch.Tensor, size: int) -> torch.Tensor:
    """Memory for a message of `size` bytes, on the device of a tensor."""
    return torch.empty(size, dtype=torch.uint8, device=beside.device)


def gather_bytes(
    message: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup | None, asynchronous: bool = False
) -> Work | None:
    """Gather every rank's bytes into `message`, as they are; the caller counts them."""
    return one_tensor("all_gather")(message, own, group, asynchronous)


def gather_many(messages: Sequence[tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup | None) -> list[Work]:
    """Begin to gather (message, own part) for several messages, by one launch of NCCL; wait for all it returns."""
    if ranks_of(group) == 1:  # such as that of the ranks which hold the same experts
        for message, own in messages:
            if message.data_ptr() != own.data_ptr():
                message.copy_(own)
        return []
    if not messages[0][0].is_cuda:
        return [gather_bytes(message, own, group, asynchronous=True) for message, own in messages]
    with dist._coalescing_manager(group, async_ops=True) as coalesced:
        for message, own in messages:
            gather_bytes(message, own, group, asynchronous=True)
    return [coalesced]


def one_tensor(collective: str) -> Callable[..., Work | None]:
    """`all_gather` or `reduce_scatter` of one tensor: torch 2.13 deprecates the name that torch before it has."""
    return getattr(dist, _NAMES[collective])


_NAMES = {
    collective: newest if hasattr(dist, newest) else older
    for collective, newest, older in (
        ("all_gather", "all_gather_single", "all_gather_into_tensor"),
        ("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
    )
}


def _encode_and_gather(
    values: torch.Tensor,
    layout: MessageLayout,
    piece: MessageLayout,
    encoding: Encoding,
    group: dist.ProcessGroup,
    asynchronous: bool,
) -> tuple[torch.Tensor, Work | None]:
    """Encode into this rank's place of the gathered message and gather the others' there."""
    message = new_message(values, layout.bytes)
    own = _place_of_own(message, piece, group)
    encoding.encode(values, own, piece)
    return message, gather_bytes(message, own, group, asynchronous)


def _place_of_own(message: torch.Tensor, piece: MessageLayout, group: dist.ProcessGroup) -> torch.Tensor:
    """This rank's piece of a message that is gathered."""
    start = group.rank() * piece.bytes
    return message[start : start + piece.bytes]


def _decode_each(parts: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], encoding: Encoding) -> None:
    for part, values in zip(parts, outputs, strict=True):
        encoding.decode(part, values, encoding.even(values.numel()))


def reduce_scatter_plainly(
    output: torch.Tensor,
    input: torch.Tensor,
    op: Op,
    group: dist.ProcessGroup | None,
    async_op: bool,
    reason: str,
    claimed: Claim | None = None,
) -> Work | None:
    """`reduce_scatter_tensor` uncompressed, counted with the reason."""
    ranks = ranks_of(group)
    count_plain("reduce_scatter_tensor", ranks, input.nbytes, reason)
    if divides(op, input, ranks):
        input, op = input.detach() / ranks, ReduceOp.SUM
    work = one_tensor("reduce_scatter")(output, input, op, group, async_op)
    return finish_plain(work, [output], claimed)


def divides(op: Op, tensor: torch.Tensor, ranks: int) -> bool:
    """Whether a plain mean is a sum of what ranks have divided: gloo, on the CPU, knows none.

    Divided first, as NCCL does, for the sum of what has a finite mean may overflow.
    """
    return op == ReduceOp.AVG and tensor.is_floating_point() and not tensor.is_cuda and ranks > 0


def name_of(op: Op) -> str:
    """What tells reductions apart."""
    return getattr(op, "name", "with a factor")


def require_one_for_each(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup | None, what: str) -> None:
    """Raise ValueError where a list has not one tensor for each rank of a group that this one is in."""
    ranks = ranks_of(group)
    if ranks > 0 and len(tensors) != ranks:
        raise ValueError(f"{what} has {len(tensors)} tensors; give {ranks}, one for each rank")


def factor_of(op: Op, ranks: int) -> float:
    return 1.0 / ranks if op == ReduceOp.AVG else 1.0


def require_multiple(large: torch.Tensor, small: torch.Tensor, ranks: int, large_name: str, small_name: str) -> None:
    """Raise ValueError where `large` has not `ranks` times as many values as `small`."""
    if large.numel() != ranks * small.numel():
        raise ValueError(
            f"{large_name} has {large.numel()} values and {small_name} {small.numel()}; {large_name} must have "
            f"{ranks} times as many, once for each rank"
        )


def _split_counts(tensor: torch.Tensor, split_sizes: Sequence[int] | None, ranks: int, what: str) -> list[int]:
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
