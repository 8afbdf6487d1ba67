"""Samples the errors of casts on the device, and brings them to rank 0 when the host has to wait for nothing.

    a sampled step        each cast leaves sums of its tensor on the device (`kernels.cast_statistics`)
    when it ends          they are copied to the host, which goes on
    when the next ends    they have arrived: other ranks leave theirs in the process group's store, and rank 0 writes
                          the tensors of all

In each step the scales of inputs and gradients, which exist anyway, are remembered: one that is no number tells where a
step went bad.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from fp8booster.kernels.alignment import BLOCK
from fp8booster.kernels.blockwise_cast import scales_of_groups
from fp8booster.kernels.cast_statistics import cast_statistics
from fp8booster.kernels.code_statistics import MomentSample, SumSample, activation_statistics
from fp8booster.kernels.device import is_captured
from fp8booster.kernels.group_codes import GroupCodes
from fp8booster.kernels.message_layout import MessageLayout, side_by_side
from fp8booster.mailbox import Mailbox
from fp8booster.monitor.scales import FORMAT_NAMES, MOMENTS, SAVED, SUM, Key, Totals, merged, row_of
from fp8booster.monitor.sinks import Sink
from fp8booster.monitor.watchdog import Warnings, Watchdog
from fp8booster.reading import first_of
from fp8booster.tensor import QuantizedMatrix

PATIENCE = 120.0
"""Seconds that rank 0 waits for what another rank has sampled in a step that it has taken."""

_made = itertools.count()


class _Sampled(NamedTuple):
    """One cast of a sampled step."""

    key: Key
    values: int
    parts: torch.Tensor
    inverse_scale: torch.Tensor
    """[], the largest."""
    stream: torch.cuda.Stream | None


class _Copied(NamedTuple):
    """A sampled step on its way to the host."""

    step: int
    keys: list[tuple[Key, int]]
    tables: list[torch.Tensor]
    """Of each device, on the host: float64 [casts, figures]."""
    arrived: list[torch.cuda.Event]


class Seen(NamedTuple):
    """A cast of the step that is being taken."""

    layer: str
    role: str
    inverse_scale: torch.Tensor


class Recorder:
    """The record of a rank. All ranks make one alike, and end their steps alike.

    Args:
        every: steps from one that is sampled to the next; the first is sampled too.
        sinks: rank 0 writes to them.
        header: their first line.
        done: steps that are taken already.
        rules: thresholds of warnings.
        warn: takes the warnings, on rank 0.
    """

    def __init__(
        self,
        every: int,
        sinks: Sequence[Sink],
        header: Mapping[str, Any],
        done: int,
        rules: Watchdog,
        warn: Callable[[str], object],
    ) -> None:
        self.step = done + 1
        """The one that is being taken."""
        self.seen: list[Seen] = []
        """Casts of inputs and gradients in this step, in their order."""
        self._every, self._sinks, self._warn = every, list(sinks), warn
        self._warnings = Warnings(rules)
        self._sampled: list[_Sampled] = []
        self._saved: list[tuple[int, torch.Tensor]] = []
        self._copied: _Copied | None = None
        self.rank, self.ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # recordings have numbers, alike on all ranks
        name = f"scales {next(_made)}"
        self.box = None if self.ranks == 1 else Mailbox(dist.distributed_c10d._get_default_group(), name, deletes=False)
        """Through which ranks give the first one their figures."""
        if self.rank == 0:
            held = [sink.begin(dict(header), done) for sink in self._sinks]
            # what was warned of before a run was resumed is known, and each weight's course
            resumed = next((each for each in held if each is not None and each.rows), None)
            if resumed is not None:
                self._warnings.resume(resumed.rows, resumed.since)

    @property
    def is_sampling(self) -> bool:
        """Tell whether this step is sampled."""
        return self.step == 1 or self.step % self._every == 0

    def note(self, layer: str, role: str, values: torch.Tensor, quantized: QuantizedMatrix, remember: bool) -> None:
        """Note a cast.

        Args:
            layer, role: of the tensor.
            values: [..., C].
            quantized: what was made of it.
            remember: in each step, for `seen`.
        """
        if remember:
            self.seen.append(Seen(layer, role, quantized.inverse_scale))
        if not self.is_sampling:
            return
        if role == "input":  # the layer whose input is cast next names what was saved
            for count, figures in self._saved:
                self._sample_codes((layer, SAVED, "int8"), count, figures)
            self._saved = []
        matrix = values.detach().reshape(-1, values.shape[-1])
        if quantized.data.numel() and quantized.has_factors:
            matrix, data, inverse_scale = matrix.t(), quantized.data.t(), quantized.scale_of_transpose()
        elif quantized.data.numel():
            data, inverse_scale = quantized.data, quantized.inverse_scale
        else:
            matrix, data, inverse_scale = matrix.t(), quantized.transpose, quantized.scale_of_transpose()
        if inverse_scale.dim() == 2:
            inverse_scale = scales_of_groups(data, inverse_scale)
        self.sample(layer, role, matrix, data, inverse_scale)

    def sample(
        self, layer: str, role: str, matrix: torch.Tensor, data: torch.Tensor, inverse_scale: torch.Tensor
    ) -> None:
        """Leave a cast's figures on the device; arguments as in `cast_statistics`."""
        if inverse_scale.dim():
            inverse_scale = inverse_scale[: matrix.shape[0]]
        parts = cast_statistics(matrix, data, inverse_scale)
        key = layer, role, FORMAT_NAMES[str(data.dtype)]
        self._sampled.append(_Sampled(key, matrix.numel(), parts, _largest(data, inverse_scale), _stream(parts)))

    def note_saved(self, values: torch.Tensor, codes: GroupCodes) -> None:
        """Note a matrix [M, K] that was saved for backward in 8 bits; the layer whose input is cast next names it."""
        # figures of a capture would lie in the graph's memory, which replays write to
        if self.is_sampling and not is_captured(values):
            self._saved.append(activation_statistics(values.detach(), codes))

    def note_moments(self, layer: str, sample: MomentSample) -> None:
        """Note that a step has encoded both moments of a parameter in 8 bits."""
        for role, format, (count, figures) in zip(MOMENTS, ("int8", "uint8"), sample.statistics(), strict=True):
            self._sample_codes((layer, role, format), count, figures)

    def note_sum(self, layer: str, sample: SumSample) -> None:
        """Note a gradient that was added to those of a parameter in 8 bits."""
        self._sample_codes((layer, SUM, "int8"), *sample.statistics())

    def _sample_codes(self, key: Key, count: int, figures: torch.Tensor) -> None:
        none = figures.new_zeros((), dtype=torch.float32)  # such codes have a scale for each group of values
        self._sampled.append(_Sampled(key, count, figures[None], none, _stream(figures)))

    def note_message(
        self,
        name: str,
        values: Callable[[], torch.Tensor | Sequence[torch.Tensor]],
        message: torch.Tensor,
        layout: MessageLayout,
        dtype: torch.dtype,
    ) -> None:
        """Note a cast for a message; arguments as in `comm.encoding.Observer`."""
        # a capture's messages have no values yet
        if not self.is_sampling or is_captured(message):
            return
        given = values()
        flat = (given if isinstance(given, torch.Tensor) else side_by_side(given, layout.pieces)).view(-1)
        if not layout.bytes:
            return
        written = message.view(layout.pieces, layout.piece_bytes)
        # pieces that are whole, and the one that values end in
        whole, left = divmod(flat.numel(), layout.count)
        for begin, end, count in ((0, whole, layout.count), (whole, whole + 1, left)):
            if begin == end or not count:
                continue
            parts = flat[begin * layout.count : begin * layout.count + (end - begin) * count].view(-1, count)
            data, scales = written[begin:end].tensor_split([layout.payload_bytes], 1)
            scales, block = scales.contiguous().view(torch.float32), layout.block_size or layout.count
            # blocks of one size are rows of a matrix, each with a scale of its own; the last of a piece may be shorter
            in_blocks = count // block * block
            for first, last in ((0, in_blocks), (in_blocks, count)):
                if first < last:
                    columns = min(block, last - first)
                    rows = parts[:, first:last].reshape(-1, columns)
                    cast = data[:, first:last].contiguous().view(dtype).view(-1, columns)
                    number = (last - first) // columns
                    of_rows = scales[:, first // block :][:, :number].reshape(-1)
                    self.sample(name, "message", rows, cast, of_rows)

    def end_step(self) -> None:
        """End a step: write the sample before, and begin to copy that of this step to the host."""
        # a step late, when the copy is over: the host waits for nothing
        self._write_copied(PATIENCE)
        if self.is_sampling:
            self._copied = self._copy()
        self._sampled, self._saved = [], []
        self.seen = []
        self.step += 1

    def flush(self) -> None:
        """Write the sample that is on its way; the host waits for the device."""
        self._write_copied(PATIENCE)

    def close(self, patience: float = PATIENCE) -> None:
        """Write the sample that is on its way; a step that is not over is left out."""
        self._write_copied(patience)
        self._sampled, self._saved, self.seen = [], [], []
        if self.rank == 0:
            for sink in self._sinks:
                sink.close()

    def _copy(self) -> _Copied:
        by_device: dict[torch.device, list[_Sampled]] = {}
        for sampled in self._sampled:
            by_device.setdefault(sampled.parts.device, []).append(sampled)
        copied = _Copied(self.step, [], [], [])
        for device, casts in by_device.items():
            if device.type == "cuda":
                _let_read(device, casts)
            table = _table(casts)
            copied.keys.extend((each.key, each.values) for each in casts)
            if device.type == "cuda":
                # to pinned memory alone a copy leaves the host free
                host = torch.empty(table.shape, dtype=table.dtype, device="cpu", pin_memory=True)
                host.copy_(table, non_blocking=True)
                copied.arrived.append(torch.cuda.current_stream(device).record_event())
                table = host
            copied.tables.append(table)
        return copied

    def _write_copied(self, patience: float) -> None:
        copied, self._copied = self._copied, None
        if copied is None:
            return
        for event in copied.arrived:
            event.synchronize()  # long over: the host is a step ahead at most
        rows = itertools.chain.from_iterable(table.numpy() for table in copied.tables)
        own: dict[Key, Totals] = {}
        for (key, count), (amax, *sums, inverse_scale) in zip(copied.keys, rows, strict=True):
            totals = Totals._make((float(amax), float(inverse_scale), count, *map(float, sums), 1))
            own[key] = own[key].merged(totals) if key in own else totals
        everyone = self._of_all_ranks(copied.step, own, patience)
        if self.rank == 0:
            written = [row_of(copied.step, key, totals) for key, totals in merged(everyone).items()]
            for sink in self._sinks:
                sink.write(written)
            for sentence in self._warnings.of(written):
                self._warn(sentence)

    def _of_all_ranks(self, step: int, own: dict[Key, Totals], patience: float) -> list[Mapping[Key, Totals]]:
        """Return the totals of each rank, on rank 0."""
        if self.box is None:
            return [own]
        if self.rank:
            self.box.leave(step, {name: tuple(totals) for name, totals in own.items()})
            return []
        others, late = self.box.collect(step, patience)
        if late:
            ranks = first_of(list(map(str, late)))
            self._warn(f"The records of step {step} lack what rank {ranks} sampled, which did not come.")
        return [own, *({name: Totals(*values) for name, values in each.items()} for each in others.values())]


def _stream(made: torch.Tensor) -> torch.cuda.Stream | None:
    """Return the stream on which figures are made."""
    return torch.cuda.current_stream(made.device) if made.is_cuda else None


def _largest(data: torch.Tensor, inverse_scale: torch.Tensor) -> torch.Tensor:
    """Return the largest inverse scale of values that are not zero, []; the scale of zeros is 1, and tells nothing."""
    if inverse_scale.dim() == 0:
        return inverse_scale
    is_nonzero = data[: len(inverse_scale)].view(torch.uint8).bitwise_and(0x7F) != 0
    if inverse_scale.dim() == 2:
        is_nonzero = is_nonzero.unflatten(1, (-1, BLOCK))
    return torch.where(is_nonzero.any(-1), inverse_scale, 0.0).amax()


def _let_read(device: torch.device, casts: Sequence[_Sampled]) -> None:
    """Let the current stream read the figures that casts on other streams left."""
    # figures are made on the stream of their cast, such as one that communicates
    current = torch.cuda.current_stream(device)
    for stream in {each.stream for each in casts if each.stream is not None} - {current}:
        current.wait_stream(stream)
    for each in casts:
        if each.stream != current:
            # else the allocator may give the memory away while this stream still reads it
            each.parts.record_stream(current)
            each.inverse_scale.record_stream(current)


def _table(casts: Sequence[_Sampled]) -> torch.Tensor:
    """Return a row for each cast: amax, sums, inverse scale."""
    every = [each.parts for each in casts]
    alike = len({len(parts) for parts in every}) == 1
    # padding with zeros changes neither sums nor amaxes
    parts = torch.stack(every) if alike else pad_sequence(every, batch_first=True)
    scales = [each.inverse_scale for each in casts]
    # one table, one copy to the host
    return torch.cat([parts[:, :, :1].amax(1), parts[:, :, 1:].sum(1), torch.stack(scales).double()[:, None]], dim=1)


def warn(sentence: str) -> None:
    """Give a Python warning."""
    warnings.warn(sentence, stacklevel=2)
