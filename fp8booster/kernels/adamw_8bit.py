"""Adam's update with both moments in one byte a value, and a BF16 weight whose FP32 master is it and 16 bits more.

Every block of 256 consecutive values has its own range:

    first moment    code = round(sign(m) * root(16128 |m| / amax)), int8, as in `kernels.group_codes`
    second moment   code = 1 + round((bits(v) - least) / step), uint8; 0 for a moment of 0
    master weight   bits(master) = bits(BF16 weight) * 2^16 + low bits, minus 2^16 where BF16 rounded up

`bits` are those of a float32 as an integer, which grow as the logarithm does, but for straight lines between powers of
two. A block of second moments spans few octaves, so 254 steps of it err by half a percent. The second moment is rounded
up or down by chance, in proportion: with a beta2 of 0.999 a step changes it by less than half a code, and rounded to
nearest it would stay for ever. The error of m / sqrt(v), compared with other codes: benchmarks/results/cpu/moments.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from struct import Struct
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fp8booster.kernels.adamw import AdamRates, require_contiguous
from fp8booster.kernels.device import is_captured
from fp8booster.kernels.group_codes import decode_roots, encode_roots
from fp8booster.kernels.operators import operator

BLOCK = 256
"""Values that share a range."""

MOST_OCTAVES = 32  # of a block of second moments: what is smaller counts as the least of it, so that steps stay fine
STEPS = 254  # of second moments, from the least to the largest of a block: code 0 is a moment of 0
LARGEST = 0x7F7FFFFF  # bits of the largest finite float32: one code too many must not decode to infinity
NAN = 0x7FC00000

SEED, AMAX, INVERSE, GRADIENT = 3, 4, 5, 6
"""Places in a row of `step_rows`."""

_ROW = Struct("=3fi2fq")  # such a row: the seed is a 32-bit integer, the address of the gradient one of 64 bits

_AT_ONCE = 2**16  # values updated at a time, a multiple of a block's: they stay in a processor's cache


class Moments8bit(NamedTuple):
    """Both moments of a tensor of n values, in blocks = ceil(n / 256)."""

    first: Tensor
    """int8 [n]."""

    amaxes: Tensor
    """float32 [blocks]: the largest magnitude of each block of first moments."""

    second: Tensor
    """uint8 [n]."""

    ranges: Tensor
    """int32 [blocks, 2]: of each block of second moments the bits of the least that is not 0, and the step."""

    @classmethod
    def zeros(cls, count: int, device: torch.device) -> Moments8bit:
        """Return moments of 0 for so many values."""
        blocks = -(-count // BLOCK)
        return cls(
            torch.zeros(count, dtype=torch.int8, device=device),
            torch.zeros(blocks, dtype=torch.float32, device=device),
            torch.zeros(count, dtype=torch.uint8, device=device),
            torch.zeros(blocks, 2, dtype=torch.int32, device=device),
        )


class Shards8bit(NamedTuple):
    """Tensors of one device: the i-th of each list belong together. [n_i], contiguous."""

    values: Sequence[Tensor]
    """The weights, FP32, or BF16 with `lows`."""

    lows: Sequence[Tensor | None]
    """int16, of FP32 masters what BF16 weights lack; None for an FP32 weight."""

    gradients: Sequence[Tensor]
    """BF16, FP16 or FP32."""

    moments: Sequence[Moments8bit]

    steps: Sequence[int]
    """How many each has taken, this one included."""

    numbers: Sequence[int]
    """Of each, one that no other has: it seeds chance."""

    def part(self, begin: int, end: int) -> Shards8bit:
        """Return the tensors from one place to another."""
        here = slice(begin, end)
        return Shards8bit(
            self.values[here],
            self.lows[here],
            self.gradients[here],
            self.moments[here],
            self.steps[here],
            self.numbers[here],
        )

    def require_updatable(self) -> None:
        """Raise ValueError where `update_8bit` cannot update a weight."""
        for value, low in zip(self.values, self.lows, strict=True):
            if value.dtype != (torch.float32 if low is None else torch.bfloat16):
                raise ValueError(f"a weight is {value.dtype}; give FP32, or BF16 with the low bits of its master")
        require_contiguous(chain(self.values, self.gradients))


@operator()
def update_8bit(shards: Shards8bit, rates: AdamRates, skipped: Tensor, divisor: Tensor | None = None) -> Tensor:
    """Take one step of Adam (Kingma and Ba, algorithm 1) or AdamW (Loshchilov and Hutter, algorithm 2) in place.

    The update is computed in FP32 from moments that are not yet rounded, each operation rounded by itself. A block
    with a gradient that is not finite keeps its values and moments, bit for bit; all do where the divisor is not
    finite.

    Args:
        shards: one or more; values, low bits and moments are written.
        rates: of the step; `lr` as a number.
        skipped: int32 []; the number of blocks that were left as they are is added.
        divisor: float32 [] on their device; gradients are divided by it first. None: they are not.

    Returns:
        float32 [shards]: the largest magnitude among the new values of each; 0 of an empty one.

    Raises:
        ValueError: a tensor's values lie apart, or a weight is FP16.
    """
    shards.require_updatable()
    rows = step_rows(shards, rates, divisor)
    for value, low, gradient, moments, row in zip(*shards[:4], rows, strict=True):
        _update_shard(value, low, gradient, moments, row, rates, skipped)
    return rows[:, AMAX]


def _update_shard(
    value: Tensor,
    low: Tensor | None,
    gradient: Tensor,
    moments: Moments8bit,
    row: Tensor,
    rates: AdamRates,
    skipped: Tensor,
) -> None:
    """`update_8bit` of one tensor, with its row, which takes the amax."""
    flat = [None if each is None else each.flatten() for each in (value, low, gradient, moments.first, moments.second)]
    largest = torch.zeros((), dtype=torch.float32, device=value.device)
    for begin in range(0, value.numel(), _AT_ONCE):
        value_part, low_part, gradient_part, first, second = (
            None if each is None else each[begin : begin + _AT_ONCE] for each in flat
        )
        blocks = slice(begin // BLOCK, (begin + _AT_ONCE) // BLOCK)
        part = Moments8bit(first, moments.amaxes[blocks], second, moments.ranges[blocks])
        _update_part(value_part, low_part, gradient_part, part, row, rates, skipped, begin)
        largest = torch.maximum(largest, value_part.abs().max())
    row[AMAX] = largest


def _update_part(
    value: Tensor,
    low: Tensor | None,
    gradient: Tensor,
    moments: Moments8bit,
    row: Tensor,
    rates: AdamRates,
    skipped: Tensor,
    begin: int,
) -> None:
    """`_update_shard` of some whole blocks, flat, the first of which begins at `begin` in the tensor."""
    decay, step_size, inverse_root, inverse_divisor = row[[0, 1, 2, INVERSE]]
    g = in_blocks(gradient.float() * inverse_divisor)
    w = in_blocks(value if low is None else master_of(value, low))
    m, v = decode_first(moments.first, moments.amaxes), decode_second(moments.second, moments.ranges)
    m, v = next_moments(w, g, m, v, row, rates)
    if rates.decoupled:
        w = w - decay * w
    w = w - _divide(step_size * m, _root(v) * inverse_root + _f32(rates.denominator_eps()))

    # a block with an infinity would spoil its range, and so all its moments, for many steps
    kept = left_blocks(g, row)
    skipped += kept.sum(dtype=torch.int32)
    first, amaxes = encode_roots(m)
    second, ranges = encode_second(v, row[SEED].view(torch.int32), begin)
    weight, rest = (w, None) if low is None else split(w)
    some_are_kept = bool(kept.any())
    for old, new, of_block in (
        (moments.amaxes, amaxes, 1),
        (moments.ranges, ranges, 2),
        (moments.first, first, BLOCK),
        (moments.second, second, BLOCK),
        (value, weight, BLOCK),
        (low, rest, BLOCK),
    ):
        if old is not None:
            new = new.flatten()[: old.numel()].view_as(old)
            if some_are_kept:
                new = torch.where(kept.repeat_interleave(of_block)[: old.numel()].view_as(old), old, new)
            old.copy_(new)


def next_moments(w: Tensor, g: Tensor, m: Tensor, v: Tensor, row: Tensor, rates: AdamRates) -> tuple[Tensor, Tensor]:
    """Return both moments after a step, not yet rounded.

    Args:
        w, g, m, v: weight, gradient and moments before it, float32 [blocks, 256]; the gradient is divided.
        row: of the tensor, from `step_rows`.
        rates: as `update_8bit` takes them.
    """
    beta1, beta2 = rates.betas
    if not rates.decoupled:
        g = g + row[0] * w
    # factors and their order as the kernel has them, which rounds each product
    m = _f32(beta1) * m + _f32(1 - beta1) * g
    return m, _f32(beta2) * v + (_f32(1 - beta2) * g) * g


def left_blocks(g: Tensor, row: Tensor) -> Tensor:
    """Tell which blocks a step leaves as they are, for their gradients are not finite: bool [blocks]."""
    return ~(g.isfinite().all(dim=1) & (row[INVERSE] > 0))


def step_rows(shards: Shards8bit, rates: AdamRates, divisor: Tensor | None = None) -> Tensor:
    """Return the numbers of a step that differ between tensors: float32 [shards, 8] on their device.

    A row holds the factor of weight decay, the step size lr / (1 - beta1^t), 1 / the root of 1 - beta2^t, the bits of
    a seed for chance, which differs between steps and tensors, a zero, where the amax comes, 1 / the divisor, and the
    address of the gradient, of 64 bits, which kernels read. It takes 32 bytes, so that each begins at a multiple of 16.

    Args:
        shards, rates, divisor: as `update_8bit` takes them.

    Raises:
        RuntimeError: a CUDA graph is captured.
    """
    device, steps = shards.values[0].device, shards.steps
    if is_captured(shards.values[0]):
        raise RuntimeError(
            "a CUDA graph would repeat one step's numbers, which the host makes for an update with 8-bit moments; "
            "capture forward and backward, and call the optimizer's step outside"
        )
    # by Python's floats, of 64 bits, and rounded once
    decay = rates.lr * rates.weight_decay if rates.decoupled else rates.weight_decay
    # few numbers of steps, mostly one, for many tensors
    factors = {t: (rates.lr / (1 - rates.betas[0] ** t), (1 - rates.betas[1] ** t) ** -0.5) for t in set(steps)}
    # pinned: the host must not wait, for it comes here for each bucket within backward
    rows = torch.empty(len(steps), 8, dtype=torch.float32, device="cpu", pin_memory=device.type == "cuda")
    filled = rows.numpy()  # a buffer, into which a row is packed for less than a tensor of numbers takes
    addresses = map(Tensor.data_ptr, shards.gradients)
    for place, (t, number, address) in enumerate(zip(steps, shards.numbers, addresses, strict=True)):
        # odd multipliers of large spread: neighbouring steps and tensors draw unlike numbers
        seed = (t * 0x9E3779B1 + number * 0x85EBCA77) & 0x7FFFFFFF
        _ROW.pack_into(filled, place * _ROW.size, decay, *factors[t], seed, 0.0, 1.0, address)
    rows = rows.to(device, non_blocking=True)
    if divisor is not None:
        rows[:, INVERSE] = divisor.reciprocal()
    return rows


def split(master: Tensor) -> tuple[Tensor, Tensor]:
    """Return FP32 values as BF16, rounded half away from zero, and the low 16 bits of the FP32 values as int16."""
    # the low bits tell how it was rounded, which half to even would not; a NaN's own bits might round to an infinity's
    bits = torch.where(master.isnan(), NAN, master.view(torch.int32))
    rounded = ((bits + 0x8000) >> 16).to(torch.int16)
    return rounded.view(torch.bfloat16), bits.to(torch.int16)


def master_of(value: Tensor, low: Tensor) -> Tensor:
    """Return the FP32 values that `split` was given, flattened."""
    # low bits of half a unit or more tell that it rounded up
    high = value.flatten().view(torch.int16).to(torch.int32)
    low = low.to(torch.int32)
    # but not to 0: somebody has set that weight since, as a mask does, and it is 0
    low = torch.where(high & 0x7FFF == 0, low.clamp(min=0), low)
    return ((high - (low < 0).to(torch.int32)) * 65536 + (low & 0xFFFF)).view(torch.float32)


def decode_first(code: Tensor, amaxes: Tensor) -> Tensor:
    """Return the first moments of int8 [n] codes, in blocks: float32 [blocks, 256]."""
    return decode_roots(in_blocks(code), amaxes)


def encode_second(v: Tensor, seed: Tensor | None, begin: int = 0) -> tuple[Tensor, Tensor]:
    """Encode second moments, float32 [blocks, 256], not negative, as uint8 codes and int32 [blocks, 2] ranges.

    Args:
        v: the moments.
        seed: int32 [], of chance; None rounds to nearest, and what was decoded comes back the same, but for blocks that
            hold the largest number.
        begin: where the first of them is in its tensor, for chance.
    """
    bits = v.view(torch.int32).clamp(max=LARGEST)  # so that a moment that overflowed decays again
    largest = bits.amax(dim=1)
    least = torch.where(bits > 0, bits, LARGEST).amin(dim=1)
    # 2^23 bits an octave; a block of zeros alone has the least above the largest
    least = torch.minimum(torch.maximum(least, largest - (MOST_OCTAVES << 23)), largest)
    # rounded up, so that the largest has a code
    step = ((largest - least + STEPS - 1) // STEPS).clamp(min=1)
    if seed is None:
        least, step = _range_of_decoded(bits, least, step)
    above = (bits - least[:, None]).clamp(min=0).float() * _divide(torch.ones_like(step), step)[:, None]
    if seed is not None:
        # minus a half, for it is rounded to nearest below: up as often as it lies above a code
        above = above + (chance(v.numel(), seed, v.device, begin).view_as(v) - 0.5)
    code = above.clamp(max=STEPS).round() + 1
    return torch.where(bits > 0, code, 0).to(torch.uint8), torch.stack([least, step], dim=1)


def _range_of_decoded(bits: Tensor, least: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """Return least bits and step by which each of a block's moments, int32 [blocks, 256], is that of a code.

    Args:
        bits: of the moments.
        least, step: returned where no others are exact, for moments that were never decoded.
    """
    # the greatest common divisor of the distances is a step that meets all of them
    first = torch.where(bits > 0, bits, LARGEST).amin(dim=1)
    common = torch.where(bits > 0, bits - first[:, None], 0)
    while common.shape[1] > 1:
        common = torch.gcd(*common.chunk(2, dim=1))
    common = common[:, 0]
    exact = (common > 0) & (bits.amax(dim=1) - first <= common.long() * STEPS)
    return torch.where(exact, first, least), torch.where(exact, common, step)


def decode_second(code: Tensor, ranges: Tensor) -> Tensor:
    """Return the second moments of uint8 [n] codes, in blocks: float32 [blocks, 256]."""
    blocks = in_blocks(code.to(torch.int32))
    bits = (ranges[:, :1] + (blocks - 1) * ranges[:, 1:]).clamp(max=LARGEST)
    return torch.where(blocks > 0, bits, 0).view(torch.float32)


def chance(count: int, seed: Tensor, device: torch.device, begin: int = 0) -> Tensor:
    """Return so many numbers from 0 to less than 1, float32, of 23 bits: murmur3's finalizer of place and seed."""
    # a hash, not a generator: kernel and definition draw the same in any order, and so does a resumed run.
    # Integers of 32 bits wrap; the bits that an arithmetic shift brings in are masked out.
    x = (
        torch.arange(count, dtype=torch.int32, device=device)
        .add_(_wrapped(begin))
        .mul_(_wrapped(0x9E3779B1))
        .add_(seed)
    )
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= (x >> shift) & (0xFFFFFFFF >> shift)
        x *= _wrapped(factor)
    return (((x ^ ((x >> 16) & 0xFFFF)) >> 9) & 0x7FFFFF).float() * 2.0**-23


def _wrapped(number: int) -> int:
    """Return a number's low 32 bits as those of an int32."""
    return (number + 2**31) % 2**32 - 2**31


def in_blocks(values: Tensor) -> Tensor:
    """Return a tensor as rows of 256 values, the last filled up with zeros."""
    flat = values.flatten()
    return F.pad(flat, (0, -len(flat) % BLOCK)).view(-(-len(flat) // BLOCK), BLOCK)


def _divide(a: Tensor, b: Tensor) -> Tensor:
    """Return a / b, rounded once to float32."""
    # torch takes a faster way on some CPUs; a quotient in float64 holds enough bits to round the same as the exact one
    return (a.double() / b.double()).float()


def _root(a: Tensor) -> Tensor:
    """Return the square root, rounded once to float32."""
    return a.double().sqrt().float()


def _f32(number: float) -> float:
    """Return a number as a kernel gets it, of float32's 24 bits."""
    return torch.tensor(number, dtype=torch.float32, device="cpu").item()
