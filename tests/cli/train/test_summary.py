from __future__ import annotations

import json
import math

import pytest

from fp8booster.cli.metrics import StepMetrics, read_figures, read_metrics
from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.summary import layer_lines, rows, write_summary

LAYERS = [
    {"name": "q_proj", "shape": [16, 16], "precision": "FP8", "notes": ""},
    {"name": "lm_head", "shape": [16, 64], "precision": "BF16", "notes": "left out"},
]


@pytest.fixture
def run(tmp_path):
    """A finished run of 40 steps whose FP8 losses lie 1 % above those of BF16."""
    for precision, factor in (("bf16", 1.0), ("fp8", 1.01)):
        folder = tmp_path / precision
        folder.mkdir()
        lines = [
            {
                "step": step,
                "loss": factor * (10 - step / 10),
                "lr": 1e-3,
                "grad_norm": 1.0,
                "tokens_per_second": 100.0 if step > 1 else 1.0,
                "seconds": 0.5,
                "peak_memory": 1 << 20,
                "wire_bytes": 2_000_000,
            }
            for step in range(1, 41)
        ]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        layers = LAYERS if precision == "fp8" else [dict(row, precision="BF16", notes="off") for row in LAYERS]
        result = {"peak_memory": 3 << 20, "parameters": 5_000_000, "world_size": 2, "layers": layers, "traffic": []}
        if precision == "fp8":
            result["others"] = [{"name": "experts.up_proj", "precision": "FP8", "notes": ""}]
        (folder / "result.json").write_text(json.dumps(result))
    return tmp_path


def test_figures_of_a_run(run):
    read = [read_figures(run, precision) for precision in ("bf16", "fp8")]
    columns = [column for column, _ in read]
    assert columns[0].final_loss == pytest.approx((6.1 + 6.0) / 2)  # a twentieth of 40 steps
    assert columns[0].tokens_per_second == 100.0
    table = {title: values for title, *values in rows(columns)}
    assert table["difference from BF16"] == ["", "+1.00 %"]
    assert table["peak memory, MiB a rank"] == ["3", "3"]
    assert table["sent, MB a step and rank"] == ["2.00", "2.00"]
    assert table["linear layers in FP8"] == ["0 of 2", "1 of 2"]
    assert table["other weights in FP8"] == ["", "1 of 1"]
    assert layer_lines(columns) == ["FP8 run, not in FP8: lm_head (left out)"]

    write_summary(run, TrainOptions(batch=4, sequence=64), "fp8booster train", columns, "text, 9 tokens")
    written = (run / "summary.md").read_text()
    for line in ("- command: `fp8booster train`", "| difference from BF16 |  | +1.00 % |", "torch 2."):
        assert line in written
    assert json.loads((run / "summary.json").read_text())["columns"][1]["precision"] == "fp8"


def with_limit(run, reachable):
    """Write into the FP8 run's result what its GPU can do."""
    file = run / "fp8" / "result.json"
    limit = {"flops_per_token": 10**9, "clock_mhz": 1500.0, "peak_flops": 2e11, "reachable_flops": reachable}
    file.write_text(json.dumps(json.loads(file.read_text()) | {"limit": limit}))


def test_speed_is_a_share_of_the_gpu_s_limit(run):
    columns = [read_figures(run, precision)[0] for precision in ("bf16", "fp8")]
    assert not [title for title, *_ in rows(columns) if title.startswith("of ")]
    with_limit(run, 1e11)
    columns[1], _ = read_figures(run, "fp8")
    # 50 tokens a second on each of two GPUs, of 1e9 operations
    assert (columns[1].model_flops, columns[1].clock_mhz) == (5e10, 1500.0)
    table = {title: values for title, *values in rows(columns)}
    assert table["of the FP8 peak at its clock"] == ["", "25.0%"]
    assert table["of what its products reach"] == ["", "50.0%"]
    write_summary(run, TrainOptions(batch=4, sequence=64), "fp8booster train", columns, "text, 9 tokens")
    assert "| of the FP8 peak at its clock |  | 25.0% |" in (run / "summary.md").read_text()
    assert json.loads((run / "summary.json").read_text())["columns"][1]["peak_share"] == 0.25
    with_limit(run, None)
    table = {title: values for title, *values in rows([read_figures(run, "fp8")[0]])}
    assert table["of the FP8 peak at its clock"] == ["25.0%"]
    assert "of what its products reach" not in table


@pytest.mark.parametrize("rate", [0, "much", math.inf])
def test_a_limit_that_no_gpu_has_is_named(run, rate):
    with_limit(run, rate)
    with pytest.raises(
        ValueError, match=r"'limit' in .*result\.json.*; remove the file; --resume of the run writes it"
    ):
        read_figures(run, "fp8")


def test_numbers_that_are_not_finite_are_null_in_json(run):
    file = run / "fp8" / "metrics.jsonl"
    last = json.loads(file.read_text().splitlines()[-1]) | {"step": 41, "loss": math.nan}
    with file.open("a") as stream:
        stream.write(json.dumps(last) + "\n")
    columns = [read_figures(run, precision)[0] for precision in ("bf16", "fp8")]
    assert math.isnan(columns[1].final_loss)
    options = TrainOptions(batch=4, sequence=64, max_norm=math.inf)
    write_summary(run, options, "fp8booster train", columns, "text, 9 tokens")

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    written = json.loads((run / "summary.json").read_text(), parse_constant=refuse)
    assert [column["final_loss"] for column in written["columns"]] == [columns[0].final_loss, None]
    assert written["options"]["max_norm"] is None


def test_a_line_that_a_kill_cut_short_is_left_out(run):
    path = run / "bf16" / "metrics.jsonl"
    with path.open("a") as stream:
        stream.write('{"step": 41, "lo')
    metrics = read_metrics(path)
    assert len(metrics) == 40
    assert isinstance(metrics[0], StepMetrics)


def test_a_result_that_is_wrong_is_named_with_the_remedy(run):
    file = run / "fp8" / "result.json"
    for text in ("{", "null", "{}", '{"peak_memory": "much"}'):
        file.write_text(text)
        with pytest.raises(ValueError, match=r"result\.json.*; remove the file; --resume of the run writes it"):
            read_figures(run, "fp8")


def test_a_run_whose_steps_were_all_left_out_has_no_figures(run):
    (run / "fp8" / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="--on-nonfinite skip"):
        read_figures(run, "fp8")
