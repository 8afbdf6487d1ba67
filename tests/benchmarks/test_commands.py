from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks import accumulation, adamw, attention, cast, energy, gemm, host_step, linear, made_again, speed_model
from benchmarks.harness import products, timing
from benchmarks.layers.layer import Layer
from benchmarks.layers.records import summarize
from fp8booster.monitor import power
from tests.distributed import run_ranks

FAST = ["--device", "cpu", "--rounds", "2", "--sample-ms", "0.01"]


def run(main: Callable[..., None], *arguments: str) -> object:
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to measure")
@pytest.mark.parametrize(
    "main",
    [
        gemm.main,
        cast.main,
        made_again.main,
        speed_model.main,
        linear.main,
        accumulation.main,
        adamw.main,
        energy.main,
        attention.main,
    ],
)
def test_without_a_gpu_one_sentence_and_exit_code_2(main) -> None:
    result = run(main)
    assert result.exit_code == 2
    assert "measures a CUDA GPU and torch finds none" in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_what_is_made_again_is_timed_in_one_pass_and_in_two(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(made_again, "SHAPES", {"SwiGLU": (48,), "norm": (64,)})
    file = tmp_path / "made-again.json"
    result = run(made_again.main, *FAST, "--tokens", "32", "--json", str(file))
    assert result.exit_code == 0, result.output
    records = json.loads(file.read_text())["tables"]["made again"]
    assert [(each["kind"], each["coded"]) for each in records] == [
        ("SwiGLU", False),
        ("SwiGLU", True),
        ("norm", False),
        ("norm", True),
    ]
    assert [each["bytes"] / 32 for each in records] == [48 * 5, 48 * 3, 64 * 3, 64 * 2]
    assert all(each["ms"][way]["median"] > 0 for each in records for way in ("one pass", "two"))


def host_records(file: Path, options: list[str]) -> list[dict]:
    result = run(host_step.main, *options, "--buckets", "2", "--steps", "1", "--json", str(file))
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())["tables"]["step"]


@pytest.mark.parametrize("options", [["--layers", "2"], ["--layers", "2", "--model", "micro-moe", "--engine", "plain"]])
def test_replayed_layers_take_fewer_calls_of_python_in_a_step(tmp_path, options: list[str]) -> None:
    pytest.importorskip("triton")
    file = tmp_path / "host-step.json"
    ((one_by_one, replayed),) = run_ranks(host_records, 1, file, options, initialize=False)
    assert not one_by_one["graphs"]
    assert replayed["graphs"]
    for record in (one_by_one, replayed):
        assert list(record["ms"]) == list(record["python_calls"]) == [*host_step.PHASES, "all"]
        assert record["ms"]["all"]["median"] > 0
    for phase in ("forward", "backward"):
        assert replayed["python_calls"][phase] < one_by_one["python_calls"][phase]


def records_of_spread_experts(file: Path) -> list[dict]:
    arguments = ["--model", "micro-mixtral", "--engine", "ep2", "--layers", "2", "--buckets", "2", "--steps", "1"]
    result = run(host_step.main, *arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    return json.loads(file.read_text())["tables"]["behind waits"]


def test_launches_behind_the_waits_of_spread_experts_are_told_apart(tmp_path) -> None:
    pytest.importorskip("triton")
    (records,) = run_ranks(records_of_spread_experts, 1, tmp_path / "host-step.json", initialize=False)
    for record in records:
        ms = record["ms"]
        for counts in (record["python_calls"], record["launches"]):
            assert 0 <= counts["exchange"] < counts["first product"] < counts["last product"] < counts["forward"]
        assert 0 < ms["exchange"]["median"] < ms["last product"]["median"]


def test_experts_are_spread_over_two_ranks_by_one_engine_alone() -> None:
    result = run(host_step.main, "--model", "micro-mixtral", "--engine", "zero1")
    assert result.exit_code != 0
    assert "go together" in result.output


def test_energy(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(timing, "_BURST_MS", 0.01)
    file = tmp_path / "energy.json"
    arguments = ["--device", "cpu", "--models", "micro", "--tokens", "16", "--seconds", "0.001"]
    monkeypatch.setattr(power.PowerMeter, "draw", lambda self, begin, end: power.Draw(1500.0, 700.0, 1.0))
    result = run(energy.main, *arguments, "--json", str(file))
    assert result.exit_code == 0, result.output
    records = json.loads(file.read_text())["tables"]["products"]
    assert {record["direction"] for record in records} == {"fprop", "dgrad", "wgrad"}
    for record in records:
        assert list(record["kinds"]) == [kind.name for kind in energy.KINDS]
        for found in record["kinds"].values():
            assert found["failed"] is None
            assert found["ms"] > 0
            assert found["mj"] == pytest.approx(700 * found["ms"])
    first = records[0]["kinds"]["E4M3"]
    assert f"{first['mj']:.0f} ({first['ms']:.3f}, 1500, 700)" in result.output


def test_a_product_that_does_not_run_is_left_out(tmp_path, monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setattr(timing, "_BURST_MS", 0.01)
    monkeypatch.setattr(products, "product", fails)
    arguments = ["--device", "cpu", "--models", "micro", "--tokens", "16", "--seconds", "0.001"]
    result = run(energy.main, *arguments, "--json", str(tmp_path / "energy.json"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "energy.json").read_text())
    assert set(found["left_out"].values()) == {"no kernel"}
    assert "E5M2, wgrad of micro LLaMA gate+up" in found["left_out"]
    assert not any(name.startswith("BF16") for name in found["left_out"])
    assert found["tables"]["products"][0]["kinds"]["BF16"]["ms"] > 0


def test_gemm(tmp_path) -> None:
    result = run(
        gemm.main,
        *FAST,
        "--models",
        "micro",
        "--tokens",
        "16",
        "--square",
        "16",
        "--square",
        "32",
        "--out",
        str(tmp_path),
        "--json",
        str(tmp_path / "gemm.json"),
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "gemm.json").read_text())
    layers = found["tables"]["layers"]
    assert {record["direction"] for record in layers} == {"fprop", "dgrad", "wgrad"}
    for record in [*layers, *found["tables"]["squares"]]:
        flops = 2 * record["rows"] * record["inner"] * record["columns"]
        bf16 = record["BF16"]
        assert bf16["tflops"] == pytest.approx(flops / bf16["ms"]["median"] / 1e9)
        assert bf16["ratio"]["median"] == 1.0
        assert bf16["fraction"] == pytest.approx(bf16["tflops"] / bf16["roofline_tflops"])
    (markdown,) = tmp_path.glob("gemm_*.md")
    (plot,) = tmp_path.glob("gemm_*.png")
    assert plot.name in markdown.read_text()
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_cast(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # seconds for each
    result = run(cast.main, *FAST, "--shape", "32x48", "--json", str(tmp_path / "cast.json"))
    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / "cast.json").read_text())["tables"]["casts"]
    assert [record["work"] for record in records] == [kind.name for kind in cast.KINDS]
    for record in records:
        assert record["over_floor"] == pytest.approx(record["copy_bytes_per_second"] / record["bytes_per_second"])
        assert record["floor_ms"] == pytest.approx(1e3 * record["bytes"] / record["copy_bytes_per_second"])


def test_a_shape_that_is_none() -> None:
    result = run(cast.main, "--shape", "32")
    assert result.exit_code == 2
    assert "8192x4096" in result.output


def test_linear_leaves_out_what_fails_and_what_is_missing(tmp_path, monkeypatch) -> None:
    def fails(weight: torch.Tensor) -> None:
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setitem(linear.LAYERS, "torchao", Layer("torchao", fails, is_peer=True))
    monkeypatch.setitem(linear.LAYERS, "te", Layer("TE", fails, lambda: "it is not installed", is_peer=True))
    names = ["--layer", "fp8booster", "--layer", "fp8booster-amax", "--layer", "torchao", "--layer", "te"]
    result = run(
        linear.main, *FAST, *names, "--models", "micro", "--tokens", "16", "--json", str(tmp_path / "linear.json")
    )
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "linear.json").read_text())
    assert found["left_out"]["TE"] == "it is not installed"
    assert found["left_out"]["torchao, 16 x 64 -> 64"] == "it failed: RuntimeError: no kernel"
    assert "left out" in result.output
    for record in found["tables"]["shapes"]:
        m, k, n = record["shape"]
        products = sum(product["ms"]["median"] for product in record["products"].values())
        casts = 1e3 * 6 * m * (k + n) / record["copy_bytes_per_second"]
        ours, delivered = record["layers"]["fp8booster"], record["layers"]["fp8booster-amax"]
        assert ours["roofline_ms"] == pytest.approx(products + casts)
        assert ours["fraction"] == pytest.approx(ours["roofline_ms"] / ours["ms"]["median"])
        assert products < delivered["roofline_ms"] < ours["roofline_ms"]


def test_a_layer_of_ours_that_fails_ends_the_benchmark(monkeypatch) -> None:
    def fails(weight: torch.Tensor) -> None:
        raise RuntimeError("broken")

    monkeypatch.setitem(linear.LAYERS, "fp8booster", Layer("fp8booster", fails))
    result = run(linear.main, *FAST, "--layer", "fp8booster", "--models", "micro", "--tokens", "16")
    assert isinstance(result.exception, RuntimeError)


def test_a_layer_that_is_none() -> None:
    result = run(linear.main, "--layer", "megatron", "--device", "cpu")
    assert result.exit_code == 2
    assert "megatron" in result.output


def test_breakdown_accounts_for_the_whole_step(monkeypatch, tmp_path) -> None:
    kernels = {"nvjet_x": 3.0, "amax_kernel": 1.0, "cast_kernel": 2.0, "memset": 0.5}
    monkeypatch.setattr(linear, "kernel_us", lambda run, repeats: run() or kernels)
    result = run(
        linear.main,
        *FAST,
        "--layer",
        "fp8booster",
        "--profile",
        "fp8booster",
        "--models",
        "micro",
        "--tokens",
        "16",
        "--json",
        str(tmp_path / "linear.json"),
    )
    assert result.exit_code == 0, result.output
    assert "Where the microseconds of a step go" in result.output
    tables = json.loads((tmp_path / "linear.json").read_text())["tables"]
    for row, record in zip(tables["breakdown"], tables["shapes"], strict=True):
        assert (row["products"], row["casts"], row["other"]) == (3.0, 3.0, 0.5)
        step_us = 1e3 * record["layers"]["fp8booster"]["ms"]["median"]
        assert row["idle"] + sum(kernels.values()) == pytest.approx(step_us)
        assert row["products_alone"] + row["casts_floor"] == pytest.approx(
            1e3 * record["layers"]["fp8booster"]["roofline_ms"]
        )


def test_summary_is_over_all_shapes() -> None:
    records = [
        {"layers": {"fp8booster": {"over_bf16": {"median": ratio}, "fraction": fraction}}}
        for ratio, fraction in [(1.5, 0.9), (1.7, 0.95), (1.6, 0.99)]
    ]
    (row,) = summarize(records, ["fp8booster", "torchao"])
    assert row == {
        "name": "fp8booster",
        "shapes": 3,
        "over_bf16": {"median": 1.6, "least": 1.5, "most": 1.7},
        "over_torchao": None,
        "fraction": {"median": 0.95, "least": 0.9, "most": 0.99},
    }


def test_adamw(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(adamw, "LAYER", (64, 128))
    command = [*FAST, "--ranks", "2", "--layers", "1", "--json", str(tmp_path / "adamw.json")]
    result = run(adamw.main, *command, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    records = json.loads((tmp_path / "adamw.json").read_text())["tables"]["steps"]
    assert [record["values"] for record in records] == [96] * 5
    for record in records:
        ms = record["ms"]["median"]
        fewest = 14 if "8-bit" in record["way"] else 28
        assert record["bytes_per_second"] == pytest.approx(96 * fewest / ms * 1e3)
        assert record["over_one_pass"] == pytest.approx(ms / records[0]["ms"]["median"])


@pytest.mark.parametrize("data", accumulation.DATA)
@pytest.mark.parametrize("kind", ["fprop", "dgrad", "wgrad"])
def test_accumulation_separates_rounding_from_sums(kind, data) -> None:
    torch.manual_seed(0)
    operands = accumulation.operands(kind, data, (64, 48, 80), torch.device("cpu"))
    assert operands[0].shape[1] == operands[1].shape[1] == {"fprop": 48, "dgrad": 80, "wgrad": 64}[kind]
    found = accumulation.errors(kind, *operands)
    assert 1e-3 < found["rounding"] < 0.1
    # the CPU adds in FP32: what is left of the sums' own error is the rounding of the result to BF16
    assert found["exact_sums"] == found["fast_sums"] < 3e-3
    assert abs(found["shrinks"]) < 1e-3


def test_the_speed_model_shows_what_the_model_chooses() -> None:
    slow, fast = (speed_model.record_of(1024, 512, 512, 10.0, fp8_us, 10.0 / fp8_us) for fp8_us in (20.0, 5.0))
    assert [column.show(slow) for column in speed_model.COLUMNS][3:] == ["0.50", "0.50", "BF16"]
    assert [column.show(fast) for column in speed_model.COLUMNS][3:] == ["2.00", "2.00", "FP8"]


@pytest.mark.gpu
def test_the_speed_model_measures() -> None:
    # other processes of the suite may use the GPU meanwhile, and take their time from either layer
    records = (speed_model.measure(4096, 4096, 4096, torch.device("cuda", 0), rounds=3) for _ in range(5))
    assert any(record["speedup"] > 1 for record in records)


def test_attention(tmp_path) -> None:
    sizes = ["--heads", "4x2", "--features", "16", "--tokens", "64", "--mean", "32"]
    result = run(attention.main, *FAST, *sizes, "--json", str(tmp_path / "attention.json"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "attention.json").read_text())
    by_kernel = {record["kernel"]: record for record in found["tables"]["kernels"]}
    assert by_kernel.keys() == {attention.CHOSEN, "flash attention", attention.PACKED, attention.MASKED}
    assert found["left_out"].keys() == {"cuDNN, 4 x 2 heads", "memory-efficient, 4 x 2 heads"}
    lengths = [32, 48, 16, 32]
    for name, pairs in ((attention.CHOSEN, 2 * 64**2 / 2), (attention.PACKED, sum(each**2 for each in lengths) / 2)):
        record = by_kernel[name]
        assert record["tflops"] == pytest.approx(14 * pairs * 4 * 16 / record["ms"]["median"] / 1e9)
    assert attention.uneven(128, 32) == [0, 32, 80, 96, 128]


def test_what_packing_and_a_mask_attend_to_is_the_same() -> None:
    q, k, v = torch.randn(3, 1, 4, 128, 16)
    ways = attention.attentions(2, 64, 32, torch.device("cpu"))
    packed, masked = (ways[name][0](q, k, v) for name in (attention.PACKED, attention.MASKED))
    torch.testing.assert_close(packed, masked)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--heads", "32"], "write heads of queries"), (["--flash", "FA9", "--device", "cpu"], "FA9 cannot be activated")],
)
def test_attention_that_is_none(arguments: list[str], message: str) -> None:
    result = run(attention.main, *arguments)
    assert result.exit_code == 2
    assert message in result.output
