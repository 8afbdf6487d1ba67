"""What an FP8 linear layer has to compute, written without the package: quantize, multiply exactly, rescale."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Quantized(NamedTuple):
    """FP8 values in double precision, and the factor that undoes their scale."""

    values: torch.Tensor
    inverse_scale: torch.Tensor


class Gradients(NamedTuple):
    """Output of a linear layer and its gradients, in double precision."""

    output: torch.Tensor
    input: torch.Tensor
    weight: torch.Tensor


def quantize(tensor: torch.Tensor, dtype: torch.dtype) -> Quantized:
    """One scale for the tensor, from its largest magnitude."""
    limit = torch.finfo(dtype).max
    amax = tensor.abs().max().double()
    scale = (limit / amax).float() if amax > 0 else torch.ones((), device=tensor.device)
    scaled = (tensor.float() * scale).clamp(-limit, limit)
    return Quantized(scaled.to(dtype).double(), (1 / scale.double()).float().double())


def multiply(a: Quantized, b: Quantized) -> torch.Tensor:
    """The product a @ b.T, rescaled."""
    return a.values @ b.values.t() * a.inverse_scale * b.inverse_scale


def transpose(a: Quantized) -> Quantized:
    """The same values, columns as rows."""
    return Quantized(a.values.t(), a.inverse_scale)


def linear(input: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> Gradients:
    """Output and gradients of matrices x [M, K], w [N, K] and dy [M, N], E4M3 forward and E5M2 backward."""
    x, w, dy = quantize(input, E4M3), quantize(weight, E4M3), quantize(gradient, E5M2)
    return Gradients(
        output=multiply(x, w), input=multiply(dy, transpose(w)), weight=multiply(transpose(dy), transpose(x))
    )


def exact_linear(input: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> Gradients:
    """The same without rounding."""
    x, w, dy = input.double(), weight.double(), gradient.double()
    return Gradients(output=x @ w.t(), input=dy @ w, weight=dy.t() @ x)


def signal_to_noise(exact: torch.Tensor, approximate: torch.Tensor) -> float:
    """Signal-to-quantization-noise ratio in dB."""
    noise = exact.double() - approximate.double()
    return (20 * torch.log10(exact.double().norm() / noise.norm())).item()


def assert_rounded(result: torch.Tensor, reference: torch.Tensor, magnitude: torch.Tensor, inner: int) -> None:
    """Check a product against its double-precision value, up to the rounding of its dtype and of its sums.

    A Hopper GPU adds in about 14 bits, which costs up to 2**-12 of what is added; the CPU adds in FP32.

    Args:
        result: the product.
        reference: the same in double precision.
        magnitude: the same of the magnitudes of both operands: what is added up, signs apart.
        inner: how many numbers each of its values sums.
    """
    accumulator = 2.0**-12 if result.is_cuda else inner * 2.0**-24
    allowed = torch.finfo(result.dtype).eps * reference.abs() + accumulator * magnitude
    error = (result.double() - reference).abs()
    worst = (error - allowed).argmax()
    assert (error <= allowed).all(), f"{error.flatten()[worst]} off, {allowed.flatten()[worst]} allowed"


def count_calls(monkeypatch, owner: object, name: str, calls: list | None = None) -> list:
    """Record the first two arguments of every call of `owner.name`, in a new list or behind those of another."""
    calls, original = [] if calls is None else calls, getattr(owner, name)

    def recording(*arguments, **options):
        calls.append(arguments[:2])
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, recording)
    return calls


def products_kept() -> tuple:
    """The contexts of a checkpoint that keeps what products gave."""

    def policy(_: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = operator in (torch.ops.aten.mm.default, torch.ops.aten._scaled_mm.default)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
