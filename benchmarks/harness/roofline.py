"""Floors: what a product or a cast takes at least on this GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.harness.environment import Gpu
from benchmarks.harness.timing import Timing, Variant

COPY_BYTES = {"cuda": 2**30, "cpu": 2**20}
"""Size of the copy that measures bandwidth: on a GPU far beyond any cache."""


class CopyBandwidth:
    """The device's own copy, to be timed interleaved with what it is the ceiling of."""

    def __init__(self, device: torch.device) -> None:
        size = COPY_BYTES[device.type]
        source = torch.ones(size // 2, dtype=torch.bfloat16, device=device)
        target = torch.empty_like(source)
        # not in a graph, where the copy engine would copy, at two thirds of the speed
        self.variant = Variant("copy", lambda _: target.copy_(source))
        self._bytes = 2 * size

    def bytes_per_second(self, timings: dict[str, Timing]) -> float:
        """Bytes read and written a second."""
        return self._bytes / (timings[self.variant.name].ms.median * 1e-3)


def cast_bytes(elements: int, *, amax_given: bool, layouts: int, bytes_in: int = 2) -> int:
    """Fewest bytes that a real-time cast to FP8 moves.

    It reads the tensor for its amax, unless that is given, reads it again to cast it, and writes each layout once. A
    cache that holds part of the tensor between the two reads can beat this.

    Args:
        elements: of the tensor.
        amax_given: the producer delivers the amax.
        layouts: 1 for the cast, 2 with the transpose; 0 for the amax alone, which is one read.
        bytes_in: bytes of an element as it is read.
    """
    reads = 1 if amax_given or layouts == 0 else 2
    return elements * (reads * bytes_in + layouts)


@dataclass(frozen=True)
class ProductFloor:
    """The roofline of products: arithmetic at the tensor cores' peak, or bytes at the copy bandwidth."""

    gpu: Gpu
    bytes_per_second: float

    def ms(self, rows: int, inner: int, columns: int, precision: str) -> float:
        """Fewest milliseconds of [rows, inner] by [inner, columns] to BF16; by bytes alone if the peak is unknown."""
        operand_bytes = {"BF16": 2, "FP8": 1}[precision]
        moved = operand_bytes * inner * (rows + columns) + 2 * rows * columns
        peak = self.gpu.peak_flops(precision)
        arithmetic = 0.0 if peak is None else 2 * rows * inner * columns / peak
        return 1e3 * max(arithmetic, moved / self.bytes_per_second)
