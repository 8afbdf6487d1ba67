"""The cast of FP8 chunks from their masters, after an optimizer step or a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.comm.amax import agree_on_amax, largest_of_each
from fp8booster.comm.statistics import count_plain
from fp8booster.kernels.scales import scale_of
from fp8booster.kernels.shard_cast import cast_shards

NAME = "amax of weights"
"""The row of `fp8booster.comm.statistics` for the reductions that scales come from."""

Part = tuple[FP8Chunk, int]
"""This rank's part of a weight's master, by the chunk of the weight and the place in its payload where it begins."""


class _Run(NamedTuple):
    """Weights one after the other in a chunk that share a scale."""

    first: int
    """The place in the chunk of the weight that the scale is noted for."""

    begin: int
    end: int
    """This rank's part of them, in what it casts."""


class Masters:
    """The FP32 masters of some chunks.

    Args:
        chunks: of one group of ranks and one configuration, in the same order on all ranks; their masters are the
            paired chunks.
    """

    def __init__(self, chunks: Sequence[FP8Chunk]) -> None:
        self._chunks = tuple(chunks)
        self._sizes = [len(chunk.tensors_info) for chunk in chunks]
        places = [0, *accumulate(self._sizes)]
        first = [place + of for chunk, place in zip(chunks, places, strict=False) for of in chunk.scale_of]
        shares = len(set(first)) < len(first)
        self._first = None
        if shares:
            self._first = torch.tensor(first, dtype=torch.int64, device=chunks[0].inverse_scales.device)
        self._ranges = [
            [(begin, max(begin, end)) for begin, end in map(chunk.own_range, chunk.tensors_info)] for chunk in chunks
        ]
        self._runs = [_runs(chunk.scale_of, own) for chunk, own in zip(chunks, self._ranges, strict=True)]

    @torch.no_grad()
    def publish(self, known: Mapping[Part, torch.Tensor] | None = None) -> None:
        """Cast the masters into their chunks, each weight by the scale of its whole master; every rank calls it.

        Weights that share a scale are cast by the smallest of theirs.

        A shard is cast where it lies. A master that lies on the host goes to a shard on the GPU in FP32, and is cast
        there.

        Args:
            known: the largest magnitude of parts of these masters as they are now, float32 [] on the GPU. Others are
                read for theirs.
        """
        if not self._chunks:
            return
        chunk = self._chunks[0]
        group, ranks, device = chunk.torch_pg, chunk.pg_size, chunk.inverse_scales.device
        payloads = [chunk.paired_chunk.payload for chunk in self._chunks]
        parts = [
            payload[begin:end] for payload, ranges in zip(payloads, self._ranges, strict=True) for begin, end in ranges
        ]
        known = known or {}
        amaxes_known = [
            known.get((chunk, begin)) if begin < end else None
            for chunk, ranges in zip(self._chunks, self._ranges, strict=True)
            for begin, end in ranges
        ]
        amaxes = agree_on_amax(_on(device, parts), group, amaxes_known)
        if ranks > 1:
            count_plain(NAME, ranks, amaxes.nbytes, "FP32, one for each weight", "all_reduce")
        if self._first is not None:
            amaxes = largest_of_each(amaxes, self._first)
        _, inverse_scales = scale_of(amaxes, chunk.weight_format, chunk.power_of_two)
        torch._foreach_copy_([chunk.inverse_scales for chunk in self._chunks], inverse_scales.split(self._sizes))
        for chunk, payload, own, runs, ranges in zip(
            self._chunks, payloads, amaxes.split(self._sizes), self._runs, self._ranges, strict=True
        ):
            _cast(chunk, payload, own, runs)
            _note(chunk, payload, ranges)
            chunk.publish()


def _runs(scale_of: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[_Run]:
    """What one launch can cast, where this rank has some of it."""
    runs: list[_Run] = []
    for first, (begin, end) in zip(scale_of, ranges, strict=True):
        if begin == end:
            continue
        if runs and (runs[-1].first, runs[-1].end) == (first, begin):
            runs[-1] = runs[-1]._replace(end=end)
        else:
            runs.append(_Run(first, begin, end))
    return runs


def _cast(chunk: FP8Chunk, payload: torch.Tensor, amaxes: torch.Tensor, runs: Sequence[_Run]) -> None:
    values = chunk.own_values()
    if values.device != amaxes.device:
        amaxes = amaxes.to(values.device)
    values = values.view(chunk.weight_format)
    unused = torch.empty((), dtype=torch.float32, device=values.device)
    # what an offloaded master is copied to is freed before the next part is
    for some in [runs] if payload.device == values.device else [[run] for run in runs]:
        parts = [payload[begin:end].to(values.device, non_blocking=values.is_cuda) for _, begin, end in some]
        outs = [values[begin:end] for _, begin, end in some]
        cast_shards(parts, [amaxes[first] for first, *_ in some], outs, [unused] * len(some), chunk.power_of_two)


def _note(chunk: FP8Chunk, payload: torch.Tensor, ranges: Sequence[tuple[int, int]]) -> None:
    """Show layers what was cast of their weights."""
    values = chunk.own_values().view(chunk.weight_format)
    for parameter, (begin, end), inverse_scale in zip(chunk.tensors_info, ranges, chunk.inverse_scales, strict=True):
        layer = chunk.layers.get(parameter)
        if layer is not None:
            layer.fp8_casts.note_weight(payload[begin:end], values[begin:end], inverse_scale)


def _on(device: torch.device, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the device with the amaxes of these parts, of which some may be offloaded."""
    offloaded = [part for part in parts if part.device != device and part.numel()]
    if offloaded:
        norms = iter(torch.stack(torch._foreach_norm(offloaded, float("inf"))).to(device).split(1))
    empty = torch.empty(0, dtype=torch.float32, device=device)
    return [part if part.device == device else next(norms) if part.numel() else empty for part in parts]
