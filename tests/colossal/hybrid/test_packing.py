"""Packed batches under `HybridParallelPlugin`: in each mode sequences are kept apart."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.nn.fuse import fuse
from tests.colossal.hybrid.runs import MICRO_BATCHES, HybridRun, fp8, start
from tests.colossal.hybrid.test_fused import MODES as FUSED_MODES
from tests.distributed import ranks
from tests.nn.fused.models import VOCABULARY, build

MODES: dict[str, dict[str, Any]] = {
    name: FUSED_MODES[name]
    for name in (
        "DP2 ZeRO 1",
        "TP2 ZeRO 1",
        "TP2 flash",
        "TP2 split_gather",
        "SP2 all_to_all",
        "SP2 ring_attn",
        "PP2 1f1b ZeRO 1",
        "PP2 1f1b flash",
    )
}
ROWS, LENGTH = 4, 32


OTHERS = {
    "qwen2": ("TP2 flash", "SP2 all_to_all", "PP2 1f1b ZeRO 1"),
    "mistral": ("TP2 ZeRO 1", "TP2 flash", "PP2 1f1b flash"),
}
"""Modes of other families."""

CASES = [("llama", mode) for mode in MODES] + [(family, mode) for family, modes in OTHERS.items() for mode in modes]


def model(family: str = "llama") -> nn.Module:
    return build(family, torch.float32, initializer_range=0.1)


def batch(family: str = "llama") -> dict[str, torch.Tensor]:
    """Rows of two or three sequences, with labels that are likelier by far where these are kept apart."""
    ids = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    positions = torch.empty_like(ids)
    for row, lengths in enumerate([(9, 23), (16, 16), (5, 20, 7), (1, 31)]):
        positions[row] = torch.cat([torch.arange(length) for length in lengths])
    alone = model(family)
    fuse(alone)
    apart, joined = (alone(input_ids=ids, **more).logits.log_softmax(-1) for more in ({"position_ids": positions}, {}))
    labels = (apart - joined).argmax(-1).roll(1, 1)
    labels[positions == 0] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def backward(run: HybridRun, given: dict[str, torch.Tensor]) -> float:
    plugin = run.booster.plugin
    if plugin.pp_size == 1:
        loss = run.model(**given).loss
        run.booster.backward(loss, run.optimizer)
        return loss.item()
    found = run.booster.execute_pipeline(
        iter([given]), run.model, lambda output, _: output.loss, run.optimizer, return_loss=True
    )["loss"]
    loss = torch.zeros(()) if found is None else found.detach().float().reshape(())
    dist.all_reduce(loss, group=plugin.pp_group)
    return loss.item()


def in_one_process(given: dict[str, torch.Tensor], micro_batches: int, family: str = "llama") -> float:
    """The mean loss over micro-batches of rows."""
    alone = model(family).bfloat16().train()
    convert_to_fp8(alone)
    fuse(alone)
    parts = [
        dict(zip(given, rows, strict=True))
        for rows in zip(*(each.chunk(micro_batches) for each in given.values()), strict=True)
    ]
    return sum(alone(**part).loss.item() for part in parts) / micro_batches


@ranks(2)
@pytest.mark.parametrize(("family", "mode"), CASES)
def test_sequences_of_packed_batches_are_kept_apart(family: str, mode: str) -> None:
    run = start(fp8(MODES[mode], fp8_config=FP8Config()), model(family))
    given = batch(family)
    micro_batches = MICRO_BATCHES if run.booster.plugin.pp_size > 1 else 1
    expected = in_one_process(given, micro_batches, family)
    without = {name: each for name, each in given.items() if name != "position_ids"}
    one_sequence = in_one_process(without, micro_batches, family)
    loss = backward(run, given)
    assert abs(loss - expected) < 0.05 * abs(one_sequence - expected)
