"""Every engine that needs no compiler, built and measured on two gloo ranks that start once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8booster.training.models import build
from tests.benchmarks.llama_ranks import JOB, RUNS, measure_engines, measure_plain, take_turns
from tests.distributed import run_ranks


@pytest.fixture(scope="module")
def measured() -> tuple[list[dict[str, dict[str, Any]]], list[str]]:
    """The outcomes on each rank, and what is said of plugins that are not there or cannot do it."""
    ranks = run_ranks(measure_engines, 2)
    return [outcomes for outcomes, _ in ranks], ranks[0][1]


@pytest.mark.parametrize("name", RUNS)
def test_every_rank_finds_the_same(measured, name: str) -> None:
    first, second = (outcomes[name] for outcomes in measured[0])
    assert len(first["step_ms"]) == JOB.steps
    assert len(first["rank_ms"]) == 2
    assert min(first["step_ms"]) > 0
    assert len(first["host_ms"]) == JOB.steps
    assert all(0 < host <= step for host, step in zip(first["host_ms"], first["step_ms"], strict=True))
    assert len(first["losses"]) == JOB.total_steps
    assert all(math.isfinite(loss) for loss in first["losses"])
    for key in ("step_ms", "rank_ms", "host_ms", "losses", "replicas"):
        assert first[key] == second[key]
    assert first["power"] is None  # of a GPU alone
    assert first["replicas"] == (1 if RUNS[name][1].tp * RUNS[name][1].pp > 1 else 2)


def test_ours_in_bf16_is_native(measured) -> None:
    outcomes = measured[0][0]
    assert outcomes["bf16"]["losses"] == outcomes["native"]["losses"]
    assert outcomes["bf16"]["wire"]["bytes"] == outcomes["native"]["wire"]["bytes"]


OTHER_BATCH = ("gemini", "tensor parallel", "pipeline", "fsdp2", "fsdp2 fp8")
"""Runs with one micro-batch a step, with one replica's tokens for both ranks, or with other initial weights."""


OTHER_MODELS = tuple(name for name, (_, job) in RUNS.items() if job.architecture != JOB.architecture)


@pytest.mark.parametrize("name", [name for name in RUNS if name not in OTHER_MODELS])
def test_each_engine_trains_the_same_model(measured, name: str) -> None:
    """Within 1 % at every step where weights and tokens are the same, of a loss that falls by 4 %; else it falls so."""
    losses, native = measured[0][0][name]["losses"], measured[0][0]["native"]["losses"]
    assert native[-1] < 0.96 * native[0]
    assert losses == pytest.approx(native, rel=0.03 if name in OTHER_BATCH else 0.01)


def test_a_zero_bubble_pipeline_gets_its_schedule(measured) -> None:
    losses = measured[0][0]["zero-bubble pipeline"]["losses"]
    assert losses[-1] < 0.97 * losses[0]


def test_experts_train_alike_in_fp8(measured) -> None:
    outcomes = measured[0][0]
    assert outcomes["moe"]["losses"] == outcomes["native moe"]["losses"]
    assert outcomes["moe"]["losses"][-1] < 0.97 * outcomes["moe"]["losses"][0]
    for name in ("moe fp8", "moe, experts on each rank"):
        assert outcomes[name]["losses"] == pytest.approx(outcomes["moe"]["losses"], rel=0.01)
    assert outcomes["moe fp8"]["wire"]["bytes"] < 0.8 * outcomes["moe"]["wire"]["bytes"]
    exchanged = {row["collective"] for row in outcomes["moe fp8"]["wire"]["fp8"]}
    assert "all_to_all_single" in exchanged


def test_the_slowest_rank_gives_each_step(measured) -> None:
    for outcome in measured[0][0].values():
        assert sorted(outcome["step_ms"])[1] >= max(outcome["rank_ms"])


def test_wire_bytes_are_those_of_the_model(measured) -> None:
    outcomes = measured[0][0]
    network = build(JOB.architecture.config(JOB.sequence), device=torch.device("meta"))
    values = sum(parameter.numel() for parameter in network.parameters())
    # each micro-batch's gradients reduced and the weights gathered, half of either by each of 2 ranks, 2 bytes a value
    assert outcomes["native"]["wire"]["bytes"] == pytest.approx((JOB.micro_batches + 1) * values, rel=0.01)
    assert outcomes["fp8"]["wire"]["bytes"] < 0.75 * outcomes["native"]["wire"]["bytes"]
    # DDP's own reducer, which nothing counts: all gradients in BF16 once
    assert outcomes["ddp"]["wire"]["unseen"] == outcomes["ddp"]["wire"]["bytes"] == 2 * values
    assert outcomes["ddp fp8"]["wire"]["unseen"] == 0
    assert 0 < outcomes["ddp fp8"]["wire"]["bytes"] < 0.52 * 2 * values


def test_fp8_traffic_has_its_reasons(measured) -> None:
    rows = {row["collective"]: row for row in measured[0][0]["fp8"]["wire"]["fp8"]}
    assert rows["reduce_scatter_tensor"]["wire_bytes"] < 0.52 * rows["reduce_scatter_tensor"]["raw_bytes"]
    assert "not the weight of an FP8 layer" in rows["weight gather"]["uncompressed"]
    assert measured[0][0]["native"]["wire"]["fp8"] == []


def test_a_plugin_that_is_not_there_is_named(measured) -> None:
    assert measured[1][0].startswith("fp8booster.plugins has no TorchDDPPlugin; --plugin takes low_level_zero")


@pytest.mark.parametrize("name", ["bf16 fused", "ddp bf16 fused", "fp8", "fsdp2 fp8"])
def test_fused_engines_fuse_everything(measured, name: str) -> None:
    assert measured[0][0][name]["fused"] == "2 decoder layers fused, loss over chunks of logits"
    assert measured[0][0]["bf16"]["fused"] is None


def test_a_plugin_that_takes_no_fused_model_is_named(measured) -> None:
    assert measured[1][1].startswith("--plugin gemini takes no model with fused blocks in BF16; low_level_zero")


def test_a_turn_that_fails_ends_on_all_ranks_and_the_next_one_runs() -> None:
    first, second = run_ranks(take_turns, 2, initialize=False)
    assert first == second
    well, next_one, fails, dies, without_host, hangs, again = first
    assert well.outcome == next_one.outcome  # forked by one host
    assert well.outcome["host"] != again.outcome["host"]  # which ended with what hung
    assert [each.outcome["rank"] for each in (well, again)] == [0, 0]
    assert [each.outcome["store"] for each in (well, again)] == ["served", "served"]
    assert [each.reason for each in (well, next_one, again)] == [None, None, None]
    assert fails.reason == "out of GPU memory"
    assert dies.reason == "rank 1 ended with code 1: SystemExit: no such device"
    assert without_host.reason == "rank 1 ended by signal SIGKILL"
    assert hangs.reason == "it did not finish within 2 s"
    assert fails.outcome is dies.outcome is without_host.outcome is hangs.outcome is None


def test_one_gpu_without_a_plugin_trains_weights_and_adapters() -> None:
    ((outcomes, refused),) = run_ranks(measure_plain, 1)
    for outcome in outcomes:
        assert outcome["losses"][-1] < 0.98 * outcome["losses"][0]
    *without_trainer, own_loop, trainer, trainer_in_bf16 = outcomes
    *ours, peft = without_trainer
    fused = {outcome["fused"] for outcome in (*ours, own_loop, trainer)}
    assert fused == {"2 decoder layers fused, loss over chunks of logits"}
    assert peft["layers"] is trainer_in_bf16["layers"] is None
    assert trainer["layers"] == own_loop["layers"]
    assert trainer["losses"][0] == pytest.approx(own_loop["losses"][0], rel=1e-5)  # the same tokens, and all of them
    for other in (own_loop, trainer_in_bf16):
        assert trainer["losses"] == pytest.approx(other["losses"], rel=0.01)
    *_, adapters, with_8_bit_moments, in_bf16 = (outcome["losses"] for outcome in without_trainer)
    assert adapters == pytest.approx(in_bf16, rel=0.003)
    assert with_8_bit_moments == pytest.approx(in_bf16, rel=0.003)
    assert "--optimizer adamw-8bit" in refused
