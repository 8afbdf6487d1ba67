from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from benchmarks.harness.results import Column, Result, Table, spread
from benchmarks.harness.statistics import Samples

HEAD = {"GPU": "NVIDIA H200", "torch": "2.11.0+cu130", "date": "2026-01-02 03:04 UTC", "command": "python -m x"}
RECORDS = [{"name": "a", "ms": Samples.of([1.0, 2.0, 3.0]).as_record()}]
TABLE = Table(
    "times",
    "Times",
    [Column("what", lambda r: r["name"]), Column("ms", lambda r: spread(r["ms"], 1))],
    RECORDS,
    "A note.",
)
RESULT = Result(
    "gemm", "Products", HEAD, [TABLE, replace(TABLE, name=None)], {"peer": "it is not installed"}, ["a.png"]
)


def test_a_table_in_markdown() -> None:
    assert TABLE.markdown() == ("## Times\n\nA note.\n\n| what | ms |\n| :-- | --: |\n| a | 2.0 [1.2-2.8] |")


def test_a_result_says_what_it_was_measured_with_and_what_is_missing() -> None:
    text = RESULT.markdown()
    assert text.startswith("# Products\n\n- GPU: NVIDIA H200\n")
    assert "- command: `python -m x`" in text
    assert text.count(TABLE.markdown()) == 2
    assert "- Left out: peer: it is not installed" in text
    assert text.endswith("![Products](a.png)\n")


def test_json_keeps_every_sample() -> None:
    assert json.loads(RESULT.json()) == {
        "benchmark": "gemm",
        "head": HEAD,
        "left_out": {"peer": "it is not installed"},
        "tables": {"times": RECORDS},
    }


def test_files_are_named_after_device_date_and_version(tmp_path) -> None:
    written = RESULT.write(folder=tmp_path / "out", json_file=tmp_path / "new" / "gemm.json")
    assert [path.relative_to(tmp_path).as_posix() for path in written] == [
        "out/gemm_NVIDIA-H200_2026-01-02_torch-2.11.0-cu130.md",
        "new/gemm.json",
    ]
    assert [path.read_text() for path in written] == [RESULT.markdown(), RESULT.json()]
    assert RESULT.write(folder=None, json_file=None) == []


def test_a_result_is_whole_or_as_before(tmp_path, monkeypatch) -> None:
    (file := tmp_path / "a.json").write_text("before")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            RESULT.write(folder=None, json_file=file)
    assert file.read_text() == "before"
    RESULT.write(folder=None, json_file=Path(os.devnull))
    assert not Path(os.devnull).is_file()


def test_files_are_tried_before_the_work(tmp_path) -> None:
    (file := tmp_path / "a.json").write_text("before")
    RESULT.require_writable(folder=tmp_path / "new", json_file=file)
    assert file.read_text() == "before"
    assert list((tmp_path / "new").iterdir()) == []
    with pytest.raises(ValueError, match=f"{file}/b.json cannot be written: .*; give another file or folder"):
        RESULT.require_writable(folder=None, json_file=file / "b.json")
