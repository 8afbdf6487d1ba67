"""Sending and receiving with FP8 on the wire: the names, arguments and semantics of `torch.distributed`.

Sender and receiver must give the same `encoding` and `min_bytes`, and tensors of one size and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Work

from fp8booster.comm.collectives import flat, new_message
from fp8booster.comm.encoding import DEFAULT, Encoding
from fp8booster.comm.statistics import count_encoded, count_plain
from fp8booster.comm.threshold import why_plain
from fp8booster.comm.work import FinishingWork, Transfer, finish_plain, run


def send(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> None:
    """`torch.distributed.send` in FP8, to a rank that calls `recv` or `irecv` of this module."""
    if _goes_plain(tensor, group, min_bytes, sent=True):
        return dist.send(tensor, dst, group, tag, group_dst)
    message = _encoded(tensor, encoding, group)
    return dist.send(message, dst, group, tag, group_dst)


def recv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> int:
    """`torch.distributed.recv` of what `send` or `isend` of this module sent."""
    if _goes_plain(tensor, group, min_bytes, sent=False):
        source = dist.recv(tensor, src, group, tag, group_src)
        finish_plain(None, [tensor])
        return source
    arriving = _Arriving(tensor, encoding)
    source = dist.recv(arriving.message, src, group, tag, group_src)
    arriving.decode()
    return source


def isend(
    tensor: torch.Tensor,
    dst: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.isend` in FP8: as `send`, with a handle to wait for before the tensor changes."""
    if _goes_plain(tensor, group, min_bytes, sent=True):
        return dist.isend(tensor, dst, group, tag, group_dst)

    def begin(_: bool) -> Transfer:
        message = _encoded(tensor, encoding, group)
        return Transfer(dist.isend(message, dst, group, tag, group_dst), _nothing, (message,))

    return run(begin, inputs=[tensor], outputs=[], group=group, async_op=True)


def irecv(
    tensor: torch.Tensor,
    src: int | None = None,
    group: dist.ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
    *,
    encoding: Encoding = DEFAULT,
    min_bytes: int | None = None,
) -> Work | None:
    """`torch.distributed.irecv`: as `recv`, with a handle to wait for before the tensor is read."""
    if _goes_plain(tensor, group, min_bytes, sent=False):
        return finish_plain(dist.irecv(tensor, src, group, tag, group_src), [tensor])

    def begin(_: bool) -> Transfer:
        arriving = _Arriving(tensor, encoding)
        work = dist.irecv(arriving.message, src, group, tag, group_src)
        return Transfer(work, arriving.decode, (arriving.message,))

    return run(begin, inputs=[], outputs=[tensor], group=group, async_op=True)


class P2POp(dist.P2POp):
    """`torch.distributed.P2POp` whose `op` is `isend` or `irecv` of this module.

    With `plain`, a reason that `statistics` shows, the tensor is sent uncompressed; both ends must give one.
    """

    def __new__(cls, op: Callable[..., Any], tensor: torch.Tensor, *arguments: Any, **_: Any) -> P2POp:
        """Check the operation as torch does."""
        return super().__new__(cls, _transport(op), tensor)

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: torch.Tensor,
        peer: int | None = None,
        group: dist.ProcessGroup | None = None,
        tag: int = 0,
        group_peer: int | None = None,
        *,
        encoding: Encoding = DEFAULT,
        min_bytes: int | None = None,
        plain: str | None = None,
    ) -> None:
        super().__init__(_transport(op), tensor, peer, group, tag, group_peer)
        self.encoding = encoding
        self.min_bytes = min_bytes
        self.plain = plain


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """`torch.distributed.batch_isend_irecv` of `P2POp`s.

    Returns:
        handles that must all be waited for, one for each operation or, where the backend joins them, one for all.
    """
    if not p2p_op_list:
        raise ValueError("p2p_op_list is empty; give one operation or more, or leave the call out")
    transports, finishes, messages, outputs = [], [], [], []
    for each in p2p_op_list:
        sends = each.op is dist.isend
        finish, message = _nothing if sends else _plain_end(each.tensor), each.tensor
        if not _goes_plain(each.tensor, each.group, each.min_bytes, sent=sends, reason=each.plain):
            if sends:
                message = _encoded(each.tensor, each.encoding, each.group)
            else:
                arriving = _Arriving(each.tensor, each.encoding)
                message, finish = arriving.message, arriving.decode
        transports.append(dist.P2POp(each.op, message, each.peer, each.group, each.tag))
        finishes.append(finish)
        messages.append(message)
        outputs.append([] if sends else [each.tensor])
    works = dist.batch_isend_irecv(transports)
    if len(works) == len(p2p_op_list):
        return [
            FinishingWork(Transfer(work, finish, (message,)), received)
            for work, finish, message, received in zip(works, finishes, messages, outputs, strict=True)
        ]

    def finish_all() -> None:
        for finish in finishes:
            finish()

    (joined,) = works
    return [FinishingWork(Transfer(joined, finish_all, messages), [out for each in outputs for out in each])]


class _Arriving:
    """A message that is to arrive, and the tensor that it is for."""

    def __init__(self, tensor: torch.Tensor, encoding: Encoding) -> None:
        self._values = flat(tensor, "tensor")
        self._encoding = encoding
        self._layout = encoding.even(self._values.numel())
        self.message = new_message(tensor, self._layout.bytes)

    def decode(self) -> None:
        self._encoding.decode(self.message, self._values, self._layout)


def _encoded(tensor: torch.Tensor, encoding: Encoding, group: dist.ProcessGroup | None) -> torch.Tensor:
    values = flat(tensor, "tensor")
    layout = encoding.even(values.numel())
    message = new_message(values, layout.bytes)
    encoding.encode(values, message, layout)
    count_encoded("send", dist.get_world_size(group), tensor.nbytes, {"send": layout.bytes})
    return message


def _goes_plain(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None,
    min_bytes: int | None,
    *,
    sent: bool,
    reason: str | None = None,
) -> bool:
    """Whether a tensor travels uncompressed, for `reason` or another, which its sender counts."""
    reason = reason or why_plain("send", tensor, tensor.nbytes, group, min_bytes)
    if reason is not None and sent:
        count_plain("send", dist.get_world_size(group), tensor.nbytes, reason)
    return reason is not None


def _plain_end(tensor: torch.Tensor) -> Callable[[], None]:
    return lambda: torch.autograd.graph.increment_version(tensor)


def _transport(op: Callable[..., Any]) -> Callable[..., Any]:
    return {isend: dist.isend, irecv: dist.irecv}.get(op, op)


def _nothing() -> None:
    pass
