"""Bytes per step, as torch.distributed sees them, and the account that `fp8booster.comm.statistics` gives of them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.monitor.traffic import Traffic, bytes_sent, count_traffic
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import batch, gathered, wire
from tests.distributed import ranks
from tests.plugins.training import STAGES, Boosted, boost, fp8, native

LARGE = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
AT_MOST = 0.52


def traffic(run: Boosted) -> Traffic:
    """Of one step, not the first."""
    run.step(batch())
    comm.reset_statistics()
    with count_traffic() as counted:
        run.step(batch())
    return counted


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_step_sends_at_most_0_52_of_the_bytes_of_16_bits(stage: int) -> None:
    in_16_bits = traffic(boost(native(stage=stage), tiny_llama(**LARGE)))
    products_only = traffic(boost(fp8(stage=stage), tiny_llama(**LARGE)))
    in_fp8 = traffic(boost(wire(stage=stage), tiny_llama(**LARGE)))
    assert products_only.sent == in_16_bits.sent
    # stage 1 reduces whole gradients in Colossal-AI: half of it is saved by the reduce-scatter
    assert in_fp8.sent <= AT_MOST * in_16_bits.sent
    assert in_fp8.sent <= AT_MOST * traffic(boost(native(stage=2), tiny_llama(**LARGE))).sent


@ranks(2)
@pytest.mark.parametrize("option", ["defaults", "late weights", "small buckets"])
def test_statistics_agree_with_what_is_seen_at_torch_distributed(option: str) -> None:
    arguments = {
        "defaults": {},
        "late weights": {"overlap_allgather": True},
        "small buckets": {"reduce_bucket_size_in_m": 0.0005},
    }[option]
    run = boost(wire(**arguments))
    counted, ranks = traffic(run), dist.get_world_size()
    statistics = comm.statistics()
    norm = bytes_sent("all_reduce", 4, ranks)
    assert sum(row.wire_bytes for row in statistics.rows.values()) == counted.sent - norm
    row = statistics["weight gather"]
    trained = run.optimizer.get_working_to_master_map()
    in_fp8 = [layer.weight for _, layer in gathered(run)]
    assert row.calls == len(trained)
    assert row.uncompressed == {"not the weight of an FP8 layer": len(trained) - len(in_fp8)}
    values = sum(master.numel() for master in trained.values())
    assert row.raw_bytes == values * 2 * (ranks - 1)
    saved = sum(weight.numel() for weight in in_fp8) // ranks * (ranks - 1)
    assert row.wire_bytes == row.raw_bytes - saved + len(in_fp8) * norm
    gradients = statistics["reduce_scatter_tensor"]
    assert gradients.raw_bytes == values * 2 * (ranks - 1)
    if option == "small buckets":
        assert gradients.calls > 2
    else:
        assert gradients.uncompressed == {}
        assert gradients.wire_bytes < 0.55 * gradients.raw_bytes


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_gradients_of_several_parameter_groups_share_messages(stage: int) -> None:
    """Vectors are in a group of their own, without weight decay, in most training."""
    from colossalai.booster import Booster

    booster, model = Booster(plugin=wire(stage=stage)), tiny_llama(attention_bias=True)
    groups = [
        {"params": [value for value in model.parameters() if value.dim() > 1]},
        {"params": [value for value in model.parameters() if value.dim() == 1], "weight_decay": 0.0},
    ]
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups, lr=1e-2))
    traffic(Boosted(booster, model.train(), optimizer))
    gradients = comm.statistics()["reduce_scatter_tensor"]
    assert gradients.calls == 1
    assert gradients.uncompressed == {}


@ranks(2)
@pytest.mark.parametrize("_", ["checkpoint"])
def test_the_gather_for_a_checkpoint_is_counted_by_its_reason(_: str) -> None:
    run = boost(wire())
    run.step(batch())
    comm.reset_statistics()
    with count_traffic() as counted:
        run.parameters()
    row = comm.statistics()["weight gather"]
    assert row.uncompressed == {"for a checkpoint": len(run.optimizer.gathered_weights)}
    assert row.wire_bytes == row.raw_bytes == counted.sent
    assert {dtype for _, dtype in counted.counts} == {torch.bfloat16}
