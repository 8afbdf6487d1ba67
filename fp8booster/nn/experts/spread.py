"""Experts that are spread over the ranks of a group, whatever block they belong to.

    tokens [T, H] -- cast --> exchange --> tokens of all ranks -- experts, weighted sum --> exchange --> sum [T, H]

A block's router gives the experts of each token, counted over all ranks, and their weights. A token goes once to each
rank that holds some of them, with its choices and weights. The experts there compute what they would if it were their
own rank's (`Run`), and the weighted sum goes back.

Where the first products read FP8, tokens are cast once each, under the scale of these products, and their bytes are
sent (`fp8_rows`). The scale is that of the largest amax of all ranks, which each tells with its counts. Else tokens are
encoded as a message, and their values arrive in 16 bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from fp8booster.comm.encoding import Encoding
from fp8booster.comm.rows import send_rows
from fp8booster.kernels.cast import partial_amaxes
from fp8booster.kernels.expert_rows import count_choices, sender_begins
from fp8booster.nn.experts.fp8_rows import FP8Rows, Rows, packed, received_rows, why_not_before_sending
from fp8booster.nn.experts.host_copy import HostCopy, Totals
from fp8booster.nn.experts.routing import Choices, Routed, Routes, Sent, sent_weights, sum_of_rows
from fp8booster.nn.experts.wire import Wire
from fp8booster.nn.graphs.breaks import in_a_capture, run_eagerly
from fp8booster.nn.linear.functional import linear_map, output_dtype
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import delivered_amax
from fp8booster.scaling import INPUT
from fp8booster.tensor import QuantizedMatrix

EXCHANGED = "experts spread over ranks exchange rows whose number the host waits for"
"""The reason why their CUDA graphs break."""

AS_CAST = "in FP8, as the first product reads them"
IN_16_BITS = "in 16 bits"
_ENCODED = "encoded in FP8, {}"
"""Forms in which tokens are sent to experts, for the report."""

Run = Callable[[Routed, float], torch.Tensor]
"""Computes the experts of this rank on tokens, [T, H], and gives the weighted sums, [T, H], in 16 bits or FP32.

The number multiplies the gradients of the experts' parameters, and not those of the tokens.
"""


class HeldExperts(Protocol):
    """The experts of this rank."""

    def note_choice(self, chosen: torch.Tensor) -> None:
        """Remember for the report which experts this rank's tokens have chosen, integers [T, k]."""

    def input_casts(self, tokens: torch.Tensor) -> Casts | None:
        """Return what casts the inputs of their first product; None: it reads 16 bits of these tokens."""

    def are_trained(self) -> bool:
        """Tell whether any of their parameters needs a gradient."""

    def prepare(self, tokens: torch.Tensor, rows: int) -> Run:
        """Look at the experts, which takes the host a while, and give what computes them, once.

        Args:
            tokens: of this rank; those of all ranks come later.
            rows: of these tokens for their experts; about as many come.
        """


class _Loads:
    """Rows for the experts, on their way to the host.

    Args:
        numbers: as `Spread._told`.
        held: experts of this rank.
    """

    def __init__(self, numbers: HostCopy, held: int) -> None:
        self.numbers, self.held = numbers, held
        self.by_expert = Totals(numbers.part(1, slice(held)))
        """The rows for the experts here, [1, experts of this rank]."""

    def all_cast(self) -> bool:
        """Tell whether all ranks cast their tokens, where this one does; the host waits."""
        return _NO_CAST not in [rank[self.held] for rank in self.numbers.tolist()[1]]

    def need_gradients(self, of: int) -> bool:
        """Tell whether backward comes to what any rank has of `_TOKENS`, and so on; the host waits."""
        return any(not rank[-1] & of for rank in self.numbers.tolist()[1])

    def sizes(self) -> Sizes:
        """Wait for the sizes of messages, which all-to-all with uneven splits needs."""
        return Sizes(*([rank[-2] for rank in of_all] for of_all in self.numbers.tolist()))


_NO_CAST = -1
"""A rank tells that its experts do not read tokens that were cast before they were sent."""

_TOKENS, _WEIGHTS, _RESULTS = 1, 2, 4
"""Bits of what a rank tells to need no gradients, where gradients are computed: its tokens, the weights of their
experts, and what the experts make of either."""


class _Cast(NamedTuple):
    """Tokens that were cast once."""

    matrix: QuantizedMatrix
    rows: torch.Tensor
    """[R, B], bytes of rows, the first of which are sent: of the cast, and behind them words of choices."""

    amax: torch.Tensor | None
    """Float32 [], by which all values are scaled; None: rows have scales of their own."""


class Sizes(NamedTuple):
    """Tokens to each rank, and from each."""

    sent: list[int]
    received: list[int]


class Spread:
    """The ranks that hold a block's experts, each as many.

    The gradient of an expert's parameters, averaged over the ranks that hold it, is that of the mean of all ranks'
    losses: an expert without tokens on some of them adds zeros there.

    Args:
        experts: of all ranks together; this rank holds those from `first` on.
        group: over which they are spread.
        encoding: of tokens and their gradients; None sends them as they are.

    Raises:
        ValueError: the experts cannot be divided evenly.
    """

    def __init__(self, experts: int, group: dist.ProcessGroup, encoding: Encoding | None = None) -> None:
        self.experts, self.group, self.encoding = experts, group, encoding
        self.ranks = dist.get_world_size(group)
        if experts % self.ranks:
            raise ValueError(
                f"{experts} experts cannot be divided evenly among {self.ranks} ranks; use an ep_size that divides "
                "their number"
            )
        self.held = experts // self.ranks
        self.way: str | None = None
        """Form in which the last tokens were sent to their experts; None: none were sent."""

        self.first = dist.get_rank(group) * self.held

    def __deepcopy__(self, memo: dict[int, Any]) -> Spread:
        return self  # a copy of a block has the same ranks, and groups cannot be copied

    def __reduce__(self) -> tuple:
        raise TypeError(
            "experts that are spread over ranks cannot be pickled, for each rank holds a part of them; call "
            "booster.save_model(model, folder, shard=True) on every rank"
        )

    @property
    def sends(self) -> bool:
        """Tell whether `mix` must send tokens to other ranks; else this one holds all experts."""
        return self.ranks > 1

    def own(self, of_all: Any) -> Any:
        """Return the part of this rank's experts of what has one item for each expert, as a list or a tensor."""
        return of_all[self.first : self.first + self.held]

    def gathered(self, own: torch.Tensor) -> torch.Tensor:
        """Return all experts' part, [experts, ...], of this rank's one, [held, ...]; all ranks must call it."""
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(parts, own.contiguous(), self.group)
        return torch.cat(parts)

    def mix(
        self,
        tokens: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        experts: HeldExperts,
        beside: Callable[[], torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it, where `sends` is true.

        Args:
            tokens: [T, H].
            chosen: integers [T, k], experts of each token, counted over all ranks.
            weights: [T, k].
            experts: of this rank.
            beside: gives what is added to the sum, [T, H], such as shared experts' output. It is queued before the host
                waits. None: nothing.

        Returns:
            [T, H] of the tokens' dtype.
        """
        wire = Wire.of(tokens, self.group, self.encoding)
        casts = self._casts_before_sending(wire, experts.input_casts(tokens))
        choices = Choices.of(chosen.contiguous(), self.held, self.ranks)
        numbers = self._told(choices, tokens, weights, casts, experts)
        # the host waits for the numbers alone: what is queued behind them keeps the GPU busy when the host goes on. A
        # graph cannot tell when they are there
        copy = None if in_a_capture() else HostCopy(numbers)
        begins = sender_begins(numbers[1], self.held)
        cast = message = words = None
        if casts is None:
            message, words = wire.spread(tokens, choices.to_ranks), choices.packed(weights)
        else:
            cast = _cast(tokens, weights, casts, numbers[1, :, self.held], choices)
        added = None if beside is None else beside()
        mix = partial(self._mix_by_numbers, experts, wire, casts, copy)
        sent = None if cast is None else (tuple(cast.matrix), *cast[1:])
        routes = tuple(map(tuple, (choices.to_ranks, choices.to_experts)))
        made = run_eagerly(mix, tokens, weights, choices.chosen, numbers, begins, routes, sent, message, words)
        mixed = wire.summed(made, choices.to_ranks).to(tokens.dtype)
        return mixed if added is None else mixed + added

    def _mix_by_numbers(
        self,
        experts: HeldExperts,
        wire: Wire,
        casts: Casts | None,
        copy: HostCopy | None,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        numbers: torch.Tensor,
        begins: tuple[torch.Tensor, torch.Tensor],
        routes: tuple[tuple[torch.Tensor, ...], ...],
        sent: tuple[Any, ...] | None,
        message: torch.Tensor | None,
        words: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what each rank's experts make of this rank's tokens, [R, W] as it came, zeros behind it.

        Here the host must know how many tokens are sent.

        Args:
            experts, tokens, weights: as in `mix`.
            chosen: likewise, contiguous.
            wire: on which rows go.
            casts: have cast the tokens.
            copy: of `numbers`, which are as `_told`; None: it begins here.
            begins: of the rows of what comes, as `sender_begins` gives them.
            routes: the fields of `Choices.to_ranks`, and of `Choices.to_experts`.
            sent: fields of `_Cast`; None: there is a message.
            message, words: the rows of the tokens, [R, W], and their choices, where tokens were not cast.
        """
        experts.note_choice(chosen)
        to_ranks, to_experts = (Routes(*each) for each in routes)
        choices = Choices(chosen, to_ranks, to_experts, self.held)
        loads = _Loads(copy or HostCopy(numbers), self.held)
        # what takes the host alone comes before it waits, as GPUs and other ranks are busy until then
        run = experts.prepare(tokens, chosen.numel())
        sizes = loads.sizes()
        trains = torch.is_grad_enabled()
        if trains and not tokens.requires_grad and loads.need_gradients(_TOKENS):
            tokens, message = _on_the_way_back(tokens), None if message is None else _on_the_way_back(message)
        if trains and not weights.requires_grad and loads.need_gradients(_WEIGHTS):
            weights, words = _on_the_way_back(weights), None if words is None else _on_the_way_back(words)
        of_token = chosen.shape[1]
        arrived: Rows
        if sent is not None and casts is not None and loads.all_cast():
            cast = _Cast(QuantizedMatrix(*sent[0]), *sent[1:])
            arrived, with_rows = self._exchange_cast(tokens, wire, casts, cast, choices, sizes)
            give_weights = partial(self._sent_as_cast, weights, with_rows, choices, sizes)
        else:
            if message is None or words is None:
                message, words = wire.spread(tokens, choices.to_ranks), choices.packed(weights)
                self.way = _ENCODED.format("as another rank's experts read them otherwise")
            payload, with_rows = wire.exchanged_with(message, words, *sizes)
            arrived, give_weights = wire.decoded(payload), partial(_own_weights, with_rows, weights)
        bits = with_rows.detach().view(torch.int32)
        routed = Sent(arrived, of_token, give_weights, bits, numbers[1], begins, loads.by_expert)
        # tokens of all these ranks add up here, and the gradient is to be a mean over ranks
        made = run(routed, 1 / self.ranks)
        if made.dtype is torch.float32:  # as products with weights are
            made = made.to(output_dtype(tokens))
        if trains and not made.requires_grad and loads.need_gradients(_RESULTS):
            made = _Kept.apply(_on_the_way_back(made))
        back = wire._replace(dtype=made.dtype)  # that of autocast, for one
        room = len(choices.to_ranks.choices)
        return back.exchanged(back.encoded(made), sizes.received, sizes.sent, room=room)

    def _casts_before_sending(self, wire: Wire, casts: Casts | None) -> Casts | None:
        """Return what casts tokens before they are sent; None: nothing does."""
        if wire.encoding is None:
            self.way = IN_16_BITS
            return None
        why_not = "whose experts read 16 bits" if casts is None else why_not_before_sending(casts)
        self.way = AS_CAST if why_not is None else _ENCODED.format(why_not)
        return casts if why_not is None else None

    def _told(
        self, choices: Choices, tokens: torch.Tensor, weights: torch.Tensor, casts: Casts | None, experts: HeldExperts
    ) -> torch.Tensor:
        """Tell the ranks how many tokens and rows go to each, and what casts and gradients they need.

        Returns:
            int64 [2, ranks, experts of each, and three]: choices of this rank's tokens of each expert; of those of each
            rank's tokens of the experts here. Behind them the bits of each rank's amax, or `_NO_CAST`; the tokens that
            are sent; and what needs no gradients, `_TOKENS` and so on.
        """
        chosen = choices.chosen
        numbers = chosen.new_zeros(2, self.ranks, self.held + 3, dtype=torch.int64)
        counts, arriving = numbers
        amaxes = _amaxes_of(tokens) if casts is not None and casts.scaling.granularity == "tensorwise" else None
        count_choices(chosen.view(-1), counts, self.held, amaxes, choices.to_ranks.ends)
        if casts is None:
            counts[:, self.held] = _NO_CAST
        bits = _without_gradients(tokens, weights, experts) if torch.is_grad_enabled() else 0
        if bits:
            counts[:, -1] = bits
        # counts go ahead of the tokens: a rank must know how many rows it receives before it makes room
        dist.all_to_all_single(arriving, counts, group=self.group)
        return numbers

    def _exchange_cast(
        self, tokens: torch.Tensor, wire: Wire, casts: Casts, cast: _Cast, choices: Choices, sizes: Sizes
    ) -> tuple[FP8Rows, torch.Tensor]:
        """Send tokens that were cast to the ranks of their experts; return those that come, and words of choices."""
        payload = sum(sizes.sent) * tokens.shape[1] * tokens.element_size()
        rows = send_rows(cast.rows, *sizes, self.group, form=casts.scaling, payload=payload)()
        values, words = choices.apart(rows)
        routes = choices.to_ranks  # backward keeps no more than it reads

        def send_back(gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
            arrives = wire.start(wire.encode(gradient), sizes.received, sizes.sent)
            return lambda: wire.sum_of(arrives(), routes)

        values = values.view(cast.matrix.data.dtype)
        return received_rows(tokens, values, cast.matrix, cast.amax, send_back), words

    def _sent_as_cast(self, weights: torch.Tensor, words: torch.Tensor, choices: Choices, sizes: Sizes) -> torch.Tensor:
        """Return the weights among words that came, [U, k]; differentiable by this rank's, [T, k]."""
        routes, wire = choices.to_ranks, Wire(self.group, weights.shape[1], weights.dtype, None, None)

        def back(gradient: torch.Tensor) -> torch.Tensor:
            return sum_of_rows(wire.start(gradient, sizes.received, sizes.sent, async_op=False)(), routes)

        return linear_map(weights, lambda weights: _own_weights(words, weights), back)


def _own_weights(words: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return the weights among words, [U, k], of the dtype of this rank's, [T, k].

    They lie in memory of their own: what keeps them for backward does not keep all that came.
    """
    return sent_weights(words, like.shape[1]).to(like.dtype, memory_format=torch.contiguous_format, copy=True)


_SPREAD = "fp8_spread"
"""Attribute of modules that hold experts which are spread, and of these experts' parameters."""


def mark_spread(parameter: torch.Tensor, spread: Spread) -> None:
    """Let a parameter of this rank's experts tell the ranks of all of them."""
    setattr(parameter, _SPREAD, spread)


def spread_of(held: Any) -> Spread | None:
    """Return the ranks over which a block's experts are spread, or a parameter's; None: they are not."""
    return getattr(held, _SPREAD, None)


def sent_over(block: Any) -> Spread | None:
    """Return the ranks to which a block's tokens are sent; None: this one holds all experts."""
    spread = spread_of(block)
    return spread if spread is not None and spread.sends else None


def _on_the_way_back(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without a gradient as one with a gradient that nobody reads: backward exchanges rows for it.

    All ranks of an exchange must come to it, also those that train nothing before it.
    """
    return tensor.detach().requires_grad_()


class _Kept(torch.autograd.Function):
    """Saves something and reads it in backward: so checkpointing computes again up to here, and exchanges once more.

    A rank that trains nothing here saves nothing else, and others would wait for it.
    """

    @staticmethod
    def forward(ctx: Any, made: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(made.new_empty(0))
        return made.view_as(made)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _ = ctx.saved_tensors
        return gradient


def _without_gradients(tokens: torch.Tensor, weights: torch.Tensor, experts: HeldExperts) -> int:
    """Return the bits of what needs no gradients."""
    of_tokens, of_weights = tokens.requires_grad, weights.requires_grad
    bits = (0 if of_tokens else _TOKENS) | (0 if of_weights else _WEIGHTS)
    # gradients of tokens come through the experts
    return bits if of_tokens or of_weights or experts.are_trained() else bits | _RESULTS


def _amaxes_of(tokens: torch.Tensor) -> torch.Tensor:
    """Return float32, the largest of which is the amax of tokens."""
    if not len(tokens):  # kernels are not launched over nothing
        return tokens.new_zeros(1, dtype=torch.float32)
    amaxes = delivered_amax(tokens)
    return (partial_amaxes(tokens.detach()) if amaxes is None else amaxes).view(-1)


def _cast(tokens: torch.Tensor, weights: torch.Tensor, casts: Casts, told: torch.Tensor, choices: Choices) -> _Cast:
    """Cast each token once, under the scale of all ranks' where there is one, and spread the bytes with their choices.

    Args:
        tokens, weights, choices: of this rank.
        casts: of their first product.
        told: int64 [ranks], the bits of their amaxes.
    """
    # the bits of numbers from zero to infinity, and NaN, have the order of the numbers; of 64 they are the lower 32
    is_one = casts.scaling.granularity == "tensorwise"
    amax = told.amax(0, keepdim=True).view(torch.float32)[0] if is_one else None
    # kernels are not launched over nothing
    filled = tokens if len(tokens) else tokens.new_zeros(1, tokens.shape[1])
    matrix = casts.quantize(INPUT, filled, amax=amax)
    return _Cast(matrix, choices.with_rows(packed(matrix), weights), amax)
