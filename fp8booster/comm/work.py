"""How an encoded collective runs: on the caller's stream, or beside it with a `Work` whose `wait` decodes."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fp8booster.comm.agreement import Claim, settle, wait_for_others
from fp8booster.comm.threshold import group_or_all


class Transfer(NamedTuple):
    """What is on its way, and what makes the outputs of it once it is there."""

    work: Work | None
    """The last transport, where it was asked to be asynchronous."""

    finish: Callable[[], None] = lambda: None
    """Writes the outputs, on the current stream."""

    messages: Sequence[Tensor] = ()
    """Memory that the transport and `finish` need until they have ended."""


class FinishingWork(Work):
    """Handle of an asynchronous collective, with the methods of `torch.distributed.Work`, that has something left to do
    when the transport has ended: to decode.

    That is done once, by the first of: `wait`, on the stream that calls it; `is_completed`, when the transport has
    ended; the future, when it ends.
    """

    def __init__(
        self, transport: Work, transfer: Transfer, outputs: Sequence[Tensor], claimed: Claim | None = None
    ) -> None:
        super().__init__()
        self._claimed = claimed
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
        self._claimed = wait_for_others(self._claimed)
        done = self._transport.wait() if timeout is None else self._transport.wait(timeout)
        self._finish()
        return done

    def synchronize(self) -> None:
        """`wait`, as in torch."""
        self.wait()

    def block_current_stream(self) -> None:
        """`wait`, as in torch."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the outputs are there, or will be in the order of the current stream.

        Raises:
            RuntimeError: torch's own, when a rank has failed.
        """
        if self._unfinished is not None and not self._transport.is_completed():
            return False
        return self.wait()

    def is_success(self) -> bool:
        """Whether the transport has ended without error."""
        return self._transport.is_success()

    def exception(self) -> BaseException | None:
        """What went wrong in the transport."""
        return self._transport.exception()

    def source_rank(self) -> int:
        """The rank that sent what was received."""
        return self._transport._source_rank()

    _source_rank = source_rank

    def result(self) -> list[Tensor]:
        """The outputs."""
        return self._outputs

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A future of the outputs."""
        return self._transport.get_future().then(self._finish_then)

    def _finish_then(self, ended: torch.futures.Future) -> list[Tensor]:
        ended.value()  # raises what went wrong
        self._finish()
        return self._outputs

    def _finish(self) -> None:
        with self._lock:
            if self._unfinished is None:
                return
            if self._claimed is not None:
                settle(self._claimed, self._outputs[0].device)
            self._unfinished.finish()
            for message in self._unfinished.messages:
                if message.is_cuda:  # made on another stream, whose next message must not overwrite it yet
                    message.record_stream(torch.cuda.current_stream(message.device))
            if self._outputs and self._outputs[0].is_cuda:  # another stream may wait later
                self._finished_on = torch.cuda.current_stream(self._outputs[0].device)
            self._unfinished = None


def run(
    begin: Callable[[bool], Transfer],
    inputs: Sequence[Tensor],
    outputs: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    async_op: bool,
    claimed: Claim | None = None,
) -> FinishingWork | None:
    """Run an encoded collective as `torch.distributed` runs a plain one.

    Args:
        begin: encodes, starts the transports and returns what remains; told whether the last transport is to be
            asynchronous. Nothing in it waits for a GPU. With gloo it returns when all but the last have ended.
        inputs, outputs: the caller's tensors; at least one of either.
        group: of the collective.
        async_op: return a handle, and on a GPU let the caller's stream go on.
        claimed: what `agreement.claim` gave for the call.
    """
    device = (*inputs, *outputs)[0].device
    if async_op and device.type == "cuda":
        side = _side_stream(device, group_or_all(group).group_name)
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            transfer = begin(True)
        for tensor in inputs:
            tensor.record_stream(side)
    else:
        transfer = begin(async_op)
    if transfer.work is not None:
        return FinishingWork(transfer.work, transfer, outputs, claimed)
    settle(claimed, device)
    transfer.finish()
    return None


def finish_plain(
    work: Work | None, outputs: Sequence[Tensor], claimed: Claim | None = None, finish: Callable[[], None] | None = None
) -> FinishingWork | None:
    """What a plain collective leaves to do: torch raises no version counter of what its collectives write.

    Args:
        work: the handle, None where the collective was not asynchronous.
        outputs: what it writes; at least one.
        claimed: what `agreement.claim` gave for the call.
        finish: what else is to be done once the outputs are there.
    """

    def end() -> None:
        if finish is not None:
            finish()
        torch.autograd.graph.increment_version(outputs)

    if work is not None:
        return FinishingWork(work, Transfer(work, end), outputs, claimed)
    settle(claimed, outputs[0].device)
    end()
    return None


@functools.cache
def _side_stream(device: torch.device, group_name: str) -> torch.cuda.Stream:
    """The stream of a group's asynchronous collectives: of high priority, so that messages leave early."""
    return torch.cuda.Stream(device, priority=-1)
