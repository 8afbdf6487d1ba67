from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks import llama
from benchmarks.harness.environment import REPOSITORY
from benchmarks.training import one_layer, worker
from fp8booster import FP8Config
from tests.distributed import TEST_SECONDS, run_ranks

EMULATED = ["--fp8-option", "emulate=true"]  # torch multiplies FP8 slowly on the CPU
# native FSDP asks for a GPU
ABSENT = "torchao" if find_spec("torchao") is None else "colossal-fsdp"
SMALL = ["--device", "cpu", "--model", "micro", "--sequence", "32"]


def run(*arguments: str) -> object:
    return CliRunner().invoke(llama.app, list(arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_one_sentence_and_exit_code_2() -> None:
    result = run()
    assert result.exit_code == 2
    assert "measures CUDA GPUs and torch finds none" in result.output
    assert len(result.output.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "8b"], "error: --model is '8b'; use one of"),
        (["--against", "te"], "error: no peer is called 'te'"),
        (["--baseline", "fsdp2"], "error: --baseline is 'fsdp2'; it must be measured: one of fp8booster-bf16"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = run("--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith(sentence)


def test_the_whole_command_on_two_ranks(tmp_path) -> None:
    """It starts torchrun and the engines' processes, trains on text, and goes on after an engine that fails."""
    (tmp_path / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(1500)))
    command = [
        *(sys.executable, "-m", "benchmarks.llama", *SMALL, "--micro-batch", "1"),
        *("--precision", "fp8", *EMULATED, "--against", ABSENT),
        *("--warm-up", "1", "--steps", "2", "--rounds", "1", "--data", str(tmp_path / "text.txt"), "--profile"),
        *("--out", str(tmp_path), "--json", str(tmp_path / "a.json"), "--engine-logs", str(tmp_path / "logs")),
    ]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=TEST_SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["head"]["ranks"] == "2"
    assert "model micro" in found["head"]["training"]
    assert "text of text.txt" in found["head"]["training"]
    assert "14 of 15 linear layers" in found["head"]["in FP8, fp8booster, FP8"]
    failed, ours = found["tables"]["engines"]
    assert failed["engine"] == ABSENT
    assert failed["failed"]
    assert found["left_out"] == {failed["label"]: failed["failed"]}
    assert failed["failed"] in done.stdout
    assert ours["failed"] is None
    assert len(ours["ms"]["values"]) == 2
    assert ours["tokens"] == 2 * 32
    assert ours["tokens_per_second_per_gpu"] == pytest.approx(1e3 * 32 / ours["ms"]["median"])
    assert ours["utilisation"] == {"FP8": None, "BF16": None}
    assert ours["wire"]["bytes"] > 0
    (losses,) = found["tables"]["losses"]
    assert len(losses["losses"]) == 3
    with gzip.open(tmp_path / "llama-micro-fp8booster-fp8.trace.json.gz") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert {"optimizer step", "aten::mm"} <= names
    (markdown,) = tmp_path.glob("llama-micro-2_*.md")
    (plot,) = tmp_path.glob("llama-micro-2_*.png")
    assert plot.name in markdown.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "logs").glob("fp8booster-fp8-*-rank-1.log"))


def test_a_worker_that_fails_writes_why(tmp_path, capsys) -> None:
    outcome = tmp_path / "outcome.json"
    task = {"engine": "fsdp2", "job": {"model": "8b", "tokens": None}, "outcome": str(outcome)}
    assert worker.do(task) == 1
    found = json.loads(outcome.read_text())
    assert found["failed"].startswith("ValueError: --model is '8b'")
    assert found["at"] > 0
    assert "Traceback" in capsys.readouterr().err
    memory = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 0 has")
    assert worker.reason_of(memory) == "out of GPU memory: CUDA out of memory"


def facts_of_two() -> dict[str, str | None]:
    return worker.of_all_ranks({"layers": f"{dist.get_rank()} replayed", "fused": "all", "none": None})


def test_facts_are_told_by_rank_where_they_differ() -> None:
    told = {"layers": "rank 0: 0 replayed; rank 1: 1 replayed", "fused": "all", "none": None}
    assert run_ranks(facts_of_two, 2) == [told, told]


def test_a_process_that_asked_for_a_gpu_does_not_fork(monkeypatch) -> None:
    assert worker.cuda_begins_in_a_fork()
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    assert not worker.cuda_begins_in_a_fork()


def test_one_layer(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # seconds for each
    monkeypatch.setattr(one_layer, "find_spec", lambda package: None)
    file = tmp_path / "layer.json"
    result = run("--one-layer", *SMALL, *EMULATED, "--rounds", "2", "--sample-ms", "0.01", "--json", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    records = {record["layer"]: record for record in found["tables"]["layers"]}
    assert list(records) == [name for name in one_layer.LAYERS if name != "torchao"]
    assert found["left_out"] == {"torchao tensorwise, compiled": "torchao is not installed"}
    base = records[one_layer.BASELINE]
    assert base["speed"]["values"] == [1.0, 1.0]
    for record in records.values():
        ratios = [a / b for a, b in zip(base["ms"]["values"], record["ms"]["values"], strict=True)]
        assert record["speed"]["values"] == pytest.approx(ratios)


def test_the_host_alone(tmp_path) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "layer.json"
    sizes = ("--model", "micro", "--micro-batch", "1", "--sequence", "32", "--rounds", "1", "--sample-ms", "0.01")
    result = run("--one-layer", "--host-alone", *sizes, "--json", str(file))
    assert result.exit_code == 0, result.output
    records = {record["layer"]: record for record in json.loads(file.read_text())["tables"]["layers"]}
    assert list(records) == one_layer.CALLED_FROM_PYTHON
    cached, cold = (records[name]["python_calls"] for name in ("fp8booster-fused", "fp8booster-fused-cold"))
    assert records[one_layer.BASELINE]["python_calls"] < cached < cold
    assert not torch.empty(1).is_cuda


def test_the_host_alone_is_that_of_one_layer() -> None:
    result = run("--host-alone")
    assert result.exit_code == 2
    assert "--one-layer" in result.output


def test_a_layer_that_fails_is_left_out(monkeypatch) -> None:
    def fails(decoder: one_layer.Decoder, config: FP8Config) -> None:
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setattr(one_layer, "LAYERS", {"hf-bf16": one_layer.LAYERS["hf-bf16"], "torchao": ("torchao", fails)})
    records, left_out = one_layer.measure_layers(
        llama.MODELS["micro"], FP8Config(), batch=1, sequence=16, device=torch.device("cpu"), rounds=1, sample_ms=0.01
    )
    assert [record["layer"] for record in records] == ["hf-bf16"]
    assert left_out == {"torchao": "it failed: RuntimeError: no kernel"}


@pytest.mark.parametrize("name", ["fp8booster", "fp8booster-fused"])
def test_our_layers_compute_what_hugging_faces_does(name: str) -> None:
    """Outputs and gradients within FP8's error: more than 18 dB of signal over noise."""
    device = torch.device("cpu")
    found = {}
    for layer in (one_layer.BASELINE, name):
        decoder = one_layer.Decoder.of(llama.MODELS["micro"], 32, device)
        forward = one_layer.LAYERS[layer][1](decoder, FP8Config(emulate=True))
        generator = torch.Generator().manual_seed(1)
        x, dy = (torch.randn(2, 32, 64, generator=generator).bfloat16() for _ in range(2))
        y = forward(x.requires_grad_())
        y.backward(dy)
        found[layer] = [y.detach().float(), x.grad.float()]
    for expected, value in zip(found[one_layer.BASELINE], found[name], strict=True):
        assert (value - expected).norm() < 0.125 * expected.norm()


def test_scaling_prints_a_table(tmp_path) -> None:
    for ranks, throughput in ((1, 1000.0), (8, 940.0)):
        engine = {"engine": "fp8booster-fp8", "label": "fp8booster, FP8", "failed": None}
        engine |= {"ms": {"median": 1.0, "p10": 1.0, "p90": 1.0}, "tokens_per_second_per_gpu": throughput}
        head = {"GPU": "NVIDIA H200", "torch": "2.11", "date": "2026-11-21 10:00 UTC", "ranks": str(ranks)}
        content = {"head": head | {"training": "model 7b"}, "tables": {"engines": [engine]}}
        (tmp_path / f"{ranks}.json").write_text(json.dumps(content))
    files = [str(tmp_path / f"{ranks}.json") for ranks in (1, 8)]
    result = run("scaling", *files, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert "94.0 %" in result.output
    (markdown,) = tmp_path.glob("llama-scaling_*.md")
    assert "| fp8booster, FP8 | 8 | 1.0 [1.0-1.0] | 940 | 7520 | 94.0 % |" in markdown.read_text()
    assert "fewest GPUs" in markdown.read_text()
    again = run("scaling", files[0], files[0])
    assert again.exit_code == 2
    assert again.output.startswith("error: two of the results are on 1 GPUs")
