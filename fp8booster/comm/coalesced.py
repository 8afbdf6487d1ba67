"""Many tensors in few messages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from fp8booster.comm.collectives import Op, ReduceOp, all_reduce
from fp8booster.comm.encoding import DEFAULT, Encoding

BUCKET_BYTES = 64 * 2**20
"""From this size FP8 pays inside a node too (`threshold`)."""


def all_reduce_coalesced(
    tensors: Sequence[torch.Tensor],
    op: Op = ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
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


@torch.no_grad()
def copy_parts(tensors: Sequence[torch.Tensor], message: torch.Tensor) -> None:
    """Set tensors to what lies side by side in a message."""
    parts = message.split([tensor.numel() for tensor in tensors])
    shaped = [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]
    torch._foreach_copy_(list(tensors), shaped)


def _buckets(tensors: Sequence[torch.Tensor], bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
    """The tensors, those of one dtype together, in lists of at most `bucket_bytes` or of one tensor."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket, size = [], 0
        for tensor in tensors:
            if tensor.dtype is not dtype:
                continue
            if bucket and size + tensor.nbytes > bucket_bytes:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket
