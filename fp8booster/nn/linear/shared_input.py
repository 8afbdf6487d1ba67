"""One cast for one input, however many layers of a module read it.

q, k and v projections read the same tensor, and so do gate and up. Each layer asks for the FP8 copy of the tensor
object it was given. The newest copy serves the other layers until another is made, the tensor dies, or the forward
that it was made in ends: that of the module that hooks opened it for (`nn.sharing`). Between two forwards whoever holds
the tensor may write to its memory, by `.data`, NumPy, DLPack or from another process, which no counter of torch's
tells. So a layer that runs by itself shares nothing, and one that reads a tensor again casts it again.

torch runs no hook where Ctrl-C or an exit ends a forward. So a forward counts only as long as it is on the stack.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch import nn

from fp8booster.kernels.device import current_stream
from fp8booster.nn.linear.exchange import Exchange
from fp8booster.nn.modules import LOOKS_AT_NOTHING
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT
from fp8booster.tensor import QuantizedMatrix


class _Newest:
    """The newest cast of one forward: what it was made from, the copy, and which layers have read it."""

    source: weakref.ref | None = None
    made_from: tuple | None = None
    quantized: QuantizedMatrix | None = None

    def __init__(self, module: nn.Module, caller: FrameType) -> None:
        self.module, self.caller = module, caller
        self.readers: set[object] = set()

    def forget(self, source: weakref.ref) -> None:
        if self.source is source:
            self.source = self.made_from = self.quantized = None

    def end(self) -> None:
        """Let go of all: the caller has what the forward was given, and the weak reference leads back here."""
        del self.caller
        self.source = self.made_from = self.quantized = None
        self.readers.clear()


class _Thread(threading.local):
    """Leads to objects that other threads reach too: the one that runs the backward often drops the source."""

    def __init__(self) -> None:
        self.forwards: list[_Newest] = []
        """Those that hooks have not ended, the innermost last."""


opened = _Thread()
"""Of this thread; where no forward is open, nothing is shared."""


def begin_forward(module: nn.Module, *_: Any) -> None:
    """Let the layers of a module share casts from now on; its forward pre-hook."""
    if not torch.compiler.is_compiling():
        caller = sys._getframe(1)  # it calls the forward too
        # drops what was interrupted before
        _innermost(caller)
        opened.forwards.append(_Newest(module, caller))


def end_forward(module: nn.Module, *_: Any) -> None:
    """Free what the layers of a module shared; its forward hook, also of a forward that raised."""
    if torch.compiler.is_compiling():
        return
    forwards = opened.forwards
    while forwards:
        newest = forwards.pop()
        newest.end()
        if newest.module is module:  # else it was interrupted
            return


def _innermost(frame: FrameType) -> _Newest | None:
    """Return the newest cast of the innermost forward that the code of a frame is in, and drop what was interrupted."""
    forwards = opened.forwards
    while forwards:
        around: FrameType | None = frame
        while around is not None:
            if around is forwards[-1].caller:
                return forwards[-1]
            around = around.f_back
        forwards.pop().end()
    return None


setattr(begin_forward, LOOKS_AT_NOTHING, True)
setattr(end_forward, LOOKS_AT_NOTHING, True)


def share_input(
    input: torch.Tensor, casts: Casts, *, reader: object, transposed: bool, exchange: Exchange | None = None
) -> QuantizedMatrix:
    """Return the FP8 copy of a layer's input: the newest of this forward if others read it from this very tensor.

    Args:
        input: [..., K].
        casts: the layer's, asked where no copy is there.
        reader: the layer, which gets a copy once.
        transposed: the transpose is needed too.
        exchange: of the layer; it may gather the input.
    """
    newest = _innermost(sys._getframe(1))
    if newest is None:
        return _cast(input, casts, transposed, exchange)
    made_from = (
        input.data_ptr(),
        input._version,
        casts.config.input_format,
        casts.scaling,
        current_stream(input),
        None if exchange is None else exchange.input_key,
    )
    if (
        newest.source is not None
        and newest.quantized is not None
        and newest.source() is input
        and newest.made_from == made_from
        and (newest.quantized.transpose.numel() or not transposed)
        # a layer that reads a tensor again may find values that were written unseen
        and reader not in newest.readers
    ):
        newest.readers.add(reader)
        return newest.quantized
    quantized = _cast(input, casts, transposed, exchange)
    newest.source = None  # its death, at any time, must not take the new copy
    newest.made_from, newest.quantized, newest.readers = made_from, quantized, {reader}
    newest.source = weakref.ref(input, newest.forget)
    return quantized


def _cast(input: torch.Tensor, casts: Casts, transposed: bool, exchange: Exchange | None) -> QuantizedMatrix:
    if exchange is None:
        return casts.quantize(INPUT, input, transposed=transposed)
    return exchange.input(input, casts, transposed=transposed)
