"""The cast of weights that are spread over ranks: each casts its shards, and what was gathered is unpacked.

Each rank holds a part of a weight, finds its amax, and learns the largest over all ranks. It casts its part by the
scale of that; once gathered, the parts are the FP8 weight, and its transpose and its 16-bit copy are made from these
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8booster.kernels.cast import saturate
from fp8booster.kernels.operators import operator
from fp8booster.kernels.scales import scale_of


@operator(rounds_to_fp8=True, writes=("outs", "inverse_scales"))
def cast_shards(
    shards: Sequence[Tensor],
    amaxes: Tensor,
    outs: Sequence[Tensor],
    inverse_scales: Sequence[Tensor],
    power_of_two: bool = False,
) -> None:
    """Cast flat parts of tensors, each by the scale of its whole tensor's amax.

    Args:
        shards: [n_i], BF16, FP16 or FP32, contiguous; all on one device.
        amaxes: float32 [shards], contiguous, of the whole tensors.
        outs: [n_i] FP8, contiguous; written.
        inverse_scales: float32, shape []; written. Shards with one amax may share one. Not of an empty shard on a GPU.
        power_of_two: see `scales.scale_of`.

    Raises:
        ValueError: a shard or an `out` is not contiguous.
    """
    require_contiguous(shards, outs)
    for shard, amax, out, inverse_scale in zip(shards, amaxes.unbind(), outs, inverse_scales, strict=True):
        scale, inverse = scale_of(amax, out.dtype, power_of_two)
        # the scale is that of the whole tensor, so the gathered parts have the bytes of a cast of the whole
        out.view(torch.uint8).copy_(saturate(shard.float() * scale, out.dtype).view(torch.uint8))
        inverse_scale.copy_(inverse)


def require_contiguous(shards: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Raise ValueError where what `cast_shards` reads or writes does not lie one value after the other."""
    if not all(map(Tensor.is_contiguous, (*shards, *outs))):
        raise ValueError("cast_shards reads and writes values one after the other; give contiguous tensors")


@operator(rounds_to_fp8=True, writes=("transposes", "weights"))
def unpack(
    matrices: Sequence[Tensor],
    inverse_scales: Sequence[Tensor],
    transposes: Sequence[Tensor | None],
    weights: Sequence[Tensor | None],
) -> None:
    """Write the transposes of FP8 matrices, and their values in high precision, where there is memory for them.

    Args:
        matrices: [R_i, C_i] FP8, contiguous; all on one device.
        inverse_scales: float32, shape [].
        transposes: [C_i, R_i] FP8, each row contiguous; written. None: it is not wanted.
        weights: [R_i, C_i], BF16, FP16 or FP32, contiguous; written. None: the values are not wanted.
    """
    for matrix, inverse_scale, transpose, weight in zip(matrices, inverse_scales, transposes, weights, strict=True):
        if transpose is not None:
            transpose.view(torch.uint8).copy_(matrix.view(torch.uint8).t())
        if weight is not None:
            # from the bytes that were sent, so that replicas and products have the same weight
            weight.copy_(matrix.float() * inverse_scale)
