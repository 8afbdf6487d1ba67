"""Tokens of a mixture that go to experts on other ranks and come back, in each form in which that is timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from fp8booster import FP8Config
from fp8booster.cli.doctor.calls import Bench, Call
from fp8booster.comm.rows import send_rows
from fp8booster.kernels.cast import partial_amaxes
from fp8booster.kernels.expert_rows import WORD, sender_begins
from fp8booster.kernels.token_rows import gather_rows
from fp8booster.nn.experts.fp8_rows import packed, received_rows
from fp8booster.nn.experts.routing import Choices, Routes, count_rows, rows_of, sent_weights, weighted_sum
from fp8booster.nn.experts.row_layout import RowLayout
from fp8booster.nn.experts.spread import Sizes, Spread
from fp8booster.nn.experts.wire import Wire
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT

PLAIN, AS_CAST, ENCODED = "BF16, NCCL", "FP8, as cast", "FP8, encoded"
DISPATCH, COMBINE = "dispatch", "combine"


class Mixture(NamedTuple):
    """Sizes: tokens of each rank, their values, experts of all ranks, and those of a token."""

    tokens: int
    hidden: int
    experts: int
    top_k: int

    def choose(self, uneven: float, ranks: int, rank: int) -> torch.Tensor:
        """Choose the experts of a rank's tokens at random, int64 [T, k].

        Args:
            uneven: rows of the first rank's experts over those of the last rank's; ranks between have numbers between.
            ranks: over which the experts are spread.
            rank: seeds the choice.

        Raises:
            ValueError: the experts cannot be chosen so.
        """
        if self.experts % ranks or uneven < 1:
            raise ValueError(f"{self.experts} experts cannot be divided among {ranks} ranks, {uneven:g} to 1")
        share = torch.linspace(uneven, 1, ranks, dtype=torch.float64).repeat_interleave(self.experts // ranks)
        share *= self.top_k / share.sum()
        if share.max() > 1:
            raise ValueError(f"{uneven:g} to 1, a token would choose {share.max():.2f} times the same expert")
        # of intervals as long as the shares, in random order, points at a distance of 1 hit each at most once, and as
        # often as it is long; draws without replacement would hit those of the busiest rank less often
        generator = torch.Generator().manual_seed(rank)
        order = torch.rand(self.tokens, self.experts, generator=generator).argsort(1)
        points = torch.rand(self.tokens, 1, generator=generator, dtype=torch.float64) + torch.arange(self.top_k)
        hit = torch.searchsorted(share[order].cumsum(1), points, right=True)
        return order.gather(1, hit.clamp_(max=self.experts - 1))


class Work:
    """The tokens of this rank, and how many of their rows go where; `uneven` as in `Mixture.choose`."""

    def __init__(self, mixture: Mixture, uneven: float, bench: Bench) -> None:
        self.bench, self.uneven = bench, uneven
        self.spread = Spread(mixture.experts, bench.group, bench.encoding)
        self.chosen = chosen = mixture.choose(uneven, bench.ranks, bench.rank).to(bench.device)
        self.routes = Routes.of(chosen, mixture.experts)
        self.choices = Choices.of(chosen, self.spread.held, bench.ranks)
        self.to_ranks = self.choices.to_ranks
        self.counts = count_rows(chosen, mixture.experts).view(bench.ranks, -1)
        """int64 [ranks, experts of each], rows from this rank for each expert."""

        self.loads = self._of_all(self.counts.sum(1))
        """int64 [ranks, ranks], rows from each rank for the experts of each."""

        ends = self.to_ranks.ends
        self.token_loads = self._of_all(ends.diff(prepend=ends.new_zeros(1)).long())
        """int64 [ranks, ranks], tokens from each rank of which some experts are there."""

        self.sent, self.received = self.loads[bench.rank].tolist(), self.loads[:, bench.rank].tolist()
        loads = self.token_loads
        self.sizes = Sizes(loads[bench.rank].tolist(), loads[:, bench.rank].tolist())
        arriving = torch.empty_like(self.counts)
        dist.all_to_all_single(arriving, self.counts, group=bench.group)
        rows = torch.tensor(self.sizes.received, device=bench.device).unsqueeze(1)
        self.told = torch.cat([arriving, rows, rows], 1)
        """int64 [ranks, experts here and two]: what ranks tell before they send."""

        self.begins = sender_begins(self.told, self.spread.held)
        owners = torch.arange(arriving.shape[1], device=bench.device).repeat(bench.ranks)
        self.by_expert = owners.repeat_interleave(arriving.flatten()).argsort(stable=True)
        """int64 [R], rows that come by sender, sorted by expert."""

        self.tokens = bench.values(mixture.tokens * mixture.hidden, torch.bfloat16).view(-1, mixture.hidden)
        self.weights = bench.values(chosen.numel(), torch.bfloat16).view(chosen.shape).softmax(1)

    def _of_all(self, own: torch.Tensor) -> torch.Tensor:
        loads = own.new_empty(self.bench.ranks, self.bench.ranks)
        dist.all_gather(list(loads), own, group=self.bench.group)
        return loads.cpu()

    def layout(self, words: torch.Tensor) -> RowLayout:
        """Return where grouped products have tokens that came with words of choices, float32 [U, words]."""
        return RowLayout.of_sent(
            words.view(torch.int32), self.told, *self.begins, self.chosen.shape[1], sum(self.received)
        )


class Way(NamedTuple):
    """One form of a dispatch or a combine."""

    call: Call
    """Gives the rows at the experts of this rank, or the weighted sum, [T, H]. Experts return rows as they came."""

    row_bytes: int
    """Bytes of a row as it is sent."""

    loads: torch.Tensor
    """int64 [ranks, ranks], rows that each rank sends to each in a dispatch."""

    values: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.float
    """Gives the values of what `call` gives."""


Ways = dict[str, dict[str, Way]]
"""By `DISPATCH` and `COMBINE`, and by variant."""


def in_high_precision(work: Work, dtype: torch.dtype) -> tuple[Way, Way]:
    """Return dispatch and combine by torch's all-to-all, of rows in a dtype."""
    tokens = work.tokens.to(dtype)

    def exchange(rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        arrived = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(arrived, rows, received, sent, group=work.bench.group)
        return arrived

    def dispatch() -> torch.Tensor:
        return exchange(rows_of(tokens, work.routes), work.sent, work.received)

    made = dispatch()

    def combine() -> torch.Tensor:
        return weighted_sum(exchange(made, work.received, work.sent), work.weights, work.routes)

    def values(rows: torch.Tensor) -> torch.Tensor:
        return rows.index_select(0, work.by_expert).float()

    return Way(dispatch, tokens[0].nbytes, work.loads, values), Way(combine, tokens[0].nbytes, work.loads)


def encoded(work: Work, made: torch.Tensor) -> tuple[Way, Way]:
    """Return dispatch and combine of tokens that are encoded as messages; `made` is what experts return, by expert."""
    # not `Wire.of`, which sends BF16 where that is faster
    wire = Wire(work.bench.group, made.shape[1], made.dtype, work.bench.encoding, None)

    sent = wire.rows_of(work.tokens, work.to_ranks)
    _, words = wire.exchanged_with(sent, work.choices.packed(work.weights), *work.sizes)
    layout = work.layout(words)

    def dispatch() -> torch.Tensor:
        sent = wire.rows_of(work.tokens, work.to_ranks)
        payload, words = wire.exchanged_with(sent, work.choices.packed(work.weights), *work.sizes)
        choices = work.layout(words).choices
        return wire.decode(payload).index_select(0, choices.clamp(min=0).div(layout.of_token, rounding_mode="floor"))

    own = words.view(torch.int32)[:, : layout.of_token]
    here = Routes.of(own, work.spread.held, sum(work.received))
    weights = sent_weights(words, layout.of_token).to(work.weights.dtype)

    def combine() -> torch.Tensor:
        message = wire.encode(weighted_sum(made, weights, here))
        return wire.sum_of(wire.start(message, work.sizes.received, work.sizes.sent)(), work.to_ranks)

    def values(rows: torch.Tensor) -> torch.Tensor:
        return rows[layout.choices >= 0].float()

    row_bytes = wire.encode(work.tokens[:1]).nbytes
    away = row_bytes + WORD * work.choices.words
    return Way(dispatch, away, work.token_loads, values), Way(combine, row_bytes, work.token_loads)


def as_cast(work: Work) -> Way:
    """Return the dispatch of tokens that are cast once, as `nn.experts.spread` sends them to products in FP8."""
    tokens, group, casts = work.tokens, work.bench.group, Casts.of_layer(FP8Config())
    amax = partial_amaxes(tokens).amax()
    dist.all_reduce(amax, dist.ReduceOp.MAX, group)
    cast = casts.quantize(INPUT, tokens, amax=amax)

    here: dict[str, RowLayout] = {}

    def call() -> torch.Tensor:
        partial_amaxes(tokens)  # of which ranks tell each other the largest with their counts
        rows = work.choices.with_rows(packed(casts.quantize(INPUT, tokens, amax=amax)), work.weights)
        payload = sum(work.sizes.sent) * tokens[0].nbytes
        arrived, words = work.choices.apart(send_rows(rows, *work.sizes, group, form=casts.scaling, payload=payload)())
        layout = here["layout"] = work.layout(words)
        return gather_rows(arrived.view(cast.data.dtype), layout.choices, layout.of_token)[0]

    def values(rows: torch.Tensor) -> torch.Tensor:
        rows = rows.view(torch.uint8)[here["layout"].choices >= 0].view(rows.dtype)
        return received_rows(tokens, rows, cast, amax, lambda gradient: lambda: gradient).values().float()

    return Way(call, packed(cast)[0].nbytes + WORD * work.choices.words, work.token_loads, values)


def ways(work: Work) -> Ways:
    """Return every variant but one-sided reads."""
    plain = in_high_precision(work, torch.bfloat16)
    message = encoded(work, plain[0].call().index_select(0, work.by_expert))
    # rows come back as messages in whichever form they went
    return {
        DISPATCH: {PLAIN: plain[0], AS_CAST: as_cast(work), ENCODED: message[0]},
        COMBINE: {PLAIN: plain[1], AS_CAST: message[1], ENCODED: message[1]},
    }
