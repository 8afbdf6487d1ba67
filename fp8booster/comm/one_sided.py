"""Collectives inside a node without NCCL: each GPU reads its peers' messages over NVLink and decodes what it reads.

A rank encodes into memory that its peers can read (torch.distributed's symmetric memory), all meet at a barrier, and
each then reads what it needs: one kernel is transport, decoding and sum at once, where NCCL writes a message to memory
that another kernel has to read again. No multicast is used.

    use_one_sided(group, capacity=256 * 2**20)   # every rank of the group; two such buffers a rank
    comm.all_reduce(gradients, group=group)      # goes this way if its message fits; `threshold` has sizes for it

Of payloads of 64 MiB and more every collective is faster so than by NCCL in FP8, and from 256 MiB on takes 0.54 to
0.69 of NCCL's time in BF16 (benchmarks/results/h200, 4 H200). Off unless asked for, since the memory stays taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fp8booster.comm.encoding import Encoding
from fp8booster.comm.group_end import before_end
from fp8booster.comm.threshold import INSIDE_A_NODE, group_or_all, topology
from fp8booster.comm.work import Transfer
from fp8booster.kernels.message_layout import MessageLayout, Peers

CAPACITY_UNIT = 2**21
"""The driver maps memory for peers in pages of this many bytes."""


class PeerMemory(NamedTuple):
    """Memory that every rank of a group has made and can read."""

    own: Tensor
    """uint8: what this rank made."""

    addresses: Tensor
    """int64 [ranks], on this rank's GPU: where it finds what each made."""

    meet: Callable[[], None]
    """Queues a barrier of the ranks on the current stream: behind it all that they wrote before can be read."""


def peer_memory(group: dist.ProcessGroup, device: torch.device, size: int) -> PeerMemory:
    """Make `size` bytes that the GPUs of a group inside a node can read; all its ranks call it."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    # memory of its own: two groups whose messages shared an allocation would share the barrier's flags
    own = torch._C._distributed_c10d._SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
    handle = symmetric_memory.rendezvous(own, group)
    views = [handle.get_buffer(rank, (size,), torch.uint8) for rank in range(dist.get_world_size(group))]
    addresses = torch.tensor([view.data_ptr() for view in views], dtype=torch.int64, device=device)
    timeout = group._get_backend(device).options._timeout // timedelta(milliseconds=1)
    return PeerMemory(own, addresses, lambda: handle.barrier(timeout_ms=timeout))


class Mailbox:
    """Memory of a group in which each rank leaves messages for the others to read.

    Two regions are written alternately, so one barrier an exchange is enough: who writes a region has passed the
    barrier of the exchange in between, which every rank reaches only after it has read what the region held before.

    Args:
        rank: this one's place in the group.
        device: its GPU.
        memory: both regions of every rank.
    """

    def __init__(self, rank: int, device: torch.device, memory: PeerMemory) -> None:
        self.capacity = memory.own.numel() // 2
        self._rank, self._device, self._memory = rank, device, memory
        self._regions = memory.own.split(self.capacity)
        self._written = 0
        self._stream: torch.cuda.Stream | None = None
        self._stream_handle: int | None = None

    def all_reduce(self, values: Tensor, layout: MessageLayout, encoding: Encoding, factor: float) -> None:
        """Sum `values` [N] over ranks in place."""
        self._leave(values, layout, encoding)
        parts = self._left_by_all(self._rank * layout.piece.bytes)
        encoding.decode_sum_encode(parts, self._next_region(), layout, factor)
        self._memory.meet()
        encoding.decode(self._left_by_all(), values, layout)

    def reduce_scatter(
        self, values: Sequence[Tensor], sums: Tensor, layout: MessageLayout, encoding: Encoding, factor: float
    ) -> None:
        """Write this rank's part of the sum of `values`, side by side, over ranks to `sums`."""
        self._leave(values, layout, encoding)
        encoding.decode_sum(self._left_by_all(self._rank * layout.piece.bytes), sums, layout, factor)

    def all_gather(self, values: Tensor, gathered: Tensor, layout: MessageLayout, encoding: Encoding) -> None:
        """Write every rank's `values` to `gathered`."""
        self._leave(values, layout.piece, encoding)
        encoding.decode(self._left_by_all(), gathered, layout)

    def all_to_all(self, values: Tensor, arriving: Tensor, layout: MessageLayout, encoding: Encoding) -> None:
        """Write the part of every rank's `values` that is for this rank to `arriving`; even parts."""
        self._leave(values, layout, encoding)
        encoding.decode(self._left_by_all(self._rank * layout.piece.bytes), arriving, layout)

    def _leave(self, values: Tensor | Sequence[Tensor], layout: MessageLayout, encoding: Encoding) -> None:
        """Write this rank's message, and meet the others."""
        self._follow_last_call()
        encoding.encode(values, self._next_region(), layout)
        self._memory.meet()

    def _follow_last_call(self) -> None:
        """Let the current stream wait for the last collective, where that ran on another."""
        handle = torch._C._cuda_getCurrentRawStream(self._device.index)
        if handle == self._stream_handle:
            return
        stream = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._stream_handle = stream, handle

    def _next_region(self) -> Tensor:
        """This rank's memory for the next message.

        Raises:
            RuntimeError: a CUDA graph is being captured, which would write the same region at every replay.
        """
        if self._memory.own.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a CUDA graph cannot hold collectives that read from peers, which alternate between two regions of "
                "memory; call fp8booster.comm.stop_one_sided(group), or capture less"
            )
        self._written = 1 - self._written
        return self._regions[self._written]

    def _left_by_all(self, shift: int = 0) -> Peers:
        """What every rank left in the last exchange, from byte `shift` on."""
        return Peers(self._memory.addresses, self._written * self.capacity + shift, self._rank)


class QueuedWork(Work):
    """Handle of work that the current stream has been given, with the methods of `torch.distributed.Work`."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        super().__init__()
        stream = torch.cuda.current_stream()
        for output in outputs:
            output.record_stream(stream)
        self._done = stream.record_event()
        self._future: torch.futures.Future[list[Tensor]] = torch.futures.Future(devices=[outputs[0].device])
        self._future.set_result(list(outputs))

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream wait; the barrier has the group's timeout."""
        torch.cuda.current_stream().wait_event(self._done)
        return True

    def is_completed(self) -> bool:
        """Whether the GPU has done it."""
        return self._done.query()

    is_success = is_completed

    def exception(self) -> None:
        """None: a GPU's errors are raised by the next call that waits for it."""

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the outputs."""
        return self._future


def queued_transfer(asynchronous: bool, outputs: Sequence[Tensor]) -> Transfer:
    """What `work.run` is given of a collective that the current stream has been given whole.

    The kernels raised the version of what they write when they were queued. Where the caller's stream goes on
    meanwhile, what it reads then is of before: the version is raised once more when the outputs are waited for.
    """
    if not asynchronous:
        return Transfer(None)
    return Transfer(QueuedWork(outputs), partial(torch.autograd.graph.increment_version, list(outputs)))


_mailboxes: dict[str, Mailbox] = {}
"""By the name of a group, until this ends."""


def use_one_sided(group: dist.ProcessGroup | None = None, *, capacity: int, device: torch.device | None = None) -> None:
    """Let the encoded collectives of a group inside a node read from their peers, where their messages fit.

    All ranks of the group call it. Where a job has several such groups, all its ranks must call it in step, each for
    its own: PyTorch's rendezvous counts calls over all groups (pytorch issue 196082).

    Args:
        group: the ranks; None is all.
        capacity: bytes of the largest message; each rank allocates twice as much, for good. A message has one byte a
            value and 1.6 % for scales.
        device: this rank's GPU; None is the current one.

    Raises:
        ValueError: the group is not on GPUs of one node, or `capacity` is not positive.
        RuntimeError: torch's own, where these GPUs cannot read each other's memory.
    """
    if capacity <= 0:
        raise ValueError(f"capacity is {capacity}; give the bytes of the largest message")
    group = group_or_all(group)
    if not torch.cuda.is_available():
        raise ValueError("use_one_sided is for GPUs, and torch sees none; leave it out")
    if device is None or device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if topology(device, group) != INSIDE_A_NODE:
        raise ValueError(
            "use_one_sided is for groups inside one node, whose GPUs can read each other's memory; call it with such a "
            "group or leave it out (torchrun says by LOCAL_WORLD_SIZE how many ranks a node has)"
        )
    stop_one_sided(group)
    if dist.get_world_size(group) > 1:
        memory = peer_memory(group, device, 2 * (-(-capacity // CAPACITY_UNIT) * CAPACITY_UNIT))
        _mailboxes[group.group_name] = Mailbox(dist.get_rank(group), device, memory)
        before_end(group, partial(_mailboxes.pop, group.group_name, None))


def stop_one_sided(group: dist.ProcessGroup | None = None) -> None:
    """Let a group's collectives go by NCCL again, and give back the memory. All ranks of the group call it."""
    group = group_or_all(group)
    mailbox = _mailboxes.pop(group.group_name, None)
    if mailbox is not None:
        torch.cuda.synchronize()
        dist.barrier(group)
        torch.cuda.synchronize()  # NCCL's barrier may end on the GPU alone
        del mailbox  # peers may read its memory until here


def mailbox_of(group: dist.ProcessGroup | None, tensor: Tensor, size: int) -> Mailbox | None:
    """The mailbox that a message of `size` bytes of each rank goes by, if it goes by one."""
    if not (_mailboxes and tensor.is_cuda):
        return None
    # who is not a member has a number for a group
    mailbox = _mailboxes.get(getattr(group_or_all(group), "group_name", ""))
    return mailbox if mailbox is not None and size <= mailbox.capacity else None
