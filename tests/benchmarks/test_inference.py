from __future__ import annotations

import json
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import typer
from transformers import DynamicCache, StaticCache
from typer.testing import CliRunner

from benchmarks import inference
from benchmarks.inference import BASELINE, WAYS, Call, Work
from fp8booster.serving.key_value_cache import FP8Cache
from fp8booster.training.models import MODELS, build

SMALL = ["--device", "cpu", "--model", "micro", "--prefill", "2x32", "--batch", "2", "--context", "16"]


def run(*arguments: str) -> object:
    app = typer.Typer()
    app.command()(inference.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_one_sentence_and_exit_code_2() -> None:
    result = run()
    assert result.exit_code == 2
    assert "measures a CUDA GPU and torch finds none" in result.output


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--model", "8b"], "error: --model is '8b'; use one of tiny"),
        (["--way", "int4"], "error: --way is 'int4'; use one of bf16"),
        (["--prefill", "8by2048"], "error: --prefill is '8by2048'; give sequences x tokens, as 8x2048"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = run("--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith(sentence)


def test_every_way(tmp_path) -> None:
    file = tmp_path / "inference.json"
    result = run(*SMALL, "--rounds", "2", "--sample-ms", "0.01", "--json", str(file))
    assert result.exit_code == 0, result.output
    found = json.loads(file.read_text())
    absent = {name for name, way in WAYS.items() if way.needs and find_spec(way.needs) is None}
    assert set(found["left_out"]) == {WAYS[name].label for name in absent}
    present = [name for name in WAYS if name not in absent]
    calls = found["tables"]["calls"]
    assert [call["failed"] for call in calls] == [None] * len(calls)
    prefill, from_python, in_a_graph = (
        {call["way"]: call for call in calls if call["work"] == label}
        for label in dict.fromkeys(call["work"] for call in calls)
    )
    assert list(prefill) == list(from_python) == present
    assert list(in_a_graph) == [name for name in present if name != "fp8-cache"]
    for call in calls:
        assert call["tokens_per_second"] == pytest.approx(1e3 * call["tokens"] / call["ms"]["median"])
    assert (
        from_python[BASELINE]["cache_bytes"] == 2 * 2 * 16 * 32 * 2 * 2
    )  # k and v, batch, tokens, values, layers, bytes
    assert in_a_graph[BASELINE]["cache_bytes"] == from_python[BASELINE]["cache_bytes"] * 17 / 16
    assert from_python["fp8-cache"]["cache_bytes"] < 0.7 * from_python[BASELINE]["cache_bytes"]
    models = {record["way"]: record for record in found["tables"]["models"]}
    assert list(models) == [name for name in present if name != "fp8-cache"]
    for name, record in models.items():
        in_16_bits = WAYS[name].label.startswith("BF16")
        assert record["error"] == 0 if in_16_bits else 0 < record["error"] < 0.1
        assert in_16_bits or record["bytes"] < 0.8 * models[BASELINE]["bytes"]


@pytest.mark.parametrize("kind", ["dynamic", "static", "fp8"])
@torch.no_grad()
def test_each_decode_finds_the_same_cache(kind: str) -> None:
    torch.manual_seed(0)
    model = build(MODELS["micro"].config(32), device=torch.device("cpu")).eval()
    static = partial(StaticCache, model.config, max_batch_size=2, max_cache_len=17, device="cpu", dtype=torch.bfloat16)
    cache = {"dynamic": DynamicCache, "static": static, "fp8": FP8Cache}[kind]
    work = Work(batch=2, tokens=1, context=16, static=kind == "static")
    call = Call(model, work, cache, torch.tensor([[1], [2]]))
    before = call()
    torch.manual_seed(1)
    call = Call(model, work, cache, torch.tensor([[1], [2]]))
    call.fill(2, 2, 16)
    first, second = call(), call()
    assert torch.equal(first, second)
    assert not torch.equal(first, before)
    torch.manual_seed(1)
    exact = Call(model, Work(batch=2, tokens=1, context=16), DynamicCache, torch.tensor([[1], [2]]))
    exact.fill(2, 2, 16)
    assert (first - exact()).norm() < 0.05 * first.norm()
