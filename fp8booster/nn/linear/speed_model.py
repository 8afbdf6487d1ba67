"""Tell whether FP8 pays for a layer of a given size on a given GPU: a model of the time its products and casts take.

    BF16   three products
    FP8    three faster products, and the casts of input and output gradient, each read twice and written twice

A small layer spends more on its casts than its products gain. Weights are cast once per optimizer step and left out.
The rates were measured as `benchmarks/results` shows; on a GPU without measured rates every layer computes in FP8.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from fp8booster.config import FP8Config

CAST_BYTES = 6
"""Bytes that a cast moves for each 16-bit element: read for the amax, read again, written in two layouts."""


@dataclass(frozen=True)
class Rates:
    """The rates at which a GPU does the parts of a linear layer."""

    bf16: float
    """BF16 products, operations a second."""

    fp8: float
    """FP8 products, operations a second."""

    cast: float
    """Casts, bytes a second."""

    product_overhead: float
    """Seconds that a product costs however small it is."""

    cast_overhead: float
    """Seconds that the two casts cost however small they are."""


MEASURED = {(9, 0): Rates(bf16=720e12, fp8=1330e12, cast=3.0e12, product_overhead=4e-6, cast_overhead=10e-6)}
"""By compute capability. Fitted to 72 layers of 512 to 16384 features and 1024 to 16384 tokens, timed on an H200
without the host's part (benchmarks/results/h200/choice.md): the model is on the right side of 1 for each of them."""


def speedup(rows: int, inputs: int, outputs: int, rates: Rates) -> float:
    """Return how much faster a layer's forward and backward are in FP8 than in BF16, by the model.

    Args:
        rows: tokens.
        inputs, outputs: features.
        rates: of the GPU.
    """
    operations = 2 * rows * inputs * outputs
    bf16 = 3 * (operations / rates.bf16 + rates.product_overhead)
    fp8 = 3 * (operations / rates.fp8 + rates.product_overhead)
    casts = CAST_BYTES * rows * (inputs + outputs) / rates.cast + rates.cast_overhead
    return bf16 / (fp8 + casts)


def fp8_pays(rows: int, inputs: int, outputs: int, device: torch.device) -> bool:
    """Tell whether a layer of this size is faster in FP8 on this device, as far as its rates are known."""
    # a compiler traces through the look-up, and would warn of the cache
    rates = measured_rates(device) if torch.compiler.is_compiling() else _looked_up(device)
    return rates is None or speedup(rows, inputs, outputs, rates) > 1


def measured_rates(device: torch.device) -> Rates | None:
    """Return the rates of a device; None where they were not measured."""
    return MEASURED.get(torch.cuda.get_device_capability(device)) if device.type == "cuda" else None


def computes_in_fp8(config: FP8Config, rows: int, inputs: int, outputs: int, device: torch.device) -> bool:
    """Tell whether a layer computes in FP8: where that pays, or is asked for, or no 16-bit weight is kept.

    Args:
        config: of the layer.
        rows: tokens.
        inputs, outputs: features.
        device: that of the weight.
    """
    return config.always or config.emulate or not config.keeps_high_precision or fp8_pays(rows, inputs, outputs, device)


_looked_up = functools.cache(measured_rates)

MOST_TOKEN_COUNTS = 1024
"""Counts that a layer remembers. Experts meet another one in nearly every step, a whole training run millions."""


class TokenCounts(dict[int, bool]):
    """For each token count, whether the products ran in FP8; of the first `MOST_TOKEN_COUNTS` that are met."""

    def __setitem__(self, rows: int, in_fp8: bool) -> None:
        if len(self) < MOST_TOKEN_COUNTS or rows in self:
            super().__setitem__(rows, in_fp8)

    @property
    def note(self) -> str:
        """Return what a list of them leaves out, for its end."""
        return f", of the first {MOST_TOKEN_COUNTS} token counts" if len(self) == MOST_TOKEN_COUNTS else ""
