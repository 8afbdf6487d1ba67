"""Lines that were written are read again, and a run that goes on drops those that it left."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fp8booster.monitor.scales import ScaleRow
from fp8booster.monitor.sinks import JsonLines, TensorBoard, read_scales, sinks_of

HEADER = {"fp8booster": "1.0", "kind": "scales", "every": 5, "config": {"scaling": "tensorwise"}, "layers": {"fp8": 2}}


def row(step: int, **others: object) -> ScaleRow:
    values = {
        "layer": "layers.0",
        "role": "weight",
        "format": "e4m3",
        "amax": 2.0,
        "scale": 224.0,
        "flushed": 0.125,
        "saturated": 0.0,
        "snr_db": 31.5,
        "non_finite": 0,
        "outlier": 4.0,
        "kurtosis": 3.5,
        "ranks": 2,
    }
    return ScaleRow(step=step, **values | others)


def write(path, done: int, *rows: ScaleRow) -> None:
    sink = JsonLines(path)
    sink.begin(HEADER, done)
    sink.write(rows)
    sink.close()


def test_a_file_has_a_header_and_a_line_a_tensor(tmp_path) -> None:
    path, rows = tmp_path / "run" / "scales.jsonl", [row(1), row(5, scale=None, snr_db=None, non_finite=3)]
    write(path, 0, *rows)
    assert read_scales(path) == (HEADER | {"since": 0}, rows)
    lines = path.read_text().splitlines()
    assert json.loads(lines[0]) == HEADER | {"since": 0}
    assert json.loads(lines[2]) == dataclasses.asdict(rows[1])


def test_thresholds_that_change_begin_where_the_run_goes_on(tmp_path) -> None:
    path = tmp_path / "scales.jsonl"
    write(path, 0, row(1), row(5), row(10))
    with_thresholds = HEADER | {"watchdog": {"flushed": 0.1}}
    for header, done, since in (
        (with_thresholds, 5, 5),
        (with_thresholds, 8, 5),
        (HEADER, 8, 8),
        (HEADER, 3, 8),  # none of what is done before was judged so
    ):
        sink = JsonLines(path)
        held = sink.begin(header, done)
        sink.close()
        assert held.since == since
        assert all(each.step <= done for each in held.rows)


def test_a_run_that_goes_on_drops_what_it_left(tmp_path) -> None:
    path = tmp_path / "scales.jsonl"
    write(path, 0, row(1), row(5), row(10))
    with path.open("a") as stream:
        stream.write('{"step": 15, "lay')
    write(path, 7, row(10, amax=3.0))
    assert [(each.step, each.amax) for each in read_scales(path)[1]] == [(1, 2.0), (5, 2.0), (10, 3.0)]
    write(path, 5, row(10, amax=4.0))  # the step that is done last stays
    assert [(each.step, each.amax) for each in read_scales(path)[1]] == [(1, 2.0), (5, 2.0), (10, 4.0)]


def test_what_was_written_is_there_before_the_end(tmp_path) -> None:
    sink = JsonLines(tmp_path / "scales.jsonl")
    sink.begin(HEADER, 0)
    sink.write([row(1)])
    assert read_scales(sink.path)[1] == [row(1)]
    with pytest.raises(ValueError, match="not JSON compliant"):
        sink.write([row(5, amax=float("nan"))])
    sink.close()


def test_tensorboard_drops_what_a_run_left(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for done, rows in ((0, [row(5), row(7), row(8, flushed=0.5)]), (7, [row(8)])):
        sink = TensorBoard(tmp_path)
        sink.begin(HEADER, done)
        sink.write(rows)
        sink.close()
    events = EventAccumulator(str(tmp_path)).Reload().Scalars("weight/flushed/layers.0")
    assert [(event.step, event.value) for event in events] == [(5, 0.125), (7, 0.125), (8, 0.125)]


def test_a_run_that_begins_anew_keeps_nothing(tmp_path) -> None:
    path = tmp_path / "scales.jsonl"
    write(path, 0, row(1), row(2))
    write(path, 0, row(1))
    assert read_scales(path)[1] == [row(1)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("{}\n", "Line 1 of .* has no 'kind'"),
        (json.dumps(HEADER | {"kind": "metrics"}) + "\n", "is a file of 'metrics'"),
        (json.dumps(HEADER) + "\n{}\n", "Line 2 of .* has no 'step'"),
        (json.dumps(HEADER) + "\n" + json.dumps(dataclasses.asdict(row(1)) | {"amax": "2"}) + "\n", "'amax' in Line 2"),
        (json.dumps(HEADER) + "\n" + json.dumps(dataclasses.asdict(row(1)) | {"more": 1}) + "\n", "'more'"),
    ],
)
def test_a_file_that_is_none_is_named_with_its_line(tmp_path, text, says) -> None:
    path = tmp_path / "scales.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_scales(path)


def test_tensorboard_has_a_scalar_for_each_figure(tmp_path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    sink = TensorBoard(tmp_path)
    sink.begin(HEADER, 0)
    sink.write([row(5, scale=None)])
    sink.close()
    board = EventAccumulator(str(tmp_path)).Reload()
    (event,) = board.Scalars("weight/flushed/layers.0")
    assert (event.step, event.value) == (5, 0.125)
    assert "weight/scale/layers.0" not in board.Tags()["scalars"]


def test_a_sink_is_a_path_or_has_three_methods(tmp_path) -> None:
    (sink,) = sinks_of(tmp_path / "scales.jsonl")
    assert isinstance(sink, JsonLines)
    assert sinks_of([sink, sink]) == [sink, sink]
    assert sinks_of(None) == []
    with pytest.raises(TypeError, match="is no sink: give a path"):
        sinks_of(print)


def test_a_file_of_another_kind_is_not_written_over(tmp_path) -> None:
    for text in ("notes\n", '{"step": 1, "loss": 2.0}\n'):
        (tmp_path / "metrics.jsonl").write_text(text)
        with pytest.raises(ValueError, match=r"metrics.jsonl"):
            JsonLines(tmp_path / "metrics.jsonl").begin({}, 0)
        assert (tmp_path / "metrics.jsonl").read_text() == text
