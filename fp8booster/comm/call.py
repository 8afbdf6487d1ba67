"""One call of a collective: decided, observed from outside, and run as `torch.distributed` runs a plain one."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fp8booster.comm.agreement import Claim
from fp8booster.comm.by_nodes import Schedule, schedule_of
from fp8booster.comm.encoding import Options, ReductionOptions, settings
from fp8booster.comm.observer import bytes_of_encoded, observer
from fp8booster.comm.threshold import Op, ReduceOp, gains_by_nodes, group_or_all, ranks_of, uncompressed_reason


class Transfer(NamedTuple):
    """Messages on their way, and the decoding of what arrives."""

    work: Work | None
    """The last transport, where it was asked to be asynchronous."""

    finish: Callable[[], None] = lambda: None
    """Writes the outputs, on the current stream."""

    messages: Sequence[Tensor] = ()
    """Memory that the transport and `finish` need until they have ended."""


class FinishingWork(Work):
    """Handle of an asynchronous collective, with the methods of `torch.distributed.Work`, that decodes in the end.

    That is done once, by the first of: `wait`, on the stream that calls it; `is_completed`, when the transport has
    ended; the future, when it ends.
    """

    def __init__(
        self, transport: Work, transfer: Transfer, outputs: Sequence[Tensor], claim: Claim | None = None
    ) -> None:
        super().__init__()
        self._claim = claim
        self._unfinished: Transfer | None = transfer
        self._finished_on: torch.cuda.Stream | None = None
        self._transport = transport
        self._outputs = list(outputs)
        self._lock = threading.Lock()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Make the current stream (on the CPU, the caller) wait for the outputs.

        Raises:
            RuntimeError: torch's own, when a rank has failed or `timeout` has passed.
        """
        if self._unfinished is None:  # gloo waits for ever for a message that was waited for
            if self._finished_on is not None:
                torch.cuda.current_stream(self._finished_on.device).wait_stream(self._finished_on)
            return True
        # before the transport: ranks in another call may never send
        if self._claim is not None:
            self._claim = self._claim.wait()
        done = self._transport.wait() if timeout is None else self._transport.wait(timeout)
        self._finish()
        return done

    def synchronize(self) -> None:
        """Do as `wait`, as in torch."""
        self.wait()

    block_current_stream = synchronize

    def is_completed(self) -> bool:
        """Return True once the outputs are there, or will be in the order of the current stream.

        Raises:
            RuntimeError: torch's own, when a rank has failed.
        """
        if self._unfinished is not None and not self._transport.is_completed():
            return False
        # does not block any more, and decodes
        return self.wait()

    def is_success(self) -> bool:
        """Return True where the transport has ended without error."""
        return self._transport.is_success()

    def exception(self) -> BaseException | None:
        """Return the transport's error."""
        return self._transport.exception()

    def source_rank(self) -> int:
        """Return the rank that sent what was received."""
        return self._transport._source_rank()

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """Return the outputs."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the outputs."""
        return self._transport.get_future().then(self._finish_then)

    def _finish_then(self, ended: torch.futures.Future) -> list[Tensor]:
        ended.value()  # raises what went wrong
        self._finish()
        return self._outputs

    def _finish(self) -> None:
        # a future's callback runs on a thread of the backend, while the caller may wait
        with self._lock:
            if self._unfinished is None:
                return
            if self._claim is not None:
                self._claim.settle(self._outputs[0].device)
            # behind the comparison: ranks that disagree sent each other something else
            self._unfinished.finish()
            for message in self._unfinished.messages:
                if message.is_cuda:  # made on another stream, whose next message must not overwrite it yet
                    message.record_stream(torch.cuda.current_stream(message.device))
            if self._outputs and self._outputs[0].is_cuda:  # another stream may wait later
                self._finished_on = torch.cuda.current_stream(self._outputs[0].device)
            self._unfinished = None


class Call:
    """One call of a collective, compared with those that the group's other ranks make.

    Args:
        name: the collective, as `statistics` and `threshold` know it.
        tensor: one that the caller gave.
        group, async_op, op, options: the caller's.
        compared: all else that ranks must give alike.
        given: bytes that the plain collective is given, which are counted; None: the tensor's.
        payload: bytes of the larger side, which decide; None: as `given`.
        alike: all ranks have the same payload.
        on_arrival: data arrives only where all ranks have entered the call.
        blocks: the host waits for the other ranks even where the call is asynchronous.
        claimed_as: its name among the ranks; None: `name`.
        by_nodes: the caller follows `schedule`, which may be one by nodes.

    Raises:
        ValueError: the ranks do not agree.
        TypeError: an option that is none.
    """

    def __init__(
        self,
        name: str,
        tensor: Tensor,
        group: dist.ProcessGroup | None,
        async_op: bool,
        options: Options | ReductionOptions,
        compared: Mapping[str, object],
        *,
        op: Op = ReduceOp.SUM,
        given: int | None = None,
        payload: int | None = None,
        alike: bool = True,
        on_arrival: bool = True,
        blocks: bool = False,
        claimed_as: str | None = None,
        by_nodes: bool = False,
    ) -> None:
        self.name, self.async_op, self.op = name, async_op, op
        self.encoding, min_bytes, of = settings(**options)
        self.group = group_or_all(group)  # looked up once
        self.ranks = ranks_of(self.group)
        self._given = tensor.nbytes if given is None else given
        payload = self._given if payload is None else payload
        by_nodes = by_nodes and min_bytes is None and gains_by_nodes(name, tensor.device, payload, self.group)
        # before the decision: ranks that differ would decide differently, and wait in different collectives for each
        # other
        self._claim = observer.enter(
            self.group,
            claimed_as or name,
            # the first call by nodes makes groups
            asynchronous=async_op and not (blocks or by_nodes),
            on_arrival=on_arrival,
            what={
                **compared,
                "dtype": tensor.dtype,
                "op": getattr(op, "name", "with a factor"),
                "encoding": self.encoding,
                "min_bytes": min_bytes,
                **({"of": ", ".join(of)} if of else {}),
            },
        )
        least = 0 if by_nodes else min_bytes
        reason = uncompressed_reason(name, tensor, payload, self.group, least, op, alike=alike)
        self.uncompressed = reason is not None
        """The caller runs the plain collective, and then `finish`."""
        if reason is not None:
            observer.count_plain(name, self.ranks, self._given, reason)
            return
        self.schedule = schedule_of(self.group) if by_nodes else Schedule(self.group)
        """The groups that a reduction in FP8 goes through."""

    def finish(self, work: Work | None, outputs: Sequence[Tensor]) -> FinishingWork | None:
        """End a plain call: torch raises no version counter of what its collectives write."""
        end = functools.partial(torch.autograd.graph.increment_version, outputs)
        if work is not None:
            return FinishingWork(work, Transfer(work, end), outputs, self._claim)
        self.settle(outputs[0].device)
        end()
        return None

    def run(
        self,
        sent: Mapping[str, int],
        begin: Callable[[bool], Transfer],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
        inside: Mapping[str, int] | None = None,
    ) -> FinishingWork | None:
        """Run the call in FP8; arguments as in `run`.

        Args:
            sent: bytes given to each collective of torch.distributed that it uses.
            begin, inputs, outputs: as in the function `run`.
            inside: bytes given besides to those inside a node, where it runs by nodes.
        """
        between, node, _ = self.schedule
        transports = [(name, given, between.size()) for name, given in sent.items()]
        if node is not None and inside is not None:
            transports += [(name, given, node.size()) for name, given in inside.items()]
        raw, wire = bytes_of_encoded(self.name, self.ranks, self._given, tuple(transports))
        observer.count(self.name, 1, raw, wire, by_nodes=node is not None)
        transfer = run(begin, inputs, outputs, self.group, self.async_op)
        if transfer.work is not None:
            return FinishingWork(transfer.work, transfer, outputs, self._claim)
        self.settle(outputs[0].device)
        transfer.finish()
        return None

    def settle(self, device: torch.device) -> None:
        """Tell the observer that the data of all ranks is there."""
        if self._claim is not None:
            self._claim.settle(device)


def run(
    begin: Callable[[bool], Transfer],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    async_op: bool,
) -> Transfer:
    """Begin an encoded transport, on a GPU on a stream of its own where it is asynchronous.

    Args:
        begin: encodes, starts the transports and returns what remains; told whether the last transport is to be
            asynchronous. Nothing in it waits for a GPU. With gloo it returns when all but the last have ended.
        inputs, outputs: the caller's tensors; at least one of either.
        group: of the collective.
        async_op: let the caller's stream go on.
    """
    device = (*inputs, *outputs)[0].device
    if not (async_op and device.type == "cuda"):
        return begin(async_op)
    side = _side_stream(device, group_or_all(group).group_name)
    # the inputs are written on the caller's stream
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        transfer = begin(True)
    for tensor in inputs:  # the allocator must not give their memory away before they were read
        tensor.record_stream(side)
    return transfer


@functools.cache
def _side_stream(device: torch.device, group_name: str) -> torch.cuda.Stream:
    """Return the stream of a group's asynchronous collectives: of high priority, so that messages leave early."""
    return torch.cuda.Stream(device, priority=-1)
