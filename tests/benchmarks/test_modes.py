from __future__ import annotations

import json
import os

import pytest
import typer
from typer.testing import CliRunner

from benchmarks import modes
from benchmarks.training.job import Job
from benchmarks.training.modes import BF16, FP8, MODES, job_of, mode_record, mode_table, why_not
from benchmarks.training.records import Setting
from benchmarks.training.rounds import Findings
from tests.programs import run_program

BASE = Job(model="micro", layers=4, sequence=32, micro_batch=1, device="cpu")


@pytest.mark.parametrize("name", MODES)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_mode_has_a_job_that_gives_every_rank_as_many_tokens(name: str, ranks: int) -> None:
    if why_not(name, ranks) is not None:
        assert (name, ranks) == ("tp-pp", 2)
        return
    job = job_of(name, BASE, "micro-mixtral", ranks)
    replicas = ranks // (job.tp * job.pp * job.sp)
    tokens = replicas * job.micro_batches * job.micro_batch * job.sequence
    assert tokens == ranks * BASE.micro_batch * BASE.sequence * (job.micro_batches // job.pp)
    assert job.ep == (ranks if job.plugin == "moe" else 1)


def test_what_too_few_ranks_are_told() -> None:
    assert why_not("tp-pp", 2) == "it needs a multiple of 4 ranks, and there are 2"
    assert why_not("gemini-tp", 3) == "it needs a multiple of 2 ranks, and there are 3"
    assert why_not("fsdp", 3) is None


def test_a_mode_that_failed_in_bf16_keeps_what_fp8_took() -> None:
    job = job_of("tp", BASE, "micro-mixtral", 4)
    outcome = {
        "step_ms": [20.0, 10.0, 30.0],
        "rank_ms": [20.0] * 4,
        "host_ms": [5.0, 6.0, 7.0],
        "losses": [6.0, 5.0, 4.0],
        "peak_bytes": 3 << 30,
        "reserved_bytes": 4 << 30,
        "power": None,
        "replicas": 2,
        "wire": {"bytes": 100.0},
        "layers": "FP8: 28 of 29 linear layers",
        "fused": None,
        "parts": None,
        "build_s": 1.0,
    }
    import torch

    from benchmarks.harness.environment import gpu_of

    setting = Setting(job, 4, gpu_of(torch.device("cpu")))
    findings = {FP8: Findings(outcomes={0: outcome}), BF16: Findings(reason="out of GPU memory")}
    record = mode_record("tp", findings, BASE, setting)
    assert record["failed"] == {BF16: "out of GPU memory"}
    assert record["speed"] is None
    row = [column.show(record) for column in mode_table([record]).columns]
    assert row == [
        "HybridParallelPlugin, tp_size=2, ZeRO 1, 2 replicas",
        "`--plugin hybrid --zero 1 --tp 2 --micro-batch 2`",
        "-",
        "20.0 [12.0-28.0]",
        "-",
        str(round(1e3 * 2 * 2 * 32 / 20.0 / 4)),
        "6.0 [5.2-6.8]",
        "-, 3.0",
        "-",
    ]
    findings[BF16] = Findings(outcomes={0: outcome | {"step_ms": [40.0], "wire": {"bytes": 300.0}}})
    record = mode_record("tp", findings, BASE, setting)
    assert record["speed"]["median"] == pytest.approx(2.0)
    row = [column.show(record) for column in mode_table([record]).columns]
    assert row[2] == "40.0 [40.0-40.0]"
    assert row[4] == "2.00"
    assert row[-2:] == ["3.0, 3.0", "0.33"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--only", "ep"], "error: no mode is called 'ep'; --only takes zero, tp"),
        (["--mixture", "micro"], "error: --plugin moe trains mixtures of experts; use --model"),
        (["--model", "8b"], "error: --model is '8b'; use one of"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    app = typer.Typer()
    app.command()(modes.main)
    result = CliRunner().invoke(app, ["--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(sentence)


def test_the_whole_command_on_two_ranks(tmp_path) -> None:
    command = ["benchmarks.modes", "--device", "cpu", "--only", "tp", "--only", "tp-pp"]
    command += ["--model", "micro", "--sequence", "32", "--micro-batch", "1", "--fp8-option", "emulate=true"]
    command += ["--warm-up", "1", "--steps", "3", "--bf16-steps", "2"]
    command += ["--out", str(tmp_path), "--json", str(tmp_path / "a.json"), "--engine-logs", str(tmp_path)]
    done = run_program(*command, environment=os.environ | {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["head"]["ranks"] == "2"
    assert found["left_out"] == {"tp-pp": "it needs a multiple of 4 ranks, and there are 2"}
    (mode,) = found["tables"]["modes"]
    assert mode["failed"] == {}
    assert [len(mode["engines"][engine]["ms"]["values"]) for engine in (BF16, FP8)] == [2, 3]
    assert mode["speed"]["median"] == pytest.approx(
        mode["engines"][BF16]["ms"]["median"] / mode["engines"][FP8]["ms"]["median"]
    )
    assert "28 of 29 linear layers" in mode["engines"][FP8]["layers"]
    assert mode["losses"][FP8][0] == pytest.approx(mode["losses"][BF16][0], rel=0.01)
    (markdown,) = tmp_path.glob("modes-2_*.md")
    assert "HybridParallelPlugin, tp_size=2, ZeRO 1 |" in markdown.read_text()
    assert list((tmp_path / "tp").glob("fp8booster-fp8-turn-0-rank-1.log"))
