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
    measured = {"median": 2.0, "p10": 1.0, "p90": 4.0, "host": 1.5, "peak": 3.0, "reserved": 4.0, "allocations": 0}

    def fails(steps, family, device, *, fp8):
        if fp8:
            return measured | {"graphs": {"None": 3, "it is packed": 1}}
        raise torch.cuda.OutOfMemoryError("much")

    monkeypatch.setattr(families.Steps, "timed", fails)
    record = families.timed("llama", families.Steps(4, 2, 4096, 3), torch.device("cpu"))
    assert families.show_ms(record, "bf16_ms") == families.show_memory(record, "bf16_ms") == "out of memory"
    assert families.show_ms(record, "fp8_ms").startswith("2.0 [")
    assert families.show_memory(record, "fp8_ms") == "1.5 ms; 3.0, 4.0 GiB"
    assert families.show_graphs(record) == "3 replayed; 1 not: it is packed"
    assert families.show_speedup(record) == "no time of one of them"
    assert families.show_speedup({"bf16_ms": {"median": 3.0}, "fp8_ms": {"median": 2.0}}) == "1.50"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--precision", "fp4"], "error: --precision is fp4; use bf16 or fp8"),
        (["--fp8-option", "rowwise"], "error: "),
        (["--family", "LLaMA 9"], "error: unknown families: LLaMA 9; there are"),
    ],
)
def test_a_mistake_is_a_sentence(arguments: list[str], sentence: str) -> None:
    result = run(families.main, *arguments)
    assert (result.exit_code, result.output.startswith(sentence)) == (2, True), result.output


@pytest.mark.gpu
@pytest.mark.parametrize("in_backward", [False, True])
def test_steps_of_published_size_are_timed(
    device: torch.device, in_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device.type != "cuda":
        pytest.skip("times a GPU")
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 32000}
    monkeypatch.setitem(families.PUBLISHED, "llama", ("small", families.PUBLISHED["llama"][1] | sizes))
    steps = families.Steps(2, 1, 128, 3, families.FP8Config(always=True), in_backward, profiled=True)
    record = families.timed("llama", steps, device)
    for name in ("bf16_ms", "fp8_ms"):
        assert 0 < record[name]["host"] <= record[name]["p90"]
        assert 0 < record[name]["peak"] <= record[name]["reserved"]
    assert sum(record["fp8_ms"]["graphs"].values()) == 2
    assert record["fp8_ms"]["profile"]["ms"]["products"] > 0 < record["fp8_ms"]["profile"]["ms"]["casts"]


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
    ((*_, bf16, fp8, speedup, of_bf16, _, graphs),) = cells(result.output)
    assert (of_bf16, graphs) == ("not recorded", "none")
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
