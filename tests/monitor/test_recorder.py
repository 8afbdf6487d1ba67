"""Messages are recorded as they are decoded again."""

from __future__ import annotations

import weakref

import pytest
import torch

import fp8booster.kernels.cast_statistics as statistics_module
from fp8booster import formats
from fp8booster.comm.encoding import Encoding, observers
from fp8booster.kernels.group_codes import encode_groups
from fp8booster.kernels.message_layout import side_by_side
from fp8booster.kernels.rowwise_cast import channel_cast
from fp8booster.monitor.recorder import Recorder
from fp8booster.monitor.watchdog import Watchdog
from fp8booster.tensor import QuantizedMatrix
from tests.kernels.matrices import quantize

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
    flat = values if isinstance(values, torch.Tensor) else side_by_side(values, layout.pieces)
    decoded = torch.empty(layout.count * layout.pieces)
    encoding.decode(message, decoded, layout)
    return sink, torch.stack([flat.double(), decoded[: flat.numel()].double()])


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("how", ["even", "short", "rows", "several"])
def test_a_message_is_recorded_as_it_is_decoded(encoding, how) -> None:
    torch.manual_seed(0)
    values = torch.randn(3000) * torch.exp(2 * torch.randn(3000))
    values[::7] = 0.0
    values[512:1024] = 0.0
    given, layout = {
        "even": (values, encoding.layout(1000, 3)),
        "short": (values[:2900], encoding.layout(1000, 3)),
        "rows": (values[:2980], encoding.layout(20, 150)),
        "several": ([values[:1000], values[1000:]], encoding.layout(1500, 2)),
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


@pytest.mark.parametrize(
    ("every", "done", "sampled"),
    [(3, 0, [1, 3, 6]), (1, 0, [1, 2, 3, 4, 5, 6, 7]), (3, 4, [6, 9]), (3, 6, [9, 12]), (10, 1, [])],
)
def test_the_first_step_is_sampled_and_each_whose_number_is_a_multiple(every, done, sampled) -> None:
    sink = Kept()
    recorder = Recorder(every, [sink], {}, done, Watchdog(), pytest.fail)
    taken = []
    for _ in range(7):
        taken += [recorder.step] * recorder.is_sampling
        values = torch.ones(16, 16)
        recorder.note("layer", "input", values, quantize(values, formats.E4M3), remember=True)
        recorder.end_step()
    recorder.close()
    assert taken == [row.step for row in sink] == sampled


@pytest.mark.parametrize("layouts", [{}, {"transposed": True}, {"plain": False, "transposed": True}], ids=str)
@pytest.mark.parametrize("scale_for", ["tensor", "row", "group", "block"])
@pytest.mark.parametrize("shape", [(40, 144), (3, 5, 144)])
def test_a_cast_is_recorded_by_its_values_and_micro_batches_add_up(shape, scale_for, layouts, monkeypatch) -> None:
    monkeypatch.setattr(statistics_module, "_CHUNK", 1000)  # so that there are several parts
    sink, batches = Kept(), [torch.randn(shape) * torch.exp(2 * torch.randn(shape)) for _ in range(2)]
    recorder = Recorder(1, [sink], {}, 0, Watchdog(flushed=None), pytest.fail)
    exact, decoded = [], []
    for values in batches:
        values[0] = -0.0  # whose scale tells nothing
        values[1] *= 1e-4
        values *= 1e-3
        quantized = quantize(values.flatten(0, -2), formats.E4M3, scale_for=scale_for, **layouts)
        recorder.note("layer", "input", values, quantized, remember=False)
        matrix = values.flatten(0, -2)
        if not layouts.get("plain", True):  # its values are those of the cast by columns
            quantized = quantize(matrix.t(), formats.E4M3, scale_for=scale_for)
            matrix = matrix.t()
        exact.append(matrix.double())
        decoded.append(quantized.dequantize(*matrix.shape).double())
    assert recorder.seen == []
    recorder.end_step()
    recorder.close()
    (row,) = sink
    exact, decoded = torch.stack(exact), torch.stack(decoded)
    assert (row.layer, row.role, row.saturated, row.non_finite) == ("layer", "input", 0.0, 0)
    assert row.amax == float(exact.abs().max())
    assert row.scale == pytest.approx(448 / row.amax)
    assert row.flushed == int(((exact != 0) & (decoded == 0)).sum()) / int((exact != 0).sum())
    noise = (exact - decoded).square().sum()
    assert row.snr_db == pytest.approx(float(10 * torch.log10(exact.square().sum() / noise)), abs=1e-3)


@pytest.mark.parametrize("layouts", [{}, {"transposed": True}, {"plain": False, "transposed": True}], ids=str)
def test_a_cast_whose_columns_have_factors_is_recorded_by_what_undoes_them(layouts) -> None:
    torch.manual_seed(0)
    sink, values = Kept(), torch.randn(40, 48) * torch.logspace(-3, 3, 48, base=2)
    factors = torch.logspace(4, -4, 48, base=2).log2().round().exp2()
    amax = (values * factors).abs().max()
    data, transpose, inverse = channel_cast(values, factors, amax, formats.E4M3, **layouts)
    quantized = QuantizedMatrix(data, transpose, inverse, inverse / factors)
    recorder = Recorder(1, [sink], {}, 0, Watchdog(flushed=None), pytest.fail)
    recorder.note("layer", "input", values, quantized, remember=False)
    recorder.end_step()
    recorder.close()
    (row,) = sink
    exact, decoded = values.double(), quantized.dequantize(40, 48).double()
    noise = (exact - decoded).square().sum()
    assert row.saturated == 0.0
    assert row.snr_db == pytest.approx(float(10 * torch.log10(exact.square().sum() / noise)), abs=1e-3)
    assert row.snr_db > 25


def test_casts_of_a_step_are_remembered_until_it_ends() -> None:
    recorder, values = Recorder(100, [], {}, 1, Watchdog(), pytest.fail), torch.ones(16, 16)
    for role, remember in (("weight", False), ("input", True), ("output gradient", True)):
        recorder.note("layer", role, values, quantize(values, formats.E4M3), remember)
    assert [(seen.layer, seen.role) for seen in recorder.seen] == [("layer", "input"), ("layer", "output gradient")]
    assert all(float(seen.inverse_scale) == pytest.approx(1 / 448) for seen in recorder.seen)
    recorder.end_step()
    assert recorder.seen == []


def test_what_is_saved_in_8_bits_is_of_the_layer_whose_input_is_cast_next_in_that_step() -> None:
    sink, values = Kept(), torch.randn(16, 128)
    recorder = Recorder(1, [sink], {}, 0, Watchdog(flushed=None), pytest.fail)
    recorder.note_saved(values, encode_groups(values))
    recorder.end_step()  # nobody read it in this step
    recorder.note_saved(values, encode_groups(values))
    for layer, role in (("first", "weight"), ("second", "input"), ("third", "input")):
        recorder.note(layer, role, values, quantize(values, formats.E4M3), remember=False)
    recorder.end_step()
    recorder.close()
    assert [(row.step, row.layer) for row in sink if row.role == "saved activation"] == [(2, "second")]


def test_sums_that_are_cast_again_are_recorded_as_they_are_decoded() -> None:
    torch.manual_seed(0)
    encoding, layout, sink = Encoding(), Encoding().layout(1024, 2), Kept()
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


def test_casts_are_remembered_until_their_step_ends_without_their_values() -> None:
    recorder = Recorder(2, [], {}, 0, Watchdog(), pytest.fail)
    scales = []
    for step in range(1, 5):
        for role, remember in (("input", True), ("weight", False), ("output gradient", True)):
            made = quantize(torch.full((16, 16), float(step)), formats.E4M3)
            recorder.note(f"layer of step {step}", role, torch.full((16, 16), float(step)), made, remember)
            scales.append(made.inverse_scale)
        of_data = weakref.ref(made.data)
        del made
        assert [(each.layer, each.role) for each in recorder.seen] == [
            (f"layer of step {step}", role) for role in ("input", "output gradient")
        ]
        assert [each.inverse_scale for each in recorder.seen] == [scales[-3], scales[-1]]
        assert recorder.step == step
        assert recorder.is_sampling is (step in (1, 2, 4))
        if not recorder.is_sampling:
            assert of_data() is None
        recorder.end_step()
        assert recorder.seen == []
        assert of_data() is None
    recorder.note("layer", "input", torch.ones(16, 16), quantize(torch.ones(16, 16), formats.E4M3), True)
    recorder.close()
    assert recorder.seen == []
