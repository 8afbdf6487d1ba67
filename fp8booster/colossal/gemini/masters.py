"""The cast of FP8 chunks from their masters, after an optimizer step or a load."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8booster import scaling
from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.comm.amax import agree_on_amax
from fp8booster.comm.statistics import count_plain
from fp8booster.kernels.shard_cast import cast_shard

NAME = "amax of weights"
"""The row of `fp8booster.comm.statistics` for the reductions that scales come from."""


@torch.no_grad()
def publish_masters(chunks: Sequence[FP8Chunk]) -> None:
    """Cast the masters of some chunks into them, each weight by the scale of its whole master; every rank calls it.

    Weights that share a scale are cast by the smallest of theirs.

    A shard is cast where it lies. A master that lies on the host goes to a shard on the GPU in FP32, and is cast there.

    Args:
        chunks: of one group of ranks, in the same order on all; their masters are the paired chunks.
    """
    if not chunks:
        return
    group, ranks, device = chunks[0].torch_pg, chunks[0].pg_size, chunks[0].inverse_scales.device
    masters = [_masters(chunk) for chunk in chunks]
    amaxes = agree_on_amax(_on(device, [part for parts in masters for part in parts.values()]), group)
    if ranks > 1:
        count_plain(NAME, ranks, amaxes.nbytes, "FP32, one for each weight", "all_reduce")
    for chunk, parts, own in zip(
        chunks, masters, amaxes.split([len(parts) for parts in masters]), strict=True
    ):
        own = chunk.shared(own)
        _, inverse_scales = scaling.scale_of(own, chunk.weight_format, chunk.power_of_two)
        chunk.inverse_scales.copy_(inverse_scales)
        values = chunk.own_values()
        if values.device != own.device:
            own = own.to(values.device)
        values = values.view(chunk.weight_format)
        unused = torch.empty((), dtype=torch.float32, device=values.device)
        for (parameter, part), amax in zip(parts.items(), own.unbind(), strict=True):
            if part.numel():
                begin, end = chunk.own_range(parameter)
                part = part.to(values.device, non_blocking=values.is_cuda)
                cast_shard(part, amax, values[begin:end], unused, chunk.power_of_two)
        chunk.publish()


def _masters(chunk: FP8Chunk) -> dict[torch.nn.Parameter, torch.Tensor]:
    """This rank's part of each weight's master, empty where it has none of it."""
    payload = chunk.paired_chunk.payload
    parts = {}
    for parameter in chunk.tensors_info:
        begin, end = chunk.own_range(parameter)
        parts[parameter] = payload[begin : max(begin, end)]
    return parts


def _on(device: torch.device, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors on the device with the amaxes of these parts, of which some may be offloaded."""
    offloaded = [part for part in parts if part.device != device and part.numel()]
    if offloaded:
        norms = iter(torch.stack(torch._foreach_norm(offloaded, float("inf"))).to(device).split(1))
    empty = torch.empty(0, dtype=torch.float32, device=device)
    return [part if part.device == device else next(norms) if part.numel() else empty for part in parts]
