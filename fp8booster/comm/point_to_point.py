"""Sending and receiving with FP8 on the wire: the names, arguments and semantics of `torch.distributed`.

Sender and receiver must give the same `encoding` and `min_bytes`, and tensors of one size and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work
from typing_extensions import Unpack

from fp8booster.comm.call import FinishingWork, Transfer, run
from fp8booster.comm.encoding import DEFAULT, Encoding, Options, settings
from fp8booster.comm.observer import observer
from fp8booster.comm.threshold import Group, uncompressed_reason
from fp8booster.comm.transport import flat, new_message


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    **options: Unpack[Options],
) -> None:
    """`torch.distributed.send` in FP8, to a rank that calls `recv` or `irecv` of this module."""
    encoding, reason = _decide(tensor, group, options)
    return dist.send(_outgoing(tensor, group, encoding, reason), dst, group, tag, group_dst)


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    **options: Unpack[Options],
) -> int:
    """`torch.distributed.recv` of what `send` or `isend` of this module sent."""
    message, finish = _incoming(tensor, *_decide(tensor, group, options))
    source = dist.recv(message, src, group, tag, group_src)
    finish()
    return source


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_dst: int | None = None,
    **options: Unpack[Options],
) -> Work | None:
    """`torch.distributed.isend` in FP8: as `send`, with a handle to wait for before the tensor changes."""
    encoding, reason = _decide(tensor, group, options)

    def begin(_: bool) -> Transfer:
        message = _outgoing(tensor, group, encoding, reason)
        return Transfer(dist.isend(message, dst, group, tag, group_dst), messages=(message,))

    if reason is not None:
        # torch's own handle: what is sent is the caller's tensor, so no memory is to be kept and nothing decoded
        return begin(True).work
    return _handle(run(begin, [tensor], [], group, async_op=True), [])


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: Group = None,
    tag: int = 0,
    group_src: int | None = None,
    **options: Unpack[Options],
) -> Work | None:
    """`torch.distributed.irecv`: as `recv`, with a handle to wait for before the tensor is read."""
    encoding, reason = _decide(tensor, group, options)

    def begin(_: bool) -> Transfer:
        message, finish = _incoming(tensor, encoding, reason)
        return Transfer(dist.irecv(message, src, group, tag, group_src), finish, (message,))

    return _handle(begin(True) if reason is not None else run(begin, [], [tensor], group, async_op=True), [tensor])


class P2POp(dist.P2POp):
    """`torch.distributed.P2POp` whose `op` is `isend` or `irecv` of this module.

    With `uncompressed`, a reason that `statistics` shows, the tensor is sent as it is; both ends must give one.
    """

    def __new__(cls, op: Callable[..., Any], tensor: Tensor, *_: Any, **__: Any) -> P2POp:
        """Check the operation as torch does."""
        # torch accepts its own isend and irecv alone
        return super().__new__(cls, _transport(op), tensor)

    def __init__(
        self,
        op: Callable[..., Any],
        tensor: Tensor,
        peer: int | None = None,
        group: Group = None,
        tag: int = 0,
        group_peer: int | None = None,
        *,
        encoding: Encoding = DEFAULT,
        min_bytes: int | None = None,
        uncompressed: str | None = None,
    ) -> None:
        super().__init__(_transport(op), tensor, peer, group, tag, group_peer)
        self.encoding = encoding
        self.min_bytes = min_bytes
        self.uncompressed = uncompressed


def batch_isend_irecv(p2p_op_list: list[P2POp]) -> list[Work]:
    """`torch.distributed.batch_isend_irecv` of `P2POp`s.

    Returns:
        handles that must all be waited for, one for each operation or, where the backend joins them, one for all.
    """
    if not p2p_op_list:
        raise ValueError("p2p_op_list is empty; give one operation or more, or leave the call out")
    transports, transfers, outputs = [], [], []
    for each in p2p_op_list:
        reason = each.uncompressed or _reason(each.tensor, each.group, each.min_bytes)
        if each.op is dist.isend:
            transfer = Transfer(None, messages=(_outgoing(each.tensor, each.group, each.encoding, reason),))
        else:
            message, finish = _incoming(each.tensor, each.encoding, reason)
            transfer = Transfer(None, finish, (message,))
        # messages in the order of the operations: both ends match them by it
        transports.append(dist.P2POp(each.op, transfer.messages[0], each.peer, each.group, each.tag))
        transfers.append(transfer)
        outputs.append([] if each.op is dist.isend else [each.tensor])
    works = dist.batch_isend_irecv(transports)
    # gloo gives a handle for each operation, NCCL one for all
    if len(works) == len(p2p_op_list):
        return [
            FinishingWork(work, transfer, received)
            for work, transfer, received in zip(works, transfers, outputs, strict=True)
        ]

    def finish_all() -> None:
        for transfer in transfers:
            transfer.finish()

    (joined,) = works
    messages = [transfer.messages[0] for transfer in transfers]
    return [FinishingWork(joined, Transfer(joined, finish_all, messages), [out for each in outputs for out in each])]


def _handle(transfer: Transfer, outputs: list[Tensor]) -> Work | None:
    """Return the handle of a transfer; torch gives none to a rank outside the group."""
    return None if transfer.work is None else FinishingWork(transfer.work, transfer, outputs)


def _decide(tensor: Tensor, group: Group, options: Options) -> tuple[Encoding, str | None]:
    """Return the encoding, and the reason for which the tensor goes uncompressed nevertheless, or None."""
    encoding, min_bytes, _ = settings(**options)
    return encoding, _reason(tensor, group, min_bytes)


def _reason(tensor: Tensor, group: Group, min_bytes: int | None) -> str | None:
    """Return the reason for which a tensor goes uncompressed; its receiver finds the same."""
    return uncompressed_reason("send", tensor, tensor.nbytes, group, min_bytes)


def _outgoing(tensor: Tensor, group: Group, encoding: Encoding, reason: str | None) -> Tensor:
    """Count a send and return its message, or the tensor itself where there is a reason."""
    if reason is not None:
        observer.count_plain("send", dist.get_world_size(group), tensor.nbytes, reason)
        return tensor
    values = flat(tensor, "tensor")
    layout = encoding.layout(values.numel())
    message = new_message(values, layout.bytes)
    encoding.encode(values, message, layout)
    observer.count_encoded("send", dist.get_world_size(group), tensor.nbytes, {"send": layout.bytes})
    return message


def _incoming(tensor: Tensor, encoding: Encoding, reason: str | None) -> tuple[Tensor, Callable[[], None]]:
    """Return the memory to receive a tensor in, and the function to call once it is there."""
    if reason is not None:
        # torch does not count what it receives as a change, by which a stale amax or FP8 copy would be known
        return tensor, lambda: torch.autograd.graph.increment_version(tensor)
    values = flat(tensor, "tensor")
    layout = encoding.layout(values.numel())
    message = new_message(values, layout.bytes)
    return message, lambda: encoding.decode(message, values, layout)


def _transport(op: Callable[..., Any]) -> Callable[..., Any]:
    return {isend: dist.isend, irecv: dist.irecv}.get(op, op)
