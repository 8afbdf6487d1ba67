"""The cast of a weight that is spread over ranks: each casts its shard, and what was gathered is unpacked.

Each rank holds a part of a weight, finds its amax, and learns the largest over all ranks. It casts its part by the
scale of that; once gathered, the parts are the FP8 weight, and its transpose and its 16-bit copy are made from these
bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fp8booster import scaling
from fp8booster.kernels.cast import saturate
from fp8booster.kernels.operators import operator


@operator(rounds_to_fp8=True, writes=("out", "inverse_scale"))
def cast_shard(shard: Tensor, amax: Tensor, out: Tensor, inverse_scale: Tensor, power_of_two: bool = False) -> None:
    """Cast a flat part of a tensor by the scale of the whole tensor's amax.

    Args:
        shard: [n], BF16, FP16 or FP32, contiguous.
        amax: float32, shape [], of the whole tensor.
        out: [n] FP8, contiguous; written.
        inverse_scale: float32, shape []; written.
        power_of_two: see `scaling.scale_of`.

    Raises:
        ValueError: `shard` or `out` is not contiguous.
    """
    require_contiguous(shard, out)
    scale, inverse = scaling.scale_of(amax, out.dtype, power_of_two)
    out.view(torch.uint8).copy_(saturate(shard.float() * scale, out.dtype).view(torch.uint8))
    inverse_scale.copy_(inverse)


def require_contiguous(shard: Tensor, out: Tensor) -> None:
    """Raise ValueError where what `cast_shard` reads or writes does not lie one value after the other."""
    if not (shard.is_contiguous() and out.is_contiguous()):
        raise ValueError("cast_shard reads and writes values one after the other; give contiguous tensors")


@operator(rounds_to_fp8=True, writes=("transpose", "weight"))
def unpack(matrix: Tensor, inverse_scale: Tensor, transpose: Tensor | None, weight: Tensor | None) -> None:
    """Write the transpose of an FP8 matrix, and its values in high precision, where there is memory for them.

    Args:
        matrix: [R, C] FP8, contiguous.
        inverse_scale: float32, shape [].
        transpose: [C, R] FP8, each row contiguous; written. None: it is not wanted.
        weight: [R, C], BF16, FP16 or FP32, contiguous; written. None: the values are not wanted.
    """
    if transpose is not None:
        transpose.view(torch.uint8).copy_(matrix.view(torch.uint8).t())
    if weight is not None:
        weight.copy_(matrix.float() * inverse_scale)
