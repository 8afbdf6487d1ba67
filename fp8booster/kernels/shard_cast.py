"""The cast of a weight that is spread over ranks: each casts its shard, and what was gathered is unpacked.

Each rank holds a part of a weight, finds its amax, and learns the largest over all ranks. It casts its part by the
scale of that; once gathered, the parts are the FP8 weight, and its transpose and its 16-bit copy are made from these
bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8booster import scaling
from fp8booster.kernels.cast import saturate
from fp8booster.kernels.device import why_no_fp8


def cast_shard(
    shard: torch.Tensor, amax: torch.Tensor, out: torch.Tensor, inverse_scale: torch.Tensor, power_of_two: bool = False
) -> None:
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
    if not (shard.is_contiguous() and out.is_contiguous()):
        raise ValueError("cast_shard reads and writes values one after the other; give contiguous tensors")
    implementation = _pick(shard, "cast_shard")
    implementation(shard, amax, out, inverse_scale, power_of_two)
    if implementation is not cast_shard_reference:
        torch.autograd.graph.increment_version([out, inverse_scale])


def cast_shard_reference(
    shard: torch.Tensor, amax: torch.Tensor, out: torch.Tensor, inverse_scale: torch.Tensor, power_of_two: bool
) -> None:
    """What `cast_shard` computes, in torch."""
    scale, inverse = scaling.scale_of(amax, out.dtype, power_of_two)
    out.view(torch.uint8).copy_(saturate(shard.float() * scale, out.dtype).view(torch.uint8))
    inverse_scale.copy_(inverse)


def unpack(
    matrix: torch.Tensor, inverse_scale: torch.Tensor, transpose: torch.Tensor | None, weight: torch.Tensor | None
) -> None:
    """Write the transpose of an FP8 matrix, and its values in high precision, where there is memory for them.

    Args:
        matrix: [R, C] FP8, contiguous.
        inverse_scale: float32, shape [].
        transpose: [C, R] FP8, each row contiguous; written. None: it is not wanted.
        weight: [R, C], BF16, FP16 or FP32, contiguous; written. None: the values are not wanted.
    """
    if transpose is None and weight is None:
        return
    implementation = _pick(matrix, "unpack")
    implementation(matrix, inverse_scale, transpose, weight)
    if implementation is not unpack_reference:
        torch.autograd.graph.increment_version([each for each in (transpose, weight) if each is not None])


def unpack_reference(
    matrix: torch.Tensor, inverse_scale: torch.Tensor, transpose: torch.Tensor | None, weight: torch.Tensor | None
) -> None:
    """What `unpack` computes, in torch."""
    if transpose is not None:
        transpose.view(torch.uint8).copy_(matrix.view(torch.uint8).t())
    if weight is not None:
        weight.copy_(matrix.float() * inverse_scale)


def _pick(tensor: torch.Tensor, name: str) -> Callable[..., None]:
    if tensor.is_cuda and why_no_fp8(tensor.device) is None:
        from fp8booster.kernels import shard_cast_triton  # Triton is needed only here

        return getattr(shard_cast_triton, f"{name}_triton")
    return {"cast_shard": cast_shard_reference, "unpack": unpack_reference}[name]
