"""`FP8Config(cuda_graphs=True)` in the plugins: the bits of layers that are not captured."""

from __future__ import annotations

from typing import Any

import pytest

from fp8booster import FP8Config, comm
from fp8booster.nn.graphs import captured_layers, recorder
from fp8booster.plugins import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.nn.graphs.rerun import Rerun
from tests.plugins.training import boost, train

TENSOR_PARALLEL = {"tp_size": 2, "pp_size": 1, "zero_stage": 0, "precision": "bf16"}
PLUGINS = {
    "ZeRO 1": (LowLevelZeroPlugin, {"stage": 1}),
    "ZeRO 2": (LowLevelZeroPlugin, {"stage": 2}),
    "ZeRO 2, weights in FP8 alone": (LowLevelZeroPlugin, {"stage": 2, "weights_in_16_bits": False}),
    "ZeRO 1, gathers during forward": (LowLevelZeroPlugin, {"stage": 1, "overlap_allgather": True}),
    "DDP": (TorchDDPPlugin, {}),
    "hybrid": (HybridParallelPlugin, {"tp_size": 1, "pp_size": 1, "zero_stage": 1, "precision": "bf16"}),
    "tensor parallel": (HybridParallelPlugin, TENSOR_PARALLEL),
    "sequence parallel, all to all": (
        HybridParallelPlugin,
        TENSOR_PARALLEL
        | {"tp_size": 1, "sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "all_to_all"},
    ),
    "sequence parallel": (
        HybridParallelPlugin,
        TENSOR_PARALLEL | {"enable_sequence_parallelism": True, "sequence_parallelism_mode": "split_gather"},
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", PLUGINS)
def test_captured_layers_train_as_they_are(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "recorder_for", lambda _: Rerun())
    kind, options = PLUGINS[name]
    losses, sent = [], []
    for graphs in (False, True):
        comm.reset_statistics()
        given: dict[str, Any] = dict(options)
        config = FP8Config(always=True, cuda_graphs=graphs, weights_in_16_bits=given.pop("weights_in_16_bits", None))
        if kind is LowLevelZeroPlugin:
            given["precision"] = "bf16"
        model = tiny_llama()
        model.config.use_cache = False
        boosted = boost(kind(use_fp8=True, fp8_config=config, **given), model)
        losses.append(train(boosted, steps=7))
        sent.append(comm.statistics().rows)
    assert losses[0] == losses[1]
    assert sent[0] == sent[1]
    captured = captured_layers(boosted.model)
    assert captured == {None: 2}, captured
