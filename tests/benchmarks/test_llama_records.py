from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from benchmarks.harness.environment import Gpu
from benchmarks.training.flops import model_flops, native_flops
from benchmarks.training.job import Job
from benchmarks.training.launch import Turn
from benchmarks.training.output import Output, deliver
from benchmarks.training.records import Setting, engine_records, loss_records
from benchmarks.training.rounds import Findings, take_rounds
from benchmarks.training.scaling import read_runs, scaling_records, scaling_table
from benchmarks.training.tables import loss_table, power_table, step_table, wire_tables
from benchmarks.training.trace import ROWS, profile_tables

H200 = Gpu("NVIDIA H200", (9, 0), 132, "580", 1.98e9, "700 W")
JOB = Job(sequence=4096, micro_batch=2, micro_batches=3)


def outcome(step_ms: list[float], **other: Any) -> dict[str, Any]:
    """Of 8 ranks; as `measure.measure` gives it."""
    return {
        "step_ms": step_ms,
        "rank_ms": [10.0, 11.0, 12.0, 9.0, 10.0, 10.0, 10.0, 10.0],
        "host_ms": step_ms,
        "losses": [5.0, 4.0, 3.0],
        "peak_bytes": 2**30,
        "reserved_bytes": 2**31,
        "power": {"mhz": [1500.0] * 8, "watts": [500.0] * 8, "limited": [1.0] * 4 + [0.5] * 4},
        "replicas": 8,
        "wire": {"bytes": 3 * 2**20, "most": 4 * 2**20, "unseen": 0, "rows": [], "fp8": []},
        "parts": None,
        "layers": None,
        "fused": None,
        "build_s": 1.0,
    } | other


def findings(**engines: list[list[float]]) -> dict[str, Findings]:
    """Steps of each round by engine, whose name has _ for -."""
    return {
        name.replace("__", "-"): Findings({i: outcome(ms) for i, ms in enumerate(rounds)})
        for name, rounds in engines.items()
    }


def test_rates_follow_from_the_slowest_ranks_median() -> None:
    found = findings(fp8booster__fp8=[[900.0, 1000.0, 1100.0], [1000.0, 1000.0, 4000.0]])
    (record,) = engine_records(found, Setting(JOB, 8, H200), "fp8booster-fp8")
    assert record["ms"]["median"] == 1000
    assert len(record["ms"]["values"]) == 6
    assert record["slowest_rank"] == 2
    # 8 replicas of 3 micro-batches of 2 sequences in a second, on 8 GPUs
    assert record["tokens"] == 8 * 3 * 2 * 4096
    assert record["tokens_per_second_per_gpu"] == 3 * 2 * 4096
    flops = model_flops(JOB) * 3 * 2 * 4096
    assert record["model_tflops"] == pytest.approx(1e-12 * flops)
    assert record["utilisation"]["FP8"] == pytest.approx(flops / (132 * 8192 * 1.98e9))
    assert record["utilisation"]["BF16"] == pytest.approx(2 * record["utilisation"]["FP8"])
    assert record["native_tflops"] == pytest.approx(1e-12 * 6 * 6_738_415_616 * 3 * 2 * 4096)
    assert record["peak_bytes"] == 2**30


def test_operations_by_colossalai_s_formula() -> None:
    parameters = 6_738_415_616
    assert native_flops(JOB) == 6 * parameters
    assert native_flops(replace(JOB, checkpointing=True)) == 8 * parameters
    for unknown in ({"checkpointing": True, "checkpointed_layers": 2}, {"lora": 8}, {"model": "micro-mixtral"}):
        assert native_flops(replace(JOB, **unknown)) is None


def test_frozen_weights_have_no_gradients() -> None:
    assert 4 / 6 < model_flops(replace(JOB, lora=8)) / model_flops(JOB) < 4.2 / 6


def test_energy_is_that_of_all_gpus() -> None:
    found = findings(fp8booster__fp8=[[1000.0]], torchao=[[1000.0]])
    found["torchao"].outcomes[0]["power"] = None
    records = engine_records(found, Setting(JOB, 8, H200), "fp8booster-fp8")
    table = power_table(records)
    (row,) = table.records
    assert row["label"] == "fp8booster, FP8"
    assert row["tokens_per_joule"] == pytest.approx(8 * 3 * 2 * 4096 / (8 * 500))
    shown = [column.show(row) for column in table.columns]
    assert shown[1:4] == [", ".join(["1500"] * 8), ", ".join(["500"] * 8), ", ".join(["100 %"] * 4 + ["50 %"] * 4)]
    assert power_table(engine_records({"torchao": found["torchao"]}, Setting(JOB, 8, H200), "torchao")) is None


def test_a_result_says_of_which_engines_power_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    found = findings(fp8booster__fp8=[[1000.0]], torchao=[[1000.0]])
    found["fsdp2"] = Findings({}, "RuntimeError: gone")

    def head() -> dict[str, str]:
        output = Output(None, tmp_path / "result.json", None)
        deliver(found, Setting(replace(JOB, device="cuda"), 8, H200), "torchao", output, shown=False)
        return json.loads(output.json_file.read_text())["head"]

    assert "clocks and power" not in head()
    found["torchao"].outcomes[0]["power"] = None
    assert head()["clocks and power"] == (
        "not known of torchao tensorwise, FP8 all-gather, FSDP2, compiled, for nvidia-smi did not answer with both for "
        "the GPU of every rank while steps were timed"
    )


def test_ranks_of_one_replica_share_its_tokens() -> None:
    found = {"colossal-hybrid": Findings({0: outcome([1000.0], replicas=4)})}
    (record,) = engine_records(found, Setting(JOB, 8, H200), "colossal-hybrid")
    assert record["tokens_per_second_per_gpu"] == 4 * 3 * 2 * 4096 / 8


def test_ratios_are_taken_round_by_round_in_which_both_ran() -> None:
    found = findings(fsdp2=[[1000.0], [2000.0], [1000.0]], fp8booster__fp8=[[500.0], [800.0]])
    found["fp8booster-fp8"].reason = "RuntimeError: gone"
    base, ours = engine_records(found, Setting(JOB, 8, H200), "fsdp2")
    assert ours["over_baseline"]["values"] == base["ours_over"]["values"] == [2.0, 2.5]
    assert base["over_baseline"]["values"] == [1.0, 1.0, 1.0]
    assert ours["failed"] == "RuntimeError: gone"


def test_an_engine_that_never_ran_is_a_row_without_figures() -> None:
    found = findings(fp8booster__bf16=[[1000.0]]) | {"torchao": Findings(reason="torchao is not installed")}
    records = engine_records(found, Setting(JOB, 8, H200), "fp8booster-bf16")
    assert records[1]["failed"] == "torchao is not installed"
    assert records[1]["over_baseline"] is None
    table = step_table(records, "fp8booster-bf16")
    *_, row = table.markdown().splitlines()
    assert row.startswith("| torchao tensorwise, FP8 all-gather, FSDP2, compiled (left out) | -")
    console = Console(width=250)
    with console.capture() as shown:
        console.print(table.rich())
    assert "(left out)" in shown.get()


def test_turns_alternate_and_end_for_what_fails() -> None:
    taken = []
    seen = []

    def turn(number: int, name: str) -> Turn:
        taken.append((number, name))
        if (number, name) == (1, "b"):
            return Turn(None, "out of GPU memory")
        return Turn({"round": number}, None)

    found = take_rounds(
        ["a", "b", "c", "d"],
        rounds=3,
        missing={"c": "it is not installed"},
        turn=turn,
        after_turn=lambda found, ended: seen.append((ended, sum(len(each.outcomes) for each in found.values()))),
    )
    assert taken == [(0, "a"), (0, "b"), (0, "d"), (1, "a"), (1, "b"), (1, "d"), (2, "a"), (2, "d")]
    assert found["b"] == Findings({0: {"round": 0}}, "out of GPU memory")
    assert found["c"] == Findings({}, "it is not installed")
    # after each turn and once more at the end of a round; one of the 8 turns failed
    assert seen == [
        *((False, 1), (False, 2), (False, 3), (True, 3)),
        *((False, 4), (False, 4), (False, 5), (True, 5)),
        *((False, 6), (False, 7), (True, 7)),
    ]


def test_losses_are_compared_over_the_last_tenth() -> None:
    curve = [5.0] * 18 + [2.0, 4.0]
    found = {
        "fp8booster-bf16": Findings({0: outcome([1.0], losses=curve)}),
        "fp8booster-fp8": Findings({0: outcome([1.0], losses=[5.0] * 18 + [2.0, 4.03])}),
        "torchao": Findings(reason="it is not installed"),
    }
    records = loss_records(found, "fp8booster-bf16")
    assert [record["last"] for record in records] == [3.0, pytest.approx(3.015)]
    assert records[1]["difference"] == pytest.approx(0.005)
    assert "+0.50 %" in loss_table(records, "fp8booster-bf16").markdown()


def test_what_was_learned_by_heart_is_not_compared() -> None:
    found = {
        "fp8booster-bf16": Findings({0: outcome([1.0], losses=[10.0] * 9 + [0.001])}),
        "fp8booster-fp8": Findings({0: outcome([1.0], losses=[10.0] * 9 + [0.002])}),
    }
    records = loss_records(found, "fp8booster-bf16")
    assert [record["difference"] for record in records] == [None, None]
    assert "+100.00 %" not in loss_table(records, "fp8booster-bf16").markdown()


def test_only_engines_with_kernels_are_broken_down() -> None:
    ms = dict.fromkeys(ROWS, 1.0) | {"step": 9.0, "hidden communication": 2.0}
    kernel = {"kernel": "nvjet|x", "part": "products", "ms": 3.0}
    of_cpu = {"ms": ms, "kernels": 0, "longest": []}
    assert profile_tables({"FSDP2": of_cpu}) == []
    parts, kernels = profile_tables({"FSDP2": of_cpu, "FP8": {"ms": ms, "kernels": 4, "longest": [kernel]}})
    assert parts.markdown().splitlines()[-1] == "| hidden communication | 2.0 |"
    assert kernels.markdown().splitlines()[-1] == "| FP8 | `nvjet/x` | products | 3.00 |"


def test_what_stays_uncompressed_is_shown_with_its_reason() -> None:
    row = {
        "collective": "weight gather",
        "calls": 3,
        "raw_bytes": 2**20,
        "wire_bytes": 2**19,
        "uncompressed": {"not the weight of an FP8 layer": 2},
    }
    found = findings(fp8booster__fp8=[[1.0]])
    found["fp8booster-fp8"].outcomes[0]["wire"]["fp8"] = [row]
    (table,) = wire_tables(engine_records(found, Setting(JOB, 8, H200), "fp8booster-fp8"))
    assert table.markdown().endswith(
        "| fp8booster, FP8 | weight gather | 3 | 1.00 | 0.50 | 2 not the weight of an FP8 layer |"
    )


def run_file(folder: Any, ranks: int, throughput: float, training: str = "model 7b") -> Any:
    path = folder / f"{ranks}-{throughput}-{training}.json"
    engine = {
        "engine": "fsdp2",
        "label": "FSDP2",
        "tokens_per_second_per_gpu": throughput,
        "ms": {"median": 1.0, "p10": 1.0, "p90": 1.0},
    }
    failed = {"engine": "torchao", "label": "torchao", "failed": "it is not installed"}
    head = {"ranks": str(ranks), "GPU": "NVIDIA H200", "training": training}
    path.write_text(json.dumps({"head": head, "tables": {"engines": [engine, failed]}}))
    return path


def test_weak_scaling(tmp_path) -> None:
    runs = read_runs([run_file(tmp_path, 8, 930.0), run_file(tmp_path, 1, 1000.0), run_file(tmp_path, 2, 980.0)])
    records = scaling_records(runs)
    assert [(r["ranks"], r["efficiency"], r["tokens_per_second"]) for r in records] == [
        (1, 1.0, 1000.0),
        (2, 0.98, 1960.0),
        (8, 0.93, 7440.0),
    ]
    assert "93.0 %" in scaling_table(records).markdown()


def test_weak_scaling_refuses_what_cannot_be_compared(tmp_path) -> None:
    one = run_file(tmp_path, 1, 1000.0)
    with pytest.raises(ValueError, match="two of the results are on 1 GPUs"):
        read_runs([one, run_file(tmp_path, 1, 900.0)])
    with pytest.raises(ValueError, match="differ in training: model 7b and model 13b"):
        read_runs([one, run_file(tmp_path, 2, 900.0, "model 13b")])
    (tmp_path / "other.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a result of"):
        read_runs([tmp_path / "other.json"])
