"""Measure the errors that each way to send gradients in FP8 leaves in a bucket of them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch

from benchmarks.gradients.collect import Bucket
from benchmarks.harness.results import Record
from fp8booster import formats
from fp8booster.comm import Encoding
from fp8booster.comm.automatic_scaling import FORMAT, add_in_fp8, cast_tensors, scales_of
from fp8booster.kernels.scales import amax_of

_BEYOND = 1 + 2.0**-12
"""Times the largest magnitude: more than the rounding of a real-time scale can push past it."""


@dataclass(frozen=True)
class Sent:
    """A bucket after its way through FP8."""

    casts: torch.Tensor
    """float32 [ranks, ranks, part]: what each rank's cast keeps."""
    mean: torch.Tensor
    """float32 [ranks, part]: what arrives."""
    clipped: float
    """Share of the values that a cast clipped."""
    sums_at_largest: float | None
    """Share of the sums at the format's largest magnitude; None where they are taken in FP32."""
    bytes_per_value: float


@dataclass(frozen=True)
class Scheme:
    """One way of sending gradients."""

    name: str
    send: Callable[[Bucket], Sent]


def schemes(ranks: int) -> list[Scheme]:
    """Every way that is compared."""
    encodings = [
        Encoding(format=dtype, block_size=block)
        for dtype, block in (
            (formats.E5M2, None),
            (formats.E4M3, None),
            (formats.E5M2, 256),
            (formats.E4M3, 128),
            (formats.E4M3, 256),
            (formats.E4M3, 1024),
        )
    ]
    return [
        *(Scheme(name_of(encoding), lambda bucket, e=encoding: _encoded(bucket, e)) for encoding in encodings),
        *(
            Scheme(f"FP8-LM, mu = {Fraction(mu).limit_denominator(1024)}", lambda bucket, mu=mu: _automatic(bucket, mu))
            for mu in sorted({1 / ranks, 0.5, 1.0, 2.0})
        ),
    ]


def name_of(encoding: Encoding) -> str:
    """Format and what shares a scale."""
    scale = "a message" if encoding.block_size is None else f"{encoding.block_size} values"
    return f"{'E4M3' if encoding.format is formats.E4M3 else 'E5M2'}, a scale for {scale}"


def measure(way: Scheme, bucket: Bucket) -> Record:
    """Errors in decibels of signal over noise, and shares of the values."""
    sent = way.send(bucket)
    exact = bucket.values.float()
    mean = bucket.values.double().mean(0)
    by_parameter = [
        decibels(value, got)
        for value, got in zip(mean.split(bucket.sizes, 1), sent.mean.split(bucket.sizes, 1), strict=True)
    ]
    flushed = ((sent.casts == 0) & (exact != 0)).sum() / (exact != 0).sum()
    return {
        "way": way.name,
        "step": bucket.step,
        "cast": decibels(exact, sent.casts),
        "mean": decibels(mean, sent.mean),
        "median": statistics.median(by_parameter),
        "worst": min(by_parameter),
        "worst parameter": bucket.names[by_parameter.index(min(by_parameter))],
        "flushed": flushed.item(),
        "clipped": sent.clipped,
        "sums at largest": sent.sums_at_largest,
        "bytes": sent.bytes_per_value,
    }


def _encoded(bucket: Bucket, encoding: Encoding) -> Sent:
    """Real-time scales; the decoded values are added in FP32."""
    ranks, _, part = bucket.values.shape
    layout = encoding.layout(part, ranks)
    casts = torch.empty_like(bucket.values, dtype=torch.float32)
    clipped = 0
    for own, out in zip(bucket.values, casts, strict=True):
        message = torch.empty(layout.bytes, dtype=torch.uint8, device=own.device)
        encoding.encode(own.flatten(), message, layout)
        encoding.decode(message, out.view(-1), layout)
        clipped += _clipped(own, message, encoding).item()
    return Sent(casts, casts.mean(0), clipped / casts.numel(), None, layout.bytes / (ranks * part))


def _clipped(values: torch.Tensor, message: torch.Tensor, encoding: Encoding) -> torch.Tensor:
    """Count the values beyond the range that the scales of a message leave."""
    ranks, part = values.shape
    layout = encoding.layout(part, ranks)
    largest = message.clone()
    payload = largest.view(ranks, -1)[:, : layout.payload_bytes]
    payload.copy_(torch.tensor(formats.MAX[encoding.format]).to(encoding.format).view(torch.uint8))
    limits = torch.empty_like(values, dtype=torch.float32)
    encoding.decode(largest, limits.view(-1), layout)
    return (values.float().abs() > limits * _BEYOND).sum()


def _automatic(bucket: Bucket, mu: float) -> Sent:
    """FP8-LM's scaling with this mu: one scale for each parameter, shared by all ranks; the sum is taken in FP8."""
    ranks, _, part = bucket.values.shape
    parameters = bucket.values.split(bucket.sizes, 2)
    scales, inverse_scales = scales_of(torch.stack([amax_of(values) for values in parameters]), mu)
    sizes = torch.tensor(bucket.sizes, device=bucket.values.device)
    inverse = inverse_scales.repeat_interleave(sizes)
    encoded = cast_tensors(bucket.values.view(-1, part), bucket.sizes, scales).view(ranks, -1)
    total = add_in_fp8(encoded).view(ranks, part).float()
    limits = formats.MAX[FORMAT] * inverse * _BEYOND
    clipped = (bucket.values.float().abs() > limits).float().mean()
    at_largest = (total.abs() == formats.MAX[FORMAT]).float().mean()
    casts = encoded.view(bucket.values.shape).float() * inverse
    scale_bytes = 4 * len(bucket.sizes) / (ranks * part)
    return Sent(casts, total * inverse / ranks, clipped.item(), at_largest.item(), 1 + scale_bytes)


def decibels(exact: torch.Tensor, found: torch.Tensor) -> float:
    """Signal over noise; infinite where nothing is lost."""
    exact, found = exact.double(), found.double()
    noise = (exact - found).square().sum().item()
    return 10 * math.log10(exact.square().sum().item() / noise) if noise else math.inf
