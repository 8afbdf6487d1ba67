"""What all collectives of this folder do alike around their transports: compare, decide, count, run, finish."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Work

from fp8booster.comm.agreement import claim
from fp8booster.comm.encoding import Options, purpose, settings
from fp8booster.comm.statistics import count_encoded, count_plain
from fp8booster.comm.threshold import Op, ReduceOp, group_or_all, ranks_of, uncompressed_reason
from fp8booster.comm.work import FinishingWork, Transfer, finish_plain, run


class Call:
    """One call of a collective, compared with those that the group's other ranks make.

    Args:
        name: the collective, as `statistics` and `threshold` know it.
        tensor: one that the caller gave.
        group, async_op, op, options: the caller's.
        compared: what else all ranks must give alike.
        on_arrival: whether data arrives only where all ranks have entered the call.
        blocks: whether the host waits for the other ranks even where the call is asynchronous.
        claimed_as: its name among the ranks; None: `name`.

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
        options: Options,
        compared: Mapping[str, object],
        *,
        op: Op = ReduceOp.SUM,
        on_arrival: bool = True,
        blocks: bool = False,
        claimed_as: str | None = None,
    ) -> None:
        self.name, self.tensor, self.async_op, self.op = name, tensor, async_op, op
        self.encoding, self._min_bytes = settings(**options)
        self.group = group_or_all(group)  # looked up once
        self.ranks = ranks_of(self.group)
        self.given = tensor.nbytes
        self.claimed = claim(
            self.group,
            claimed_as or name,
            async_op=async_op and not blocks,
            on_arrival=on_arrival,
            **compared,
            dtype=tensor.dtype,
            op=getattr(op, "name", "with a factor"),
            encoding=self.encoding,
            min_bytes=self._min_bytes,
        )

    def goes_uncompressed(self, *, given: int | None = None, payload: int | None = None, alike: bool = True) -> bool:
        """Whether it does; it is counted then, with the reason.

        Args:
            given: bytes that the plain collective is given, which are counted; None: the tensor's.
            payload: bytes of the larger side, which decide; None: as `given`.
            alike: whether all ranks have the same payload.
        """
        if given is not None:
            self.given = given
        payload = self.given if payload is None else payload
        reason = uncompressed_reason(self.name, self.tensor, payload, self.group, self._min_bytes, self.op, alike=alike)
        if reason is not None:
            count_plain(self.name, self.ranks, self.given, reason)
        return reason is not None

    def finish(self, work: Work | None, outputs: Sequence[Tensor]) -> FinishingWork | None:
        """What is left to do of a call that went uncompressed (`work.finish_plain`)."""
        return finish_plain(work, outputs, self.claimed)

    def run(
        self,
        sent: dict[str, int],
        begin: Callable[[bool], Transfer],
        inputs: Sequence[Tensor],
        outputs: Sequence[Tensor],
    ) -> FinishingWork | None:
        """Count the call and run it in FP8 (`work.run`).

        Args:
            sent: bytes given to each collective of torch.distributed that it uses.
            begin: by these; see `work.run`.
            inputs, outputs: the caller's tensors.
        """
        count_encoded(self.name, self.ranks, self.given, sent)
        before, purpose.name = purpose.name, self.name
        try:
            return run(begin, inputs, outputs, self.group, self.async_op, self.claimed)
        finally:
            purpose.name = before
