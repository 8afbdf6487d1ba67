"""Bytes per step in each mode, as torch.distributed sees them and as `fp8booster.comm.statistics` counts them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config, comm
from fp8booster.monitor.traffic import Traffic, bytes_sent, count_traffic
from fp8booster.nn.fused.loss import SPREAD_LOSS_REASON
from tests.colossal.hybrid.runs import MODES, HybridRun, batches, fp8, native, start
from tests.colossal.models import tiny_llama
from tests.distributed import ranks

LARGE = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
AT_MOST = 0.52
SMALL = 2**12
"""Bytes of a message, on the mean, that may go in 16 bits without a reason of its own."""


COMMUNICATE = [mode for mode in MODES if mode not in ("TP2 ZeRO 1", "PP2 1f1b ZeRO 1")]
"""Modes of which each sends something that no other does: ZeRO over one rank sends nothing."""


def traffic(run: HybridRun) -> Traffic:
    """Of one step, not the first."""
    group = run.booster.plugin.dp_group
    (first,), (second,) = batches(0, 2, dist.get_world_size(group), dist.get_rank(group))
    run.step(first)
    comm.reset_statistics()
    with count_traffic() as counted:
        run.step(second)
    return counted


def in_16_bits(mode: str) -> int:
    """Bytes that Colossal-AI sends in a step."""
    run = start(native(mode), tiny_llama(**LARGE))
    sent = traffic(run).sent
    if hasattr(run.model.module, "reducer") and (ranks := dist.get_world_size(run.model.dp_group)) > 1:
        # DDP's reducer calls no function of torch.distributed
        sent += bytes_sent("all_reduce", 2 * sum(value.numel() for value in run.model.parameters()), ranks)
    return sent


@ranks(2)
@pytest.mark.parametrize("mode", COMMUNICATE)
def test_a_step_sends_at_most_0_52_of_the_bytes_of_16_bits(mode: str) -> None:
    emulated = FP8Config(emulate=True)  # what is sent is the same, and the CPU is faster
    run = start(fp8(mode, fp8_config=emulated), tiny_llama(**LARGE))
    counted, statistics = traffic(run), comm.statistics()
    native_sent = in_16_bits(mode)
    assert counted.sent <= AT_MOST * native_sent, (counted.sent / native_sent, str(statistics))
    in_full = [
        (name, count.payload)
        for (name, dtype), count in counted.counts.items()
        if dtype in (torch.bfloat16, torch.float16) and count.payload > SMALL * count.calls
    ]
    reasons = {reason for row in statistics.rows.values() for reason in row.uncompressed} - {
        "small",
        "one rank",
        SPREAD_LOSS_REASON,
    }
    assert not in_full or reasons, in_full
