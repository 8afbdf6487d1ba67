"""FP8-LM's automatic scaling: gradients cast with scales that all ranks share, and added as FP8 (Peng et al., arXiv
2310.18313, section 2.1).

    g' = mu g                       mu, the same on all ranks, leaves room for the sum
    s  = min over ranks of s'       s' = max(format) / amax, real-time, one for each tensor
    g  = sum of FP8(s g')           in FP8, rounded after every addition; its scale is s mu (times ranks: the mean's)

Where more than 0.001 % of the values sit at the format's largest, mu is halved for the next step; else it grows, to
twice its value in 1000 steps. The paper applies s' to a gradient that mu has multiplied already; with a real-time s'
mu would cancel, so here it multiplies s after amax is known.

It saves no bytes over blocks (`collectives`), and a sum in FP8 rounds once more for every rank. It is an option because
NCCL can run it as one collective, with nothing to decode in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster import formats
from fp8booster.comm.call import Call
from fp8booster.comm.collectives import factor_of, reduce_scatter_uncompressed
from fp8booster.comm.observer import observer
from fp8booster.comm.threshold import Op, ReduceOp
from fp8booster.comm.transport import agree_on_amax, flat, one_tensor, require_multiple
from fp8booster.kernels.cast import saturate
from fp8booster.kernels.device import current_stream
from fp8booster.kernels.scales import MAX_SCALE, scale_of

FORMAT = formats.E4M3
SATURATED_AT_MOST = 1e-5
"""Share of values at the format's largest from which mu is halved: the paper's 0.001 %."""

GROWTH = 2.0 ** (1 / 1000)
"""Of mu in a step without saturation."""

_SIGN_CLEARED = 0x7F
_LARGEST_BITS = int(torch.tensor(formats.MAX[FORMAT], dtype=torch.float32, device="cpu").to(FORMAT).view(torch.uint8))


class _Counts(NamedTuple):
    """Values cast on one stream since the last step."""

    values: Tensor
    """int64 [2]: saturated, cast."""

    stream: torch.cuda.Stream | None
    """None on the CPU."""


class AutomaticScaling:
    """FP8-LM's scaling with its state between steps: mu, and the number of values that saturated since the last one."""

    mu: Tensor
    """float32, shape []. It begins at 1 / ranks, where no sum can overflow."""

    def __init__(self, ranks: int, device: torch.device) -> None:
        """`ranks`: how many gradients are added; `device`: where they lie."""
        self.mu = torch.full((), 1.0 / ranks, dtype=torch.float32, device=device)
        self._counts: dict[int | None, _Counts] = {}
        """By the stream that adds to them: two that add to one tensor lose counts."""
        self._mu_is_set: torch.cuda.Event | None = None

    def reduce_scatter_tensor(
        self,
        output: Tensor,
        input: Tensor,
        op: Op = ReduceOp.SUM,
        group: dist.ProcessGroup | None = None,
        *,
        sizes: Sequence[int] | None = None,
        min_bytes: int | None = None,
        of: tuple[str, ...] = (),
    ) -> None:
        """`torch.distributed.reduce_scatter_tensor`: each rank's part of the sum or mean over ranks, added in FP8.

        Args:
            output, input, op, group, min_bytes, of: as in `collectives.reduce_scatter_tensor`.
            sizes: values of each tensor in a part, which share a scale in all parts; None for one scale.

        An infinity or a NaN arrives as NaN, with the tensor that shares its scale.
        """
        call = Call(
            "reduce_scatter_tensor",
            input,
            group,
            False,
            {"min_bytes": min_bytes, "of": of},
            {"values": input.numel(), "sizes": None if sizes is None else tuple(sizes)},
            op=op,
            claimed_as="AutomaticScaling.reduce_scatter_tensor",
        )
        group, ranks = call.group, call.ranks
        if call.uncompressed:
            reduce_scatter_uncompressed(call, output, input)
            return
        sums, values = flat(output, "output"), flat(input, "input")
        require_multiple(values, sums, ranks, "input", "output")
        sizes = [sums.numel()] if sizes is None else list(sizes)
        transport = "reduce_scatter_tensor" if input.is_cuda else "all_to_all_single"
        wire = {"all_reduce": 4 * len(sizes), transport: values.numel()}
        observer.count_encoded("reduce_scatter_tensor", ranks, input.nbytes, wire)

        values = values.view(ranks, -1)
        amax = agree_on_amax(values.split(sizes, 1), group)
        if self._mu_is_set is not None:  # by another stream
            self._mu_is_set.wait()
        # with the scale of the largest on any rank no rank saturates by itself; mu leaves room for the sum
        scales, inverse_scales = scales_of(amax, self.mu)
        encoded = cast_tensors(values, sizes, scales)
        total = _sum_in_fp8(encoded, group)
        call.settle(input.device)
        # the sum as well: it saturates where each part does not
        self._count(encoded)
        self._count(total)
        # a mean is in the scale: no pass of its own
        inverse_scales = inverse_scales * factor_of(op, ranks)
        for part, inverse_scale, out in zip(total.split(sizes), inverse_scales, sums.split(sizes), strict=True):
            out.copy_(part.float() * inverse_scale)

    def step(self, group: dist.ProcessGroup | None = None) -> None:
        """Set mu for the next step from what saturated on any rank of `group` since the last call.

        All of its ranks call this at once. Nothing waits for a GPU.
        """
        counts = self._taken_counts()
        observer.count_plain(
            "gradient scale", dist.get_world_size(group), counts.nbytes, "count of saturated", "all_reduce"
        )
        dist.all_reduce(counts, group=group)
        self._set_mu(self._next_mu(counts))

    @property
    def saved(self) -> dict[str, Tensor]:
        """The tensors that a checkpoint needs, by name."""
        return {"mu": self.mu}

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Go on from `saved` of a run on as many ranks."""
        self._set_mu(saved["mu"])

    def forget_step(self) -> None:
        """Forget what saturated since the last step: the gradients of a skipped one are dropped."""
        self._counts = {}

    def _taken_counts(self) -> Tensor:
        """Return the sum over streams, int64 [2], and count from zero again."""
        total = torch.zeros(2, dtype=torch.int64, device=self.mu.device)
        taken, self._counts = self._counts, {}
        for values, stream in taken.values():
            # the counts were made on streams of their own, whose memory must not be given away before it is read
            if stream is not None:
                here = torch.cuda.current_stream(self.mu.device)
                here.wait_stream(stream)
                values.record_stream(here)
            total += values
        return total

    def _next_mu(self, counts: Tensor) -> Tensor:
        """Return mu after a step in which so many values saturated, of so many that were cast, [2]."""
        # FP32 holds every whole number up to 2^24 alone, and a step casts more values than that
        saturated, cast = counts.double()
        # on the device, where the counts are: the host need not wait for them
        factor = torch.where(saturated > SATURATED_AT_MOST * cast, self.mu.new_full((), 0.5), GROWTH)
        # a step in which all messages were too small for FP8 says nothing about saturation
        return self.mu * torch.where(cast > 0, factor, 1.0)

    def _set_mu(self, mu: Tensor) -> None:
        self.mu.copy_(mu)
        if self.mu.is_cuda:
            # gradients of the next step are reduced on other streams, and cast by this mu
            self._mu_is_set = torch.cuda.current_stream(self.mu.device).record_event()

    def _count(self, encoded: Tensor) -> None:
        """Count the values at the format's largest magnitude. NaN is not among them: its step is bad, not its scale."""
        largest = (encoded.view(torch.uint8) & _SIGN_CLEARED) == _LARGEST_BITS
        handle = current_stream(encoded)
        if handle not in self._counts:
            stream = torch.cuda.current_stream(encoded.device) if encoded.is_cuda else None
            zeros = torch.zeros(2, dtype=torch.int64, device=encoded.device)
            self._counts[handle] = _Counts(zeros, stream)
        values = self._counts[handle].values
        values[0] += largest.sum()
        values[1] += encoded.numel()


def scales_of(amax: Tensor, mu: Tensor | float) -> tuple[Tensor, Tensor]:
    """Return scales and inverse scales of tensors with these largest magnitudes over all ranks, float32 [tensors]."""
    scales, _ = scale_of(amax, FORMAT)
    # beyond it the inverse scale would be subnormal
    scales = (scales * mu).clamp(max=MAX_SCALE)
    return scales, (1.0 / scales.double()).float()


def cast_tensors(values: Tensor, sizes: Sequence[int], scales: Tensor) -> Tensor:
    """Return FP8 [parts, N] of values [parts, N]; each part holds tensors of these sizes, with a scale for each."""
    encoded = torch.empty(values.shape, dtype=FORMAT, device=values.device)
    for tensor, scale, out in zip(values.split(sizes, 1), scales, encoded.split(sizes, 1), strict=True):
        out.copy_(saturate(tensor.float() * scale, FORMAT))
    return encoded


def _sum_in_fp8(encoded: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return this rank's part of the sum, FP8 [N], of the parts for each rank, FP8 [ranks, N]."""
    if encoded.is_cuda:  # NCCL (2.24 and later, on sm90) adds FP8 itself
        total = torch.empty(encoded.shape[1], dtype=FORMAT, device=encoded.device)
        one_tensor("reduce_scatter")(total, encoded.view(-1), ReduceOp.SUM, group)
        return total
    received = torch.empty_like(encoded)
    # as bytes: gloo knows no FP8
    dist.all_to_all_single(received.view(torch.uint8), encoded.view(torch.uint8), group=group)
    return add_in_fp8(received)


def add_in_fp8(parts: Tensor) -> Tensor:
    """Add FP8 [ranks, N] over ranks, first to last, rounded to FP8 and saturated after each addition as in a ring."""
    total, *others = parts
    for part in others:
        total = saturate(total.float() + part.float(), parts.dtype)
    return total
