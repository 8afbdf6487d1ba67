"""Messages are recorded as they are decoded again."""

from __future__ import annotations

import pytest
import torch

from fp8booster import formats
from fp8booster.comm.encoding import Encoding, observers
from fp8booster.kernels.message_layout import side_by_side
from fp8booster.monitor.recorder import Recorder
from fp8booster.monitor.watchdog import Watchdog

ENCODINGS = [Encoding(), Encoding(format=formats.E5M2, block_size=32), Encoding(block_size=None)]


class Kept(list):
    """A sink that keeps what it is given."""

    def begin(self, header, done) -> None:
        self.header = header

    def write(self, rows) -> None:
        self += rows

    def close(self) -> None:
        self.closed = True


def recorded(encoding: Encoding, values, layout) -> tuple[Kept, torch.Tensor]:
    sink = Kept()
    recorder = Recorder(10, [sink], {}, 0, Watchdog(), pytest.fail)
    message = torch.empty(layout.bytes, dtype=torch.uint8)
    observers.append(recorder.note_message)
    try:
        for _ in range(2):  # of which the second is not sampled
            encoding.encode(values, message, layout)
            recorder.end_step()
    finally:
        observers.remove(recorder.note_message)
    recorder.close()
    flat = values if isinstance(values, torch.Tensor) else side_by_side(values, len(layout.counts))
    decoded = torch.empty(sum(layout.counts))
    encoding.decode(message, decoded, layout)
    return sink, torch.stack([flat.double(), decoded[: flat.numel()].double()])


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("how", ["even", "short", "uneven", "several"])
def test_a_message_is_recorded_as_it_is_decoded(encoding, how) -> None:
    torch.manual_seed(0)
    values = torch.randn(3000) * torch.exp(2 * torch.randn(3000))
    values[::7] = 0.0
    values[512:1024] = 0.0
    given, layout = {
        "even": (values, encoding.even(1000, 3)),
        "short": (values[:2900], encoding.even(1000, 3)),
        "uneven": (values, encoding.uneven([17, 0, 2983])),
        "several": ([values[:1000], values[1000:]], encoding.even(1500, 2)),
    }[how]
    sink, (exact, decoded) = recorded(encoding, given, layout)
    (row,) = sink
    assert (row.step, row.layer, row.role, row.saturated, row.non_finite) == (1, "send", "message", 0.0, 0)
    assert row.format == ("e5m2" if encoding.format is formats.E5M2 else "e4m3")
    assert row.amax == float(exact.abs().max())
    assert row.scale == pytest.approx(formats.MAX[encoding.format] / row.amax)
    nonzero = exact != 0
    assert row.flushed == int((nonzero & (decoded == 0)).sum()) / int(nonzero.sum())
    noise = (exact - decoded).square().sum()
    assert row.snr_db == pytest.approx(float(10 * torch.log10(exact.square().sum() / noise)), rel=1e-4)


def test_sums_that_are_cast_again_are_recorded_as_they_are_decoded() -> None:
    torch.manual_seed(0)
    encoding, layout, sink = Encoding(), Encoding().even(1024, 2), Kept()
    values = torch.randn(2048) * torch.exp(2 * torch.randn(2048))
    received, sent = (torch.empty(size, dtype=torch.uint8) for size in (layout.bytes, layout.piece.bytes))
    encoding.encode(values, received, layout)
    recorder = Recorder(1, [sink], {}, 0, Watchdog(), pytest.fail)
    observers.append(recorder.note_message)
    try:
        encoding.decode_sum_encode(received, sent, layout, 0.5)
    finally:
        observers.remove(recorder.note_message)
    recorder.end_step()
    recorder.close()
    sums, decoded = torch.empty(1024), torch.empty(1024)
    encoding.decode_sum(received, sums, layout, 0.5)
    encoding.decode(sent, decoded, layout.piece)
    (row,) = sink
    assert (row.layer, row.role, row.format) == ("send sums", "message", "e4m3")
    noise = (sums.double() - decoded.double()).square().sum()
    assert row.snr_db == pytest.approx(float(10 * torch.log10(sums.double().square().sum() / noise)), abs=1e-4)
    assert row.amax == float(sums.abs().max())
