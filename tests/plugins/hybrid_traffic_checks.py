"""Bytes per step in each mode, as torch.distributed sees them and as `fp8booster.comm.statistics` counts them."""

from __future__ import annotations

import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.monitor.traffic import Traffic, bytes_sent, count_traffic
from tests.colossal.models import tiny_llama
from tests.plugins.hybrid_runs import MODES, HybridRun, batches, fp8, native, start
from tests.plugins.registry import check_each

LARGE = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4}
AT_MOST = 0.52


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
    """Bytes that native code sends in a step."""
    run = start(native(mode), tiny_llama(**LARGE))
    sent = traffic(run).sent
    if hasattr(run.model.module, "reducer") and (ranks := dist.get_world_size(run.model.dp_group)) > 1:
        # DDP's reducer calls no function of torch.distributed
        sent += bytes_sent("all_reduce", 2 * sum(value.numel() for value in run.model.parameters()), ranks)
    return sent


@check_each(*MODES)
def a_step_sends_at_most_0_52_of_the_bytes_of_16_bits(mode: str) -> None:
    run = start(fp8(mode), tiny_llama(**LARGE))
    sent, native_sent = traffic(run).sent, in_16_bits(mode)
    assert sent <= AT_MOST * native_sent, (sent, native_sent, sent / native_sent, str(comm.statistics()))


@check_each(*MODES)
def no_large_message_is_sent_in_16_bits_without_a_reason(mode: str) -> None:
    run = start(fp8(mode), tiny_llama(**LARGE))
    counted = traffic(run)
    statistics = comm.statistics()
    explained = sum(count for row in statistics.rows.values() for count in row.uncompressed.values())
    large = [
        (name, str(dtype), count)
        for (name, dtype), count in counted.counts.items()
        if dtype in (torch.bfloat16, torch.float16) and count.payload > 2**14
    ]
    assert not large or explained, large
