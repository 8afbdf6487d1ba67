from __future__ import annotations

import json

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import experts
from benchmarks.routed import implementations
from benchmarks.routed.implementations import KINDS
from benchmarks.routed.whole import WHOLE_KINDS, WholeWork
from benchmarks.routed.work import LAYERS, Products, Work, relative_errors, uneven_loads
from fp8booster.nn.experts import grouped as grouped_experts
from tests.kernels.grouped_stand_in import stand_in

SMALL = ["--device", "cpu", "--layer", "tiny", "--tokens", "96", "--rounds", "2", "--sample-ms", "0.01"]


def run(*arguments: str) -> object:
    app = typer.Typer()
    app.command()(experts.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
def test_without_a_gpu_one_sentence_and_exit_code_2() -> None:
    result = run()
    assert result.exit_code == 2
    assert "measures a CUDA GPU and torch finds none" in result.output


def test_a_layer_that_is_none() -> None:
    result = run("--layer", "switch")
    assert result.exit_code == 2
    assert "mixtral" in result.output


def test_loads_are_uneven_and_always_the_same() -> None:
    for layer in LAYERS.values():
        loads = uneven_loads(8192, layer.experts)
        assert loads == uneven_loads(8192, layer.experts)
        assert len(loads) == layer.experts
        assert sum(loads) == 8192
        assert max(loads) > 1.5 * min(loads)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("loads", [(20, 0, 33, 11), (16, 16, 16, 16)])
def test_every_way_computes_the_products(name: str, loads: tuple[int, ...], monkeypatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    layer, tokens = LAYERS["tiny"], sum(loads)
    x, dy = (torch.randn(tokens, size).bfloat16() for size in (layer.inputs, layer.outputs))
    work = Work(layer, loads, x, dy, torch.randn(layer.experts, layer.outputs, layer.inputs).bfloat16())
    way = KINDS[name].make(work)
    for _ in range(2):  # the second finds what the first left
        errors = relative_errors(way.products(), work.reference())
        assert max(errors.values()) < KINDS[name].tolerance
    assert way.forward().shape[-1] == layer.outputs


@pytest.mark.parametrize("name", WHOLE_KINDS)
def test_every_way_computes_whole_experts(name: str, monkeypatch) -> None:
    stand_in(monkeypatch)
    torch.manual_seed(0)
    work = WholeWork.random(LAYERS["tiny"], 50, torch.device("cpu"))
    way, record = experts.checked(WHOLE_KINDS[name], work, work.reference())
    assert record["failed"] is None
    assert all(parameter.grad is not None for parameter in way.parameters())
    assert way.forward().shape == work.x.shape


def test_whole_experts_that_are_not_grouped_are_not_measured_as_such(monkeypatch) -> None:
    monkeypatch.setattr(grouped_experts, "why_no_grouped_product", lambda *_: "no such product")
    work = WholeWork.random(LAYERS["tiny"], 50, torch.device("cpu"))
    way, record = experts.checked(WHOLE_KINDS["fp8-grouped"], work, work.reference())
    assert way is None
    assert record["failed"] == "RuntimeError: not grouped: no such product"


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_every_way_computes_the_products_on_a_gpu(name: str) -> None:
    torch.manual_seed(0)
    work = Work.random(LAYERS["tiny"], 500, torch.device("cuda", 0))
    way, record = experts.checked(KINDS[name], work, work.reference())
    assert record["failed"] is None
    assert way.forward().is_cuda


def test_errors_are_seen() -> None:
    work = Work.random(LAYERS["tiny"], 50, torch.device("cpu"))
    exact = work.reference()
    wrong = exact._replace(dw=exact.dw.roll(1, 0), dx=exact.dx / 0)
    errors = relative_errors(Products(*wrong), exact)
    assert errors["y"] == 0
    assert errors["dx"] == float("inf")
    assert errors["dw"] > 0.5
    with pytest.raises(ValueError, match="y has shape"):
        relative_errors(exact._replace(y=exact.y[1:]), exact)


def test_a_way_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("no such kernel\nmore")

    class Wrong(implementations.Grouped):
        def compute(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().compute(x)

    stand_in(monkeypatch, refused)
    monkeypatch.setitem(KINDS, "bf16-grouped", implementations.Candidate("wrong", Wrong, 0.01))
    result = run(*SMALL, "--out", str(tmp_path), "--json", str(tmp_path / "experts.json"))
    assert result.exit_code == 0, result.output
    tables = json.loads((tmp_path / "experts.json").read_text())["tables"]
    assert {record["way"]: record["failed"] for record in tables["whole"]} == {
        "bf16": None,
        "fp8": None,
        "fp8-grouped": "RuntimeError: no such kernel",
    }
    records = tables["experts"]
    assert len(records) == 2 * len(KINDS)
    for record in records:
        if record["way"].startswith("fp8-grouped"):
            assert record["failed"] == "RuntimeError: no such kernel"
        elif record["way"] == "bf16-grouped":
            assert record["failed"].startswith("largest errors over the largest values: y ")
        else:
            flops = 2 * 96 * 64 * 96 * (1 if record["products"] == "fprop" else 3)
            assert record["tflops"] == pytest.approx(flops / record["ms"]["median"] / 1e9)
    assert "failed: RuntimeError: no such kernel |" in result.output
    assert list(tmp_path.glob("experts_*.md"))


def test_timing_that_fails_is_said_too(monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(experts, "time_interleaved", fails)
    work = Work.random(LAYERS["tiny"], 50, torch.device("cpu"))
    records = experts.measure(work, KINDS, device=torch.device("cpu"), rounds=1, sample_ms=0.01)
    assert {record["failed"] for record in records if record["way"] == "bf16"} == {"RuntimeError: device lost"}
