"""Symptoms without each patch that FP8 needs."""

from __future__ import annotations

import gc
from itertools import count
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.graphs import capture_layers, pair, recorder
from fp8booster.nn.graphs.layer import WARM_UP
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.symptom import Symptom
from tests.colossal.tensor.models import AXIS, mesh
from tests.nn.graphs.rerun import Rerun


def _group() -> dist.ProcessGroup:
    return mesh(compressed=True).get_group_along_axis(AXIS)


def _add_up() -> None:
    from colossalai.quantization import fp8

    with count_traffic() as traffic:
        fp8.all_reduce_fp8(torch.randn(2048).bfloat16(), group=_group())
    assert {dtype for _, dtype in traffic.counts} == {torch.uint8}, "16 bits are sent"


def _gather_a_sequence() -> None:
    from colossalai.shardformer.layer import _operation

    with count_traffic() as traffic:
        _operation._gather(torch.randn(2, 1024).bfloat16(), 0, _group())
    assert {dtype for _, dtype in traffic.counts} == {torch.uint8}, "16 bits are sent"


def _gather_logits() -> None:
    from colossalai.shardformer.layer import _operation

    logits = torch.randn(2, 1024).bfloat16()
    found = _operation.gather_forward_split_backward(logits, -1, _group(), fp8_communication=True)
    assert torch.equal(found.chunk(2, -1)[dist.get_rank()], logits), "logits are rounded"


def _lose_from_hidden_states() -> None:
    from colossalai.shardformer import ShardConfig
    from colossalai.shardformer.layer import dist_cross_entropy

    hidden, config = SimpleNamespace(loss_of=lambda labels: labels.sum()), ShardConfig(enable_tensor_parallelism=False)
    assert dist_cross_entropy(torch.ones(2, 3), hidden, config, 16, torch.float32) == 6


def _destroy_a_group() -> None:
    with pytest.MonkeyPatch.context() as patch:
        record = Rerun()
        patch.setattr(recorder, "recorder_for", lambda _: record)
        model = tiny_llama().train()
        assert capture_layers(model)
        group, begun = dist.new_group(), count()
        with mock.patch.object(pair, "_collectives", side_effect=lambda: {group.group_name: next(begun)}):
            for _ in range(WARM_UP + 1):
                model(input_ids=token_batch(0), labels=token_batch(0), use_cache=False).loss.backward()
        assert record.graphs
        dist.destroy_process_group(dist.new_group())  # another, which they do not use
        gc.collect()
        assert record.graphs
        dist.destroy_process_group(group)
        gc.collect()
        assert not record.graphs, "graphs are left, and NCCL waits for them"


SYMPTOMS = {
    "collectives_send_fp8": Symptom(_add_up, "16 bits are sent"),
    "operations_ask_for_fp8": Symptom(_gather_a_sequence, "16 bits are sent"),
    "sequences_are_sent_in_fp8": Symptom(_gather_logits, "logits are rounded"),
    "graphs_end_before_groups": Symptom(_destroy_a_group, "graphs are left"),
    "losses_are_computed_from_hidden_states": Symptom(_lose_from_hidden_states, "SimpleNamespace"),
}
