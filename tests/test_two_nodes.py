"""Training across two network namespaces of this machine, which stand in for nodes (`scripts/two_nodes.sh`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fp8booster.cli.metrics import read_metrics
from fp8booster.comm.links import BETWEEN_NODES, KINDS, REDUCTIONS, VARIABLE
from tests.colossal.models import tiny_llama
from tests.distributed import TEST_SECONDS

SCRIPT = Path(__file__).parents[1] / "scripts" / "two_nodes.sh"
NOT_PERMITTED = 77


def on_two_nodes(*arguments: str, fails: bool = False) -> str:
    """What both nodes said; skips the test where network namespaces are not permitted."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.run(
        [str(SCRIPT), *arguments],
        env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=SCRIPT.parents[1],
        timeout=TEST_SECONDS,
    )
    if process.returncode == NOT_PERMITTED:
        pytest.skip(process.stdout.strip())
    assert (process.returncode != 0) is fails, process.stdout
    return process.stdout


def test_the_network_carries_half_the_bytes_with_fp8_on_the_wire(tmp_path: Path) -> None:
    file = tmp_path / "nodes.json"
    on_two_nodes("-m", "benchmarks.nodes", "--steps", "2", "--warmup", "1", "--json", str(file))
    found = json.loads(file.read_text())
    assert found["head"]["topology class"] == "between nodes"
    plain, in_16_bits, in_fp8 = found["tables"]["zero"]
    assert plain["variant"] == "BF16"
    assert in_fp8["bytes_ratio"] < 0.5
    # what is counted leaves the node, with headers of a few per cent
    assert in_fp8["interface_bytes"] == pytest.approx(1.03 * in_fp8["counted_bytes"], rel=0.03)
    assert in_fp8["counted_bytes"] < 0.61 * in_16_bits["counted_bytes"]
    assert in_fp8["losses"] == pytest.approx(plain["losses"], rel=1e-2)


def test_links_are_measured_between_nodes_and_decide_in_training(tmp_path: Path, monkeypatch) -> None:
    links = tmp_path / "links.json"
    monkeypatch.setenv(VARIABLE, str(links))
    said = on_two_nodes("-m", "fp8booster", "doctor", "--nodes", "--mib", "0.0625")
    assert "Collectives between nodes: 2 nodes of 1 rank," in said
    record = json.loads(links.read_text())
    assert list(record["minimum_bytes"]) == [BETWEEN_NODES]
    # what this machine measures is its own affair: here nothing gains, and all stays in 16 bits
    record["minimum_bytes"][BETWEEN_NODES] = dict.fromkeys(KINDS)
    links.write_text(json.dumps(record))
    file = tmp_path / "nodes.json"
    on_two_nodes("-m", "benchmarks.nodes", "--steps", "1", "--warmup", "1", "--json", str(file))
    found = json.loads(file.read_text())
    assert found["head"]["sizes from which FP8 is sent"].startswith("measured ")
    _, in_16_bits, in_fp8 = found["tables"]["zero"]
    assert in_fp8["interface_bytes"] > 0.7 * in_16_bits["interface_bytes"]


def test_by_nodes_a_node_sends_fewer_bytes(tmp_path: Path) -> None:
    file = tmp_path / "bytes.json"
    on_two_nodes("--per-node", "2", "-m", "benchmarks.node_bytes", "--mib", "0.5", "--json", str(file))
    records = {record["collective"]: record for record in json.loads(file.read_text())["tables"]["bytes"]}
    for name in REDUCTIONS:
        found = records[name]
        assert found["FP8 by nodes"] < 0.65 * found["FP8"] < 0.65 * found["BF16"]
        assert found["error of FP8 by nodes"] < 1.1 * found["error of FP8"]


def test_nodes_of_different_sizes_send_fp8_and_are_not_measured(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "from fp8booster import comm\n"
        "dist.init_process_group('gloo')\n"
        "values = torch.full((4096,), dist.get_rank() + 1.0)\n"
        "comm.all_reduce(values)\n"
        "assert torch.equal(values, torch.full((4096,), 6.0)), values\n"
        "row = comm.statistics()['all_reduce']\n"
        "print(f'{row.calls} call, {sum(row.uncompressed.values())} in 16 bits')\n"
        "dist.destroy_process_group()\n"
    )
    assert on_two_nodes("--per-node", "2,1", str(program)).count("1 call, 0 in 16 bits") == 3
    said = on_two_nodes("--per-node", "2,1", "-m", "fp8booster", "doctor", "--nodes", fails=True)
    assert "nodes have 1 and 2 ranks; start as many on each" in " ".join(said.split())


def test_the_command_trains_in_both_precisions(tmp_path: Path) -> None:
    """Of which the second meets at another port than the launcher's."""
    tiny_llama(vocab_size=336).config.save_pretrained(tmp_path / "model")
    text = Path(sysconfig.get_paths()["stdlib"], "ast.py").read_text()
    (tmp_path / "text.txt").write_text(text[:20000])
    options = ["-m", "fp8booster", "train", "--progress", "lines"]
    for name, value in (("vocabulary", 336), ("batch", 1), ("sequence", 32), ("steps", 2)):
        options += [f"--{name}", str(value)]
    for name, path in (("model", "model"), ("data", "text.txt"), ("cache", "cache"), ("out", "run")):
        options += [f"--{name}", str(tmp_path / path)]
    on_two_nodes(*options)
    losses = [
        [metrics.loss for metrics in read_metrics(tmp_path / "run" / precision / "metrics.jsonl")]
        for precision in ("bf16", "fp8")
    ]
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert "2 processes" in (tmp_path / "run" / "summary.md").read_text()
