"""Many tensors in few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from fp8booster.comm.call import Call
from fp8booster.comm.encoding import DEFAULT, Encoding, Options
from fp8booster.comm.reductions import all_reduce, reduce_scatter_uncompressed, sum_parts
from fp8booster.comm.threshold import Group, Op, ReduceOp, ranks_of
from fp8booster.kernels.message_layout import side_by_side

BUCKET_BYTES = 64 * 2**20
"""From this size FP8 pays inside a node too (`threshold`)."""


def all_reduce_coalesced(
    tensors: Sequence[Tensor],
    op: Op = ReduceOp.SUM,
    group: Group = None,
    *,
    encoding: Encoding = DEFAULT,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """`all_reduce` of many tensors, in place, side by side in messages of about `bucket_bytes`.

    Args:
        tensors: of any shapes and dtypes; those of one dtype share messages.
        op, group, encoding: as in `all_reduce`. Tensors that share a message share the scales of some blocks.
        bucket_bytes: a message is sent when the next tensor would not fit; a larger tensor is one of its own.
    """
    for bucket in _buckets(tensors, bucket_bytes):
        message = torch.cat([tensor.detach().reshape(-1) for tensor in bucket])
        all_reduce(message, op, group, encoding=encoding)
        copy_parts(bucket, message)


def reduce_scatter_coalesced(
    outputs: Tensor, inputs: Sequence[Tensor], op: Op = ReduceOp.SUM, group: Group = None, **options: Unpack[Options]
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
        claimed_as="reduce_scatter_coalesced",
    )
    if not call.goes_uncompressed(given=sum(sizes) * inputs[0].element_size()):
        sum_parts(call, inputs, outputs, outputs)
    elif ranks == 1 and op in (ReduceOp.SUM, ReduceOp.AVG):
        torch._foreach_copy_(outputs.split(sizes), [tensor.view(-1) for tensor in inputs])
    else:
        values = side_by_side(inputs, ranks)
        part = torch.empty_like(outputs, dtype=values.dtype)
        reduce_scatter_uncompressed(call, part, values)
        outputs.copy_(part)


@torch.no_grad()
def copy_parts(tensors: Sequence[Tensor], message: Tensor) -> None:
    """Set tensors to what lies side by side in a message."""
    parts = message.split([tensor.numel() for tensor in tensors])
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), shaped)


def _buckets(tensors: Sequence[Tensor], bucket_bytes: int) -> Iterator[list[Tensor]]:
    """The tensors, those of one dtype together, in lists of at most `bucket_bytes` or of one tensor."""
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
