"""Linear layers whose weight is spread over ranks, with all three products in FP8 and FP8 between ranks.

One object a layer says what its ranks exchange (`nn.linear.exchange.Exchange`); `linear_from_quantized` takes it.

                        before fprop         after fprop               before dgrad, wgrad    beside wgrad
    ColumnParallel      -                    -                         -                      all-reduce dx
    RowParallel         -                    all-reduce y              -                      -
    SequenceColumn      gather x             -                         -                      reduce-scatter dx
    SequenceRow         -                    reduce-scatter y          gather dy              -

What is gathered is cast first, by the scale of the whole tensor, on which the ranks agree by one MAX reduction of their
amaxes. The products read the bytes that arrived, and the transposes that wgrad reads are made of them: every value is
rounded once, as in one process. What is reduced is sent by `fp8booster.comm`, with one scale a block.

The ring of sequence parallelism (Colossal-AI's mode "ring") gathers piece by piece, multiplying what is there; the
result is the same, and these classes serve it by one gather.

Shapes as in `nn.linear.functional`. In the sequence parallel ones x has the sequence in `dimension`, a part on each
rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from fp8booster import comm
from fp8booster.comm.encoding import DEFAULT, Encoding, Options
from fp8booster.comm.observer import observer
from fp8booster.comm.transport import gather_bytes
from fp8booster.kernels.scales import amax_of
from fp8booster.kernels.transpose import gathered_layouts
from fp8booster.nn.linear.exchange import Exchange
from fp8booster.nn.linear.functional import unaliased
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import delivered_amax
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT
from fp8booster.tensor import QuantizedMatrix

INPUT_GATHER = "sequence gather of inputs"
GRADIENT_GATHER = "sequence gather of gradients"
"""Rows of `fp8booster.comm.statistics`."""

_ROWS = {INPUT: INPUT_GATHER, OUTPUT_GRADIENT: GRADIENT_GATHER}

_GATHER = "all_gather_into_tensor"


def options_of(encoding: Encoding | None) -> Options:
    """Return the options of collectives that send by an encoding, or uncompressed, which they count."""
    # above any payload
    return {"encoding": encoding} if encoding is not None else {"min_bytes": 2**62}


class _Parallel(Exchange):
    """Base of the exchanges of a process group.

    Args:
        group: the ranks that hold the weight.
        dimension: of the input, in which a sequence that is spread lies; not the last.
        encoding: of the values that are sent in FP8; None sends the dtype of the tensors, counted as uncompressed.
    """

    def __init__(self, group: dist.ProcessGroup, dimension: int = 1, *, encoding: Encoding | None = DEFAULT) -> None:
        self.group, self.dimension, self.encoding = group, dimension, encoding
        self.ranks = dist.get_world_size(group)
        self.options = options_of(encoding)


class ColumnParallel(_Parallel):
    """The weight's output features are spread; each rank has the whole input."""

    def input_gradient(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Begin to sum over ranks."""
        # wgrad runs meanwhile, and needs nothing of this
        work = comm.all_reduce(gradient, group=self.group, async_op=True, **self.options)
        return partial(_waited_for, gradient, work)


class RowParallel(_Parallel):
    """The weight's input features are spread, and so are the input's. A bias is added after it, by the caller."""

    def output(self, output: Tensor) -> Tensor:
        """Sum over ranks."""
        output = unaliased(output)  # the sum takes its place
        comm.all_reduce(output, group=self.group, **self.options)
        return output


class _SequenceParallel(_Parallel):
    """Base of the exchanges along a sequence."""

    def _sequence(self, dimensions: int) -> int:
        sequence = self.dimension % dimensions
        if sequence == dimensions - 1:
            raise ValueError(
                f"the sequence lies in dimension {self.dimension} of {dimensions}, which is that of the features; give "
                "another"
            )
        return sequence

    def _gather(self, role: str, part: Tensor, casts: Casts, *, plain: bool, transposed: bool) -> QuantizedMatrix:
        """Gather a tensor of which each rank has a part of the sequence, in FP8, as a matrix of its last dimension."""
        matrix = part.detach().reshape(-1, part.shape[-1])
        if casts.scaling.granularity != "tensorwise" or self.encoding is None:
            # each layout of a matrix with finer scales is a cast of its own, which needs all of the matrix
            whole = self._gather_values(part)
            return casts.quantize(role, whole, plain=plain, transposed=transposed)
        # all ranks' bytes are one matrix for the product, so they have one scale, that of the whole
        amax = delivered_amax(part)
        amax = amax_of(matrix) if amax is None else amax.max()
        amax = amax.nan_to_num(nan=float("inf"), posinf=float("inf"))  # a MAX reduction drops NaN
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)
        data, _, inverse_scale, _ = casts.quantize(role, matrix, amax=amax)
        own = data[: matrix.shape[0]].view(torch.uint8)  # without the rows that fill up to 16
        gathered = own.new_empty((self.ranks, *own.shape))
        sent = {_GATHER: own.nbytes, "all_reduce": amax.nbytes}
        observer.count_encoded(_ROWS[role], self.ranks, part.nbytes, sent, _GATHER)
        gather_bytes(gathered.view(-1), own.reshape(-1), self.group)
        outer = part.shape[: self._sequence(part.dim())].numel()  # 1 where ranks' parts follow each other
        layouts = gathered_layouts(gathered, outer, plain=plain, transposed=transposed)
        data, transpose = (layout.view(data.dtype) for layout in layouts)
        return QuantizedMatrix(data, transpose, inverse_scale, None)

    def _gather_values(self, part: Tensor) -> Tensor:
        part = part.detach().contiguous()
        gathered = part.new_empty((self.ranks, *part.shape))
        comm.all_gather_into_tensor(gathered.view(-1), part.view(-1), self.group, **self.options)
        sequence = self._sequence(part.dim())
        return gathered.movedim(0, sequence).flatten(sequence, sequence + 1)

    def _reduce_scatter(self, whole: Tensor, *, asynchronous: bool) -> Callable[[], Tensor]:
        """Give each rank its part of the sequence of the sum over ranks, or begin to; return what waits for it."""
        sequence = self._sequence(whole.dim())
        length = whole.shape[sequence]
        if length % self.ranks:
            raise ValueError(
                f"a sequence of {length} does not divide by {self.ranks} ranks of sequence parallelism; pad it to a "
                "multiple"
            )
        parts = whole.unflatten(sequence, (self.ranks, length // self.ranks)).movedim(sequence, 0).contiguous()
        own = torch.empty_like(parts[0])
        work = comm.reduce_scatter_tensor(
            own.view(-1), parts.view(-1), group=self.group, async_op=asynchronous, **self.options
        )
        return partial(_waited_for, own, work)


def _waited_for(made: Tensor, work: dist.Work | None) -> Tensor:
    if work is not None:
        work.wait()
    return made


class SequenceColumn(_SequenceParallel):
    """The weight's output features are spread; each rank has a part of the input's sequence."""

    def __init__(self, group: dist.ProcessGroup, dimension: int = 1, *, encoding: Encoding | None = DEFAULT) -> None:
        super().__init__(group, dimension, encoding=encoding)
        self.growth = self.ranks  # the products read the whole sequence
        self.input_key = group, dimension, encoding  # layers of one group share what they gather

    def shape(self, input_shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of the gathered input."""
        sequence = self._sequence(len(input_shape))
        return (*input_shape[:sequence], input_shape[sequence] * self.ranks, *input_shape[sequence + 1 :])

    def input(self, input: Tensor, casts: Casts, *, transposed: bool) -> QuantizedMatrix:
        """Cast this rank's part of the sequence and gather those of all ranks."""
        return self._gather(INPUT, input, casts, plain=True, transposed=transposed)

    def input_gradient(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Begin to sum over ranks this rank's part."""
        return self._reduce_scatter(gradient, asynchronous=True)


class SequenceRow(_SequenceParallel):
    """The weight's input features are spread; each rank gets a part of the output's sequence.

    A bias is added after it, by the caller.
    """

    def output(self, output: Tensor) -> Tensor:
        """Return this rank's part of the sum over ranks."""
        return self._reduce_scatter(unaliased(output), asynchronous=False)()

    def output_gradient(self, gradient: Tensor, casts: Casts, *, plain: bool, transposed: bool) -> QuantizedMatrix:
        """Cast the gradient of this rank's part of the sequence and gather those of all ranks."""
        return self._gather(OUTPUT_GRADIENT, gradient, casts, plain=plain, transposed=transposed)
