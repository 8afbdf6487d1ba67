"""`fp8booster doctor --nodes` on ranks of this machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from fp8booster.cli.doctor import links as doctor
from fp8booster.cli.doctor.links import LinkTime, LinkTimes, payloads, smallest_that_gains, thresholds_of
from fp8booster.cli.doctor.tables import show_links
from fp8booster.cli.main import app
from fp8booster.comm.links import BETWEEN_NODES, BY_NODES, INSIDE_A_NODE, KINDS, REDUCTIONS, VARIABLE
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
    by_nodes = record["minimum_bytes"].pop(BY_NODES)
    assert list(record["minimum_bytes"]) == [INSIDE_A_NODE, BETWEEN_NODES]
    timed = {each["collective"]: each for each in record["times"] if each["by_nodes_ms"] is not None}
    assert list(timed) == list(by_nodes) == list(REDUCTIONS)
    for kind, time in timed.items():
        assert time["link"] == BETWEEN_NODES
        assert time["by_nodes_ms"] > 0
        assert by_nodes[kind] == (2**16 if time["by_nodes_ratio_p90"] < 1 else None)
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
    assert f"{BY_NODES}: " in found[0]
    assert f"written to {path}" in found[0].replace("\n", "")


RATIOS = ((1, 1.2), (4, 0.9), (16, 0.6))


def test_the_threshold_is_where_fp8_stays_faster() -> None:
    assert smallest_that_gains({1: 0.9, 2: 1.1, 4: 0.9, 8: 0.7}) == 4
    assert smallest_that_gains({4: 0.5, 8: 1.0}) is None
    assert smallest_that_gains({}) is None
    times = [
        LinkTime(BETWEEN_NODES, "send", size, 1.0, ratio, ratio) for size, ratio in ((1, 1.2), (4, 0.9), (16, 0.6))
    ]
    times.append(LinkTime(BETWEEN_NODES, "broadcast", 16, 1.0, 1.2, 1.2))
    times += [
        LinkTime(BETWEEN_NODES, "all_reduce", size, 1.0, 1.2, 1.2, ratio, ratio)
        for size, ratio in ((4, 1.1), (16, 0.9))
    ]
    assert thresholds_of(times) == {
        BETWEEN_NODES: {"send": 4, "broadcast": None, "all_reduce": None},
        BY_NODES: {"all_reduce": 16},
    }


def test_the_table_of_a_link_has_columns_by_nodes_where_they_were_timed() -> None:
    times = [
        LinkTime(INSIDE_A_NODE, "send", 2**20, 1.0, 0.5, 0.6),
        LinkTime(BETWEEN_NODES, "all_reduce", 2**20, 4.0, 2.0, 0.6, 1.0, 0.7),
        LinkTime(BETWEEN_NODES, "send", 2**20, 4.0, 2.0, 0.6),
    ]
    console = Console(width=200, no_color=True)
    with console.capture() as capture:
        show_links(LinkTimes(["a", "b"], 4, 2, "CPU", times, thresholds_of(times), "links.json"), console)
    inside, between = capture.get().split("Collectives between nodes: ")
    assert "by nodes" not in inside
    assert "by nodes / best" in between
    (row,) = (line.split() for line in between.splitlines() if "all_reduce" in line and "gain" not in line)
    assert row == ["all_reduce", "1", "4.000", "2.000", "0.50", "1.000", "0.50"]
    assert f"{BY_NODES}: FP8 by nodes gains most in all_reduce from 1 MiB" in between


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
