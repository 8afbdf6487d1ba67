"""Causal attention over a sequence that is spread over ranks; keys and values go round in FP8.

The sequence is cut into 2n chunks for n ranks, and rank r holds chunks r and 2n - 1 - r, so that all have the same work
(zigzag, as Colossal-AI's RingAttention, shardformer/layer/attn.py:407, and ring-flash-attention have it). Each rank
attends to the keys and values of one rank after the other, which come from its neighbour, and joins the results by
their log-sum-exp. The blocks are PyTorch's flash attention. Rows that pack several sequences are cut as they lie; of
two different chunks only the sequence that runs from one into the other has a block.

Keys and values are rounded once: the bytes are passed on as they came. Heads that several queries share are sent, and
saved for backward, once; a block repeats them. In backward each rank sends the gradients of another's keys and values
straight to it, rounded once too, where they are added in FP32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster import comm
from fp8booster.comm.encoding import DEFAULT, Encoding
from fp8booster.comm.observer import observer
from fp8booster.comm.threshold import uncompressed_reason
from fp8booster.comm.transport import new_message
from fp8booster.nn.linear.functional import once_differentiable
from fp8booster.nn.parallel.tensor_parallel import options_of

KEYS_AND_VALUES = "ring attention keys and values"
"""The row of `fp8booster.comm.statistics`; gradients of keys and values are in its row "send"."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup,
    *,
    lengths: Sequence[int] | None = None,
    boundaries: Sequence[int] | None = None,
    scale: float | None = None,
    encoding: Encoding | None = DEFAULT,
) -> tuple[Tensor, Tensor]:
    """Attend causally from this rank's queries to the whole sequence.

    Args:
        q: [B, H, S, D], S the tokens of this rank's two chunks, one behind the other.
        k, v: [B, Hkv, S, D], Hkv a divisor of H: queries share heads of keys and values in their order.
        group: the ranks that hold the sequence.
        lengths: tokens of each sequence of the batch on this rank, where some are padded at the end; even.
        boundaries: where sequences begin and end, of which each attends to itself alone: 0, where the second begins,
            ..., the number of tokens, over all ranks and all rows, one behind the other. None: each row is one.
        scale: of the scores; None is D**-0.5.
        encoding: of keys and values; None sends the dtype of k, counted as uncompressed.

    Returns:
        (output [B, H, S, D], log-sum-exp of the scores [B, H, S], float32); zeros for padding.

    Raises:
        ValueError: an odd number of tokens, or `lengths` and `boundaries`.
    """
    if lengths is not None and boundaries is not None:
        raise ValueError("rows are padded or hold packed sequences; give lengths or boundaries, not both")
    odd = [length for length in lengths or (q.shape[2],) if length % 2]
    if odd:
        raise ValueError(
            f"a rank holds {odd[0]} tokens of a sequence; pad sequences to a multiple of twice the ranks, "
            f"{2 * dist.get_world_size(group)}"
        )
    if lengths is not None and all(length == q.shape[2] for length in lengths):
        lengths = None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    packed = None if boundaries is None else _by_row(boundaries, q.shape[2] * dist.get_world_size(group))
    ring = _Ring(group, encoding, packed)
    return _RingAttention.apply(q, k, v, ring, None if lengths is None else tuple(lengths), scale)


def _by_row(boundaries: Sequence[int], length: int) -> list[list[tuple[int, int]]]:
    """Return where the sequences of each row begin and end in it."""
    rows: list[list[tuple[int, int]]] = [[] for _ in range(boundaries[-1] // length)]
    for begin, end in pairwise(boundaries):
        if begin < end:
            start = begin // length * length
            rows[begin // length].append((begin - start, end - start))
    return rows


Index = tuple[slice, slice, slice]
"""What of a tensor, [B, H, S, D] or [B, H, S], takes part in a block: of its batch, heads and tokens."""


class _Ring:
    """The ranks of a group, each with a neighbour; `packed` has the sequences of each row, where rows hold several."""

    def __init__(
        self, group: dist.ProcessGroup, encoding: Encoding | None, packed: list[list[tuple[int, int]]] | None = None
    ) -> None:
        self.group, self.options = group, options_of(encoding)
        self.encoding = encoding or DEFAULT
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.packed = packed

    def peer(self, distance: int) -> int:
        """Return the global number of the rank so many places on."""
        return dist.get_global_rank(self.group, (self.rank + distance) % self.ranks)

    def rotate(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each rank, from this one backwards, and its keys and values [2, B, H, S, D], the next on their way."""
        # one message for both: half as many to start
        pair = torch.stack((k, v))
        reason = uncompressed_reason("send", pair, pair.nbytes, self.group, self.options.get("min_bytes"))
        layout = self.encoding.layout(pair.numel())
        message = pair
        if not reason:
            message = new_message(pair, layout.bytes)
            self.encoding.encode(pair.view(-1), message, layout)
        for step in range(self.ranks):
            if step < self.ranks - 1:
                if reason:
                    observer.count_plain(KEYS_AND_VALUES, self.ranks, pair.nbytes, reason, "send")
                else:
                    observer.count_encoded(KEYS_AND_VALUES, self.ranks, pair.nbytes, {"send": message.nbytes}, "send")
                arriving = torch.empty_like(message)
                # the next rank's arrive while this one's block is computed
                works = dist.batch_isend_irecv(
                    [
                        dist.P2POp(dist.isend, message, self.peer(1), self.group),
                        dist.P2POp(dist.irecv, arriving, self.peer(-1), self.group),
                    ]
                )
            yield (self.rank - step) % self.ranks, pair
            if step < self.ranks - 1:
                for work in works:
                    work.wait()
                # the bytes go on as they came: a value that was encoded at each rank would be rounded at each
                message = arriving
                if reason:
                    pair = arriving
                else:
                    pair = torch.empty_like(pair)
                    self.encoding.decode(message, pair.view(-1), layout)

    def blocks(
        self, source: int, shape: torch.Size, lengths: tuple[int, ...] | None
    ) -> Iterator[tuple[Index, Index, bool]]:
        """Yield queries, the keys of a rank that precede them and that they attend to, and whether both are the same.

        Of an earlier rank's chunks the second follows all queries here; of a later one's queries those of the first
        chunk here precede all.
        """
        if self.packed is not None:
            for number, sequences in enumerate(self.packed):
                of_row = slice(number, number + 1), slice(None)
                for queries, keys, causal in self._packed_blocks(source, shape[2] // 2, sequences):
                    yield (*of_row, queries), (*of_row, keys), causal
            return
        rows = [slice(0, shape[0])] if lengths is None else [slice(row, row + 1) for row in range(len(lengths))]
        for row, length in zip(rows, lengths or shape[2:3], strict=True):
            if length:
                queries = slice(length // 2 if source > self.rank else 0, length)
                keys = slice(0, length // 2 if source < self.rank else length)
                yield (row, slice(None), queries), (row, slice(None), keys), source == self.rank

    def _packed_blocks(
        self, source: int, tokens: int, sequences: list[tuple[int, int]]
    ) -> Iterator[tuple[slice, slice, bool]]:
        """Yield the same of one row, whose chunks have so many tokens."""
        own, others = ((rank, 2 * self.ranks - 1 - rank) for rank in (self.rank, source))
        for here, query_chunk in enumerate(own):
            for there, key_chunk in enumerate(others):
                if key_chunk > query_chunk:
                    continue
                for begin, end in sequences:
                    queries = _overlap(begin, end, query_chunk * tokens, tokens, here * tokens)
                    keys = _overlap(begin, end, key_chunk * tokens, tokens, there * tokens)
                    if queries is not None and keys is not None:
                        yield queries, keys, key_chunk == query_chunk


def _overlap(begin: int, end: int, start: int, tokens: int, place: int) -> slice | None:
    """Return what of a chunk, which lies at a place, is in a sequence."""
    begin, end = max(begin - start, 0), min(end - start, tokens)
    return slice(place + begin, place + end) if begin < end else None


class _RingAttention(torch.autograd.Function):
    """Saves q, k, v, the output and its log-sum-exp; backward asks for the others' keys and values again."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: _Ring, lengths: tuple[int, ...] | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        # in FP32: each block's result is rounded, and 16 bits would round the joined one once more for each rank
        output = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=torch.float32, device=q.device)
        for source, pair in ring.rotate(k, v):
            for queries, keys, causal in ring.blocks(source, q.shape, lengths):
                block, block_lse = attend(q[queries], pair[0][keys], pair[1][keys], causal, scale)
                before, joined = lse[queries], output[queries]
                after = torch.logaddexp(before, block_lse)
                joined.mul_((before - after).exp().unsqueeze(-1))
                joined.add_(block * (block_lse - after).exp().unsqueeze(-1))
                before.copy_(after)
        if lengths is not None:
            lse.masked_fill_(lse == -torch.inf, 0)  # padding
        output = output.to(q.dtype)
        ctx.save_for_backward(q, k, v, output, lse)
        ctx.ring, ctx.lengths, ctx.scale = ring, lengths, scale
        # backward recomputes from it, and has no formula for its own gradient
        ctx.mark_non_differentiable(lse)
        return output, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple:
        q, k, v, output, lse = ctx.saved_tensors
        ring, lengths = ctx.ring, ctx.lengths
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        own = torch.zeros((2, *k.shape), dtype=torch.float32, device=k.device)
        sent: list[tuple[list, Tensor, int]] = []
        for step, (source, pair) in enumerate(ring.rotate(k, v)):
            # of an earlier rank's keys only those of its first chunk are read here, but where they are padded
            half = source < ring.rank and lengths is None
            shape = (2, *k.shape[:2], k.shape[2] // 2 if half else k.shape[2], k.shape[3])
            # packed, a key may be read in several blocks
            of_source = pair.new_zeros(shape, dtype=pair.dtype if ring.packed is None else torch.float32)
            for queries, keys, causal in ring.blocks(source, q.shape, lengths):
                of_queries = gradient[queries], q[queries], output[queries], lse[queries]
                block = attend_backward(*of_queries, pair[0][keys], pair[1][keys], causal, ctx.scale)
                dq[queries].add_(block[0])
                for into, part in zip(of_source, block[1:], strict=True):
                    into[keys].add_(part)
            if step == 0:
                own.add_(of_source)
            else:
                sent.append(_deliver(of_source.to(pair.dtype), step, ring, own, half_possible=lengths is None))
        for works, arriving, tokens in sent:
            for work in works:
                work.wait()
            own[..., :tokens, :].add_(arriving)
        return dq.to(q.dtype), *own.to(k.dtype).unbind(), None, None, None


def _deliver(
    gradients: Tensor, distance: int, ring: _Ring, own: Tensor, *, half_possible: bool
) -> tuple[list, Tensor, int]:
    """Send gradients of keys and values to the rank so many places back; receive those of one's own from ahead."""
    tokens = own.shape[3]
    if half_possible and (ring.rank + distance) % ring.ranks > ring.rank:
        tokens //= 2  # a later rank reads the first chunk alone
    arriving = gradients.new_empty((*own.shape[:3], tokens, own.shape[4]))
    works = comm.batch_isend_irecv(
        [
            comm.P2POp(comm.isend, gradients, ring.peer(-distance), ring.group, **ring.options),
            comm.P2POp(comm.irecv, arriving, ring.peer(distance), ring.group, **ring.options),
        ]
    )
    return works, arriving, tokens


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Attend, [B, H, S, D]; return the log-sum-exp of the scores too, FP32 [B, H, S]. k and v are [B, Hkv, S', D]."""
    k, v = _repeated(k, q), _repeated(v, q)
    if q.is_cuda:
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(
            q, k, v, 0.0, causal, False, scale=scale
        )
        return output, lse
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v, 0.0, causal, scale=scale)
    return output, lse.view(q.shape[:3])


def attend_backward(
    gradient: Tensor, q: Tensor, output: Tensor, lse: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v from output and log-sum-exp of the attention to all keys, of which k are some."""
    lse, shape = lse.contiguous(), k.shape
    k, v = _repeated(k, q), _repeated(v, q)
    if q.is_cuda:
        state = torch.empty(2, dtype=torch.uint64, device=q.device)  # of a dropout that there is none of
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            gradient, q, k, v, output, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, state, scale=scale
        )
    else:
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            gradient, q, k, v, output, lse, 0.0, causal, scale=scale
        )
    return dq, _added_up(dk, shape), _added_up(dv, shape)


def _repeated(heads: Tensor, q: Tensor) -> Tensor:
    """Return each head of keys or values as often as queries share it."""
    groups = q.shape[1] // heads.shape[1]
    return heads if groups == 1 else heads.repeat_interleave(groups, 1)


def _added_up(gradient: Tensor, shape: torch.Size) -> Tensor:
    """Return the gradient of heads, of the given shape, from that of `_repeated` ones."""
    return gradient if gradient.shape == shape else gradient.unflatten(1, (shape[1], -1)).sum(2)
