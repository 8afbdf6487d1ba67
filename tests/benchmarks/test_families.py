"""The table of families: one row for each, and no cell of it empty."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import families
from fp8booster.nn.fused.families import FAMILIES
from tests.benchmarks.test_commands import run
from tests.nn.fused.models import MAJOR


def test_every_family_has_a_published_size() -> None:
    assert {each.removesuffix("_text") for each in families.PUBLISHED} == set(FAMILIES)


def cells(markdown: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in markdown.splitlines() if line.startswith("|")][2:]


def test_a_family_is_a_row(tmp_path) -> None:
    arguments = [
        "--family",
        "GPT-NeoX",
        "--family",
        "DeepSeek V3",
        "--family",
        "gpt-oss",
        "--steps",
        "2",
        "--seeds",
        "2",
    ]
    result = run(families.main, *arguments, "--gpu-layers", "0", "--json", str(tmp_path / "found.json"))
    assert result.exit_code == 0, result.output
    neox, deepseek, oss = json.loads((tmp_path / "found.json").read_text())["tables"]["families"]
    # in units of 128^2: attention and feed-forward block have 4 in each of two layers, the head 2; angles hardly any
    assert neox["share"] == pytest.approx(16 / 18, rel=1e-4)
    assert (neox["converted"], neox["layers"], neox["unfused"]) == (8, 9, {})
    assert deepseek["unfused"] == {}
    assert ("absent" in oss) == (MAJOR < 5)
    assert neox["begin"] > neox["bf16"] == pytest.approx(neox["fp8"], abs=0.05)
    assert len(neox["apart_of_seeds"]) == 2
    rows = cells(result.output)
    assert "±" in rows[0][4]
    assert [row[0] for row in rows] == ["GPT-NeoX", "DeepSeek V3", "gpt-oss"]
    assert all(len(row) == len(families.COLUMNS) and all(cell.strip() for cell in row) for row in rows)


def test_what_cannot_be_timed_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(family, layers, rows, tokens, device, rounds, fp8):
        if fp8:
            return families.Samples.of([1.0, 2.0, 4.0])
        raise torch.cuda.OutOfMemoryError("much")

    monkeypatch.setattr(families, "step_samples", fails)
    record = families.timed("llama", 4, 2, 4096, torch.device("cpu"), 3)
    assert families.show_ms(record, "bf16_ms") == "out of memory"
    assert families.show_ms(record, "fp8_ms").startswith("2.0 [")
    assert families.show_speedup(record) == "no time of one of them"
    assert families.show_speedup({"bf16_ms": {"median": 3.0}, "fp8_ms": {"median": 2.0}}) == "1.50"


def test_times_of_other_runs_are_shown_with_where_they_are_from(tmp_path) -> None:
    head = {"GPU": "NVIDIA H200", "torch": "2.11", "transformers": "5.17", "date": "today", "commit": "abc"}
    record = {"family": "GPT-NeoX", "begin": 1.0, "bf16_ms": {"median": 3.0, "p10": 2.9, "p90": 3.1}}
    record["fp8_ms"] = {"median": 2.0, "p10": 1.9, "p90": 2.1}
    others = {"first": record | {"family": "LLaMA 2 and 3"}, "second": record}
    options = []
    for name, each in others.items():
        found = {"head": head | {"command": name}, "tables": {"families": [each]}}
        (tmp_path / name).write_text(json.dumps(found))
        options += ["--times", str(tmp_path / name)]
    result = run(families.main, "--family", "GPT-NeoX", "--steps", "0", *options)
    assert result.exit_code == 0, result.output
    ((*_, bf16, fp8, speedup),) = cells(result.output)
    assert (bf16, fp8, speedup) == ("3.0 [2.9-3.1]", "2.0 [1.9-2.1]", "1.50")
    source = "NVIDIA H200, 2.11, 5.17, today, abc, "
    assert f"times of: {source}first; {source}second" in result.output
    assert "left out (--steps 0)" in result.output


def test_what_was_found_before_a_failure_is_kept(tmp_path, monkeypatch) -> None:
    def fails(family: str, *_: int) -> dict:
        if family == "gpt2":
            raise RuntimeError("no such product")
        return measured(family, 0, 1)

    measured = families.small_record
    monkeypatch.setattr(families, "small_record", fails)
    file = tmp_path / "found.json"
    result = run(families.main, "--family", "GPT-NeoX", "--family", "GPT-2", "--steps", "0", "--json", str(file))
    assert "no such product" in str(result.exception)
    assert [record["family"] for record in json.loads(file.read_text())["tables"]["families"]] == ["GPT-NeoX"]


def test_an_unknown_family_is_refused() -> None:
    result = run(families.main, "--family", "Lama")
    assert result.exit_code == 2
    assert "unknown families: Lama; there are LLaMA 2 and 3" in result.output
