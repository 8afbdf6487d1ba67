"""`FP8Config.messages` reaches the bytes that each plugin sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8booster import FP8Config
from fp8booster.comm import Encoding
from fp8booster.comm.encoding import observers
from fp8booster.kernels.message_layout import MessageLayout
from tests.colossal.hybrid import runs as hybrid
from tests.colossal.moe.models import tiny_mixtral
from tests.distributed import ranks
from tests.plugins.test_scaling import plugin_of
from tests.plugins.training import boost, train

MODES = ("DP2", "DP2 ZeRO 1", "PP2 1f1b", "TP2", "TP2 split_gather", "SP2 all_to_all", "SP2 ring_attn")

MESSAGES = FP8Config(messages=Encoding(block_size=128), emulate=True)


def _train(name: str) -> None:
    train(boost(plugin_of(name, MESSAGES), optimizer=torch.optim.Adam, lr=1e-3), steps=1)


def _train_hybrid(mode: str) -> None:
    hybrid.learn(hybrid.start(hybrid.fp8(mode, fp8_config=MESSAGES)), last=1)


def _train_experts() -> None:
    from fp8booster.plugins import MoeHybridParallelPlugin

    sizes = {"tp_size": 1, "pp_size": 1, "ep_size": 2, "zero_stage": 1, "precision": "bf16"}
    plugin = MoeHybridParallelPlugin(**sizes, use_fp8=True, fp8_config=MESSAGES)
    hybrid.learn(hybrid.start(plugin, tiny_mixtral()), last=1)


RUNS: dict[str, Callable[[], Any]] = {
    **{name: lambda name=name: _train(name) for name in ("low_level_zero", "gemini", "ddp", "fsdp")},
    **{mode: lambda mode=mode: _train_hybrid(mode) for mode in MODES},
    "EP2 ZeRO 1": _train_experts,
}


@ranks(2)
@pytest.mark.parametrize("name", RUNS)
def test_values_that_share_a_scale_are_as_many_as_it_says(name: str) -> None:
    seen: list[MessageLayout] = []

    def observe(_: str, __: Callable, ___: Any, layout: MessageLayout, ____: torch.dtype) -> None:
        seen.append(layout)

    observers.append(observe)
    try:
        RUNS[name]()
    finally:
        observers.remove(observe)
    assert seen
    assert {layout.block_size for layout in seen} == {128}
