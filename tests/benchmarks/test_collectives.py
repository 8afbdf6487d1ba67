from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import collectives
from benchmarks.transfers.calls import KEPT
from fp8booster.cli.doctor.calls import COLLECTIVES, ENCODED, PLAIN
from tests.distributed import run_ranks


def measure_on_the_cpu(folder: str) -> None:
    app = typer.Typer()
    app.command()(collectives.main)
    arguments = ["--device", "cpu", "--rounds", "2", "--sample-ms", "0.1", "--mib", "0.0625", "--mib", "0.125"]
    result = CliRunner().invoke(app, [*arguments, "--out", folder, "--json", f"{folder}/result.json"])
    assert result.exit_code == 0, result.output


def test_every_collective_is_measured_and_written_by_the_first_rank(tmp_path: Path) -> None:
    run_ranks(measure_on_the_cpu, 2, str(tmp_path), initialize=False)
    found = json.loads((tmp_path / "result.json").read_text())
    assert found["head"]["ranks"] == "2"
    records = found["tables"]["collectives"]
    expected = {(name, variant) for name in COLLECTIVES for variant in (PLAIN, ENCODED)}
    assert {(r["collective"], r["variant"]) for r in records} == expected | {("all_gather_into_tensor", KEPT)}
    for record in records:
        assert len(record["ms"]["values"]) == 2
        if record["variant"] == PLAIN:
            assert record["wire_ratio"] == record["ratio"]["median"] == 1
            assert record["error"] < 2**-8
        else:
            assert record["wire_ratio"] < 0.52
            assert 2**-8 < record["error"] < 2**-4
    # half of what 2 ranks hold leaves each in a reduce-scatter, all of it in an all-reduce
    (reduced,) = (r for r in records if (r["collective"], r["variant"], r["mib"]) == ("all_reduce", PLAIN, 0.125))
    assert reduced["wire_bytes"] == 2**17
    assert reduced["bus_bytes_per_second"] == pytest.approx(2**17 / reduced["ms"]["median"] * 1e3)
    (markdown,) = tmp_path.glob("collectives-2_*.md")
    (plot,) = tmp_path.glob("collectives-2_*.png")
    assert plot.name in markdown.read_text()


def record(collective: str, mib: float, ratio: float, variant: str = ENCODED) -> dict[str, object]:
    return {"collective": collective, "mib": mib, "payload_bytes": mib, "variant": variant, "ratio": {"p90": ratio}}


def test_the_threshold_is_where_fp8_stays_faster() -> None:
    found = collectives.smallest_that_pays(
        [
            record("a", 1, 0.9),
            record("a", 2, 1.1),
            record("a", 4, 0.9),
            record("a", 8, 0.7),
            record("b", 4, 0.5),
            record("b", 8, 1.0),
            record("a", 8, 1.0, PLAIN),
        ]
    )
    assert found == [
        {"collective": "a", "variant": ENCODED, "mib": 4},
        {"collective": "b", "variant": ENCODED, "mib": None},
    ]


def test_without_torchrun_one_sentence_and_exit_code_2(monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    app = typer.Typer()
    app.command()(collectives.main)
    result = CliRunner().invoke(app, ["--device", "cpu"])
    assert result.exit_code == 2
    assert "torchrun" in result.output
    if not torch.cuda.is_available():
        assert "torch finds none" in CliRunner().invoke(app, []).output
