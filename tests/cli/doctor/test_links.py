"""`fp8booster doctor --nodes` on ranks of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8booster.cli.doctor import links as doctor
from fp8booster.cli.doctor.links import LinkTime, payloads, smallest_that_gains, thresholds_of
from fp8booster.cli.main import app
from fp8booster.comm.links import BETWEEN_NODES, INSIDE_A_NODE, KINDS, VARIABLE
from fp8booster.comm.threshold import use_links
from tests.distributed import run_ranks


def on_two_nodes(path: str) -> None:
    rank = int(os.environ["RANK"])
    os.environ |= {VARIABLE: path, "LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}


def diagnose(path: str) -> str:
    on_two_nodes(path)
    doctor.ROUNDS, doctor.SAMPLE_MS = 2, 0.1
    result = CliRunner().invoke(app, ["doctor", "--nodes", "--mib", "0.0625"])
    assert result.exit_code == 0, result.output
    return result.output


def source_in_training(path: str) -> str:
    on_two_nodes(path)
    return use_links().source


def test_both_links_are_measured_and_written_for_training_to_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "links.json"
    found = run_ranks(diagnose, 4, str(path), initialize=False)
    record = json.loads(path.read_text())
    assert list(record["minimum_bytes"]) == [INSIDE_A_NODE, BETWEEN_NODES]
    for link, kinds in record["minimum_bytes"].items():
        assert sorted(kinds) == sorted(KINDS)
        for kind in KINDS:
            (time,) = (each for each in record["times"] if (each["link"], each["collective"]) == (link, kind))
            assert time["plain_ms"] > 0
            assert time["fp8_ms"] > 0
            assert kinds[kind] == (2**16 if time["ratio_p90"] < 1 else None)
    for source in run_ranks(source_in_training, 4, str(path)):
        assert source.startswith("measured ")
        assert str(path) in source
    for rank, output in enumerate(found):
        assert ("Collectives between nodes: 2 nodes of 2 ranks" in output) == (rank == 0)
    assert f"written to {path}" in found[0].replace("\n", "")


RATIOS = ((1, 1.2), (4, 0.9), (16, 0.6))


def test_the_threshold_is_where_fp8_stays_faster() -> None:
    assert smallest_that_gains({1: 0.9, 2: 1.1, 4: 0.9, 8: 0.7}) == 4
    assert smallest_that_gains({4: 0.5, 8: 1.0}) is None
    assert smallest_that_gains({}) is None
    times = [
        LinkTime(BETWEEN_NODES, "send", size, 1.0, ratio, ratio) for size, ratio in ((1, 1.2), (4, 0.9), (16, 0.6))
    ]
    assert thresholds_of([*times, LinkTime(BETWEEN_NODES, "broadcast", 16, 1.0, 1.2, 1.2)]) == {
        BETWEEN_NODES: {"send": 4, "broadcast": None}
    }


def test_payloads() -> None:
    assert payloads(1) == [2**16, 2**18, 2**20]
    with pytest.raises(ValueError, match=r"at least 0\.0625"):
        payloads(0.01)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--nodes"], "torchrun"),
        (["--nodes", "--fix"], "--fix has no effect with --nodes"),
        (["--mib", "4"], "--mib is about --nodes"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(arguments, sentence, monkeypatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = CliRunner().invoke(app, ["doctor", *arguments])
    assert result.exit_code == 2
    assert sentence in result.output
