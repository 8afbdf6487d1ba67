"""One cast for one input, however many layers read it.

q, k and v projections read the same tensor, and so do gate and up. Each layer asks for the FP8 copy of the tensor
object it was given; the newest copy of this thread is kept until another is made or the tensor dies, so at most one
input's FP8 copy outlives its use.
"""

from __future__ import annotations

import threading
import weakref

import torch

from fp8booster.config import FP8Config
from fp8booster.kernels.device import current_stream
from fp8booster.nn.linear.exchange import NO_EXCHANGE, Exchange
from fp8booster.nn.weights.casting import REAL_TIME, Casts
from fp8booster.tensor import QuantizedMatrix


class _Newest:
    """The newest cast of one thread: what it was made from, and the copy."""

    source: weakref.ref | None = None
    made_from: tuple | None = None
    quantized: QuantizedMatrix | None = None

    def forget(self, source: weakref.ref) -> None:
        if self.source is source:
            self.source = self.made_from = self.quantized = None


class _Thread(threading.local):
    """Leads to an object that other threads reach too: the one that runs the backward often drops the source."""

    def __init__(self) -> None:
        self.newest = _Newest()


_thread = _Thread()


def share_input(
    input: torch.Tensor,
    config: FP8Config,
    *,
    transposed: bool,
    exchange: Exchange = NO_EXCHANGE,
    casts: Casts = REAL_TIME,
) -> QuantizedMatrix:
    """The FP8 copy of a layer's input, the newest one if it was made from this very tensor, unchanged.

    Args:
        input: [..., K].
        config: the input's format and scaling.
        transposed: the transpose is needed too.
        exchange: what ranks exchange around the layer; it may gather the input.
        casts: the layer's, asked where no copy is there.
    """
    made_from = (
        input._version,
        config.input_format,
        config.granularity,
        config.power_of_two,
        config.scaling,
        current_stream(input),
        exchange.input_key,
    )
    newest = _thread.newest
    if (
        newest.source is not None
        and newest.quantized is not None
        and newest.source() is input
        and newest.made_from == made_from
        and (newest.quantized.transpose.numel() or not transposed)
    ):
        return newest.quantized
    quantized = exchange.input(input, config, transposed=transposed, casts=casts)
    newest.source = None  # its death, at any time, must not take the new copy
    newest.made_from, newest.quantized = made_from, quantized
    newest.source = weakref.ref(input, newest.forget)
    return quantized
