"""Adam's update with both moments in one byte a value, and a BF16 weight whose FP32 master is it and 16 bits more.

Every block of 256 consecutive values has its own range:

    first moment    code = sign(m) * round(127 * sqrt(|m| / amax)), int8
    second moment   code = 1 + round((bits(v) - least) / step), uint8; 0 for a moment of 0
    master weight   bits(master) = bits(BF16 weight) * 2^16 + low bits, minus 2^16 where BF16 rounded up

`bits` are those of a float32 as an integer, which grow as the logarithm does, but for straight lines between powers of
two. A block of second moments spans few octaves, so 254 steps of it err by half a percent. The second moment is rounded
up or down by chance, in proportion: with a beta2 of 0.999 a step changes it by less than half a code, and rounded to
nearest it would stay for ever. The error of m / sqrt(v), compared with other codes: benchmarks/results/cpu/moments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fp8booster.kernels.adam_step import SMALLEST_NORMAL, AdamRates
from fp8booster.kernels.moments import BLOCK, LARGEST, MOST_OCTAVES, NAN, STEPS, Moments8bit, require_updatable
from fp8booster.kernels.operators import operator


@operator(writes=("value",))
def update_8bit(
    value: torch.Tensor,
    low: torch.Tensor | None,
    gradient: torch.Tensor,
    moments: Moments8bit,
    row: torch.Tensor,
    rates: AdamRates,
    skipped: torch.Tensor,
) -> None:
    """Take one step of Adam (Kingma and Ba, algorithm 1) or AdamW (Loshchilov and Hutter, algorithm 2) in place.

    The update is computed in FP32 from moments that are not yet rounded, each operation rounded by itself. A block
    with a gradient that is not finite keeps its values and moments, bit for bit.

    Args:
        value: the weight, [n], FP32, or BF16 with `low`.
        low: int16 [n], what the FP32 master has beside a BF16 weight; None for an FP32 weight.
        gradient: [n], BF16, FP16 or FP32.
        moments: of the tensor.
        row: float32 [4], from `step_rows`.
        rates: betas, eps and the kind of decay; the rest is in the row.
        skipped: int32 []; the number of blocks that were left as they are is added.

    Raises:
        ValueError: a tensor's values lie apart, or the weight is FP16.
    """
    require_updatable(value, low, gradient)
    count = value.numel()
    decay, step_size, inverse_root, _ = row.unbind()
    beta1, beta2 = rates.betas
    g = in_blocks(gradient.float())
    w = in_blocks(value if low is None else master_of(value, low))
    m, v = decode_first(moments.first, moments.amaxes), decode_second(moments.second, moments.ranges)
    if rates.decoupled:
        w = w - decay * w
        g_and_decay = g
    else:
        g_and_decay = g + decay * w
    m = _f32(beta1) * m + _f32(1 - beta1) * g_and_decay
    v = _f32(beta2) * v + (_f32(1 - beta2) * g_and_decay) * g_and_decay
    w = w - _divide(step_size * m, _root(v) * inverse_root + _f32(rates.denominator_eps()))

    kept = ~g.isfinite().all(dim=1)
    skipped += kept.sum(dtype=torch.int32)
    first, amaxes = encode_first(m)
    second, ranges = encode_second(v, row[3].view(torch.int32))
    of_values = kept.repeat_interleave(BLOCK)[:count]
    moments.amaxes.copy_(torch.where(kept, moments.amaxes, amaxes))
    moments.ranges.copy_(torch.where(kept[:, None], moments.ranges, ranges))
    moments.first.copy_(torch.where(of_values, moments.first, first.flatten()[:count]))
    moments.second.copy_(torch.where(of_values, moments.second, second.flatten()[:count]))
    w = w.flatten()[:count]
    if low is None:
        value.copy_(torch.where(of_values, value.flatten(), w).view_as(value))
    else:
        rounded, rest = split(w)
        value.copy_(torch.where(of_values, value.flatten(), rounded).view_as(value))
        low.copy_(torch.where(of_values, low, rest))


def step_rows(rates: AdamRates, steps: Sequence[int], numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """What tensors need to know of a step: float32 [tensors, 4].

    A row holds the factor of weight decay, the step size lr / (1 - beta1^t), 1 / the root of 1 - beta2^t, and the
    bits of a seed for chance, which differs between steps and tensors.

    Args:
        rates: of the step; `lr` as a number.
        steps: of each tensor, how many it has taken with this one.
        numbers: of each tensor, what tells it from others.
        device: of the tensors.
    """
    decay = rates.lr * rates.weight_decay if rates.decoupled else rates.weight_decay
    rows = torch.tensor(
        [[decay, rates.lr / (1 - rates.betas[0] ** t), (1 - rates.betas[1] ** t) ** -0.5, 0.0] for t in steps],
        dtype=torch.float32,
    )
    seeds = [(t * 0x9E3779B1 + number * 0x85EBCA77) & 0x7FFFFFFF for t, number in zip(steps, numbers, strict=True)]
    rows.view(torch.int32)[:, 3] = torch.tensor(seeds, dtype=torch.int32)
    return rows.to(device, non_blocking=True)


def split(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 values as BF16, rounded half away from zero, and the low 16 bits of the FP32 values as int16."""
    bits = torch.where(master.isnan(), NAN, master.view(torch.int32))
    rounded = ((bits + 0x8000) >> 16).to(torch.int16)
    return rounded.view(torch.bfloat16), bits.to(torch.int16)


def master_of(value: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """The FP32 values that `split` was given, flattened; low bits of half a unit or more tell that it rounded up."""
    high = value.flatten().view(torch.int16).to(torch.int32)
    low = low.to(torch.int32)
    return ((high - (low < 0).to(torch.int32)) * 65536 + (low & 0xFFFF)).view(torch.float32)


def encode_first(m: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First moments in blocks, float32 [blocks, 256], as int8 codes of this shape, and float32 [blocks] amaxes."""
    amax = m.abs().amax(dim=1)
    amax = torch.where(amax >= SMALLEST_NORMAL, amax, 0.0)
    inverse = _divide(torch.ones_like(amax), torch.where(amax > 0, amax, torch.inf))
    code = (_root(m.abs() * inverse[:, None]) * 127.0 + 0.5).floor()
    return torch.where(m < 0, -code, code).to(torch.int8), amax


def decode_first(code: torch.Tensor, amaxes: torch.Tensor) -> torch.Tensor:
    """First moments of int8 [n] codes, in blocks: float32 [blocks, 256]."""
    root = in_blocks(code.float()) * _f32(1 / 127)
    return root * root.abs() * amaxes[:, None]


def encode_second(v: torch.Tensor, seed: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Second moments in blocks, float32 [blocks, 256], not negative, as uint8 codes and int32 [blocks, 2] ranges.

    Args:
        v: the moments.
        seed: int32 [], of chance; None rounds to nearest.
    """
    bits = v.view(torch.int32).clamp(max=LARGEST)
    largest = bits.amax(dim=1)
    least = torch.where(bits > 0, bits, LARGEST).amin(dim=1)
    least = torch.minimum(torch.maximum(least, largest - (MOST_OCTAVES << 23)), largest)
    step = ((largest - least + STEPS - 1) // STEPS).clamp(min=1)
    above = (bits - least[:, None]).clamp(min=0).float() * _divide(torch.ones_like(step), step)[:, None]
    rounding = 0.5 if seed is None else chance(v.numel(), seed, v.device).view_as(v)
    code = (above + rounding).floor().clamp(max=STEPS) + 1
    return torch.where(bits > 0, code, 0).to(torch.uint8), torch.stack([least, step], dim=1)


def decode_second(code: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    """Second moments of uint8 [n] codes, in blocks: float32 [blocks, 256]."""
    blocks = in_blocks(code.to(torch.int32))
    bits = (ranges[:, :1] + (blocks - 1) * ranges[:, 1:]).clamp(max=LARGEST)
    return torch.where(blocks > 0, bits, 0).view(torch.float32)


def chance(count: int, seed: torch.Tensor, device: torch.device) -> torch.Tensor:
    """So many numbers from 0 to less than 1, float32, of 24 bits: a hash (murmur3's finalizer) of place and seed."""
    x = (torch.arange(count, device=device) * 0x9E3779B1 + seed) & 0xFFFFFFFF
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = ((x ^ (x >> shift)) * factor) & 0xFFFFFFFF
    return ((x ^ (x >> 16)) >> 8).float() * 2.0**-24


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of 256 values, the last filled up with zeros."""
    flat = values.flatten()
    return F.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _divide(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A / b, rounded once to float32; torch takes a faster way on some CPUs. float64 holds enough for that."""
    return (a.double() / b.double()).float()


def _root(a: torch.Tensor) -> torch.Tensor:
    """The square root, rounded once to float32."""
    return a.double().sqrt().float()


def _f32(number: float) -> float:
    """A number as a kernel gets it."""
    return torch.tensor(number, dtype=torch.float32).item()
