"""The cast of FP8 chunks from their masters, after an optimizer step or a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from fp8booster.colossal.gemini.chunks import FP8Chunk
from fp8booster.comm.observer import observer
from fp8booster.kernels.scales import new_inverse_scales
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.sharding import ShardedCast, scale_groups
from fp8booster.nn.weights.holder import WeightHolder

NAME = "amax of weights"
"""The row of `fp8booster.comm.statistics` for the reductions that scales come from."""

Part = tuple[FP8Chunk, int]
"""This rank's part of a weight's master, by the chunk of the weight and the place in its payload where it begins."""


class Masters:
    """The FP32 masters of the weights in some chunks, of which layers read what is cast.

    Args:
        chunks: of one group of ranks, in the same order on all ranks; their masters are the paired chunks.
        layers: by weight.
        merged: layers that are multiplied as one. Where their weights lie side by side in a chunk they get one scale.
    """

    def __init__(
        self, chunks: Sequence[FP8Chunk], layers: Mapping[nn.Parameter, WeightHolder], merged: Sequence[MergedLayers]
    ) -> None:
        self._chunks = tuple(chunks)
        self._parts = [(chunk, *chunk.own_range(weight)) for chunk in chunks for weight in chunk.tensors_info]
        chunk_of = {layers[weight]: chunk for chunk in chunks for weight in chunk.tensors_info}

        def why_apart(together: MergedLayers) -> str | None:
            if chunk_of[together.layers[0]].are_side_by_side(together.weights):
                return None
            return "the weights do not lie side by side in one chunk"

        groups = scale_groups(chunk_of, merged, why_apart)
        if chunks:
            device = chunks[0].cuda_global_chunk.device
            self._sharded = ShardedCast(groups, device)
            # in one tensor, each where products may read it: chunks come and go, and scales stay
            scales = new_inverse_scales(len(groups), device).unbind()
            self._inverse_scales = [scale for group, scale in zip(groups, scales, strict=True) for _ in group.layers]
            for group, scale in zip(groups, scales, strict=True):
                chunk_of[group.layers[0]].lay(group, scale)

    @torch.no_grad()
    def publish(self, known: Mapping[Part, torch.Tensor] | None = None) -> None:
        """Cast the masters into their chunks, each weight by the scale of its whole group; every rank calls it.

        A shard is cast where it lies. A master that lies on the host goes to a shard on the GPU in FP32, and is cast
        there.

        Args:
            known: the largest magnitude of parts of these masters as they are now, float32 [] on the GPU. Others are
                read for theirs.
        """
        # no chunk here means none on the other ranks, so nobody waits in the reduction
        if not self._chunks:
            return
        payloads = {chunk: chunk.paired_chunk.payload for chunk in self._chunks}
        values = {chunk: chunk.own_values().view(chunk.weight_format) for chunk in self._chunks}
        shards = [payloads[chunk][begin:end] for chunk, begin, end in self._parts]
        # what begins where another weight's part does, and is empty, has no amax of its own
        told = [(known or {}).get((chunk, begin)) if begin < end else None for chunk, begin, end in self._parts]
        group, ranks = self._chunks[0].torch_pg, self._chunks[0].pg_size
        # one reduction for all weights: every rank has parts of other weights, and scales must be the same on each
        amaxes = self._sharded.agree(shards, group, told)
        if ranks > 1:
            observer.count_plain(NAME, ranks, amaxes.nbytes, "FP32, one for each weight", "all_reduce")
        outs = [values[chunk][begin:end] for chunk, begin, end in self._parts]
        self._sharded.cast(shards, amaxes, outs, self._inverse_scales)
        for chunk in self._chunks:
            chunk.publish()
