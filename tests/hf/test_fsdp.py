"""The Trainer and Accelerate with FSDP2 on two ranks.

accelerate shards on GPUs alone; here it is told that these CPUs are some.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from fp8booster import comm, report
from fp8booster.hf import prepare
from fp8booster.nn import FP8Layer
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.weights.resharded import ReshardedWeight
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks, shared_folder
from tests.hf.ways import ALWAYS, LIBRARIES, SAVED, STEPS, run

CLOSE = 0.01


def shard_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let accelerate shard a model on CPUs as it does on GPUs."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def init(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        known = bool(AcceleratorState._shared_state)
        original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if known or not kwargs.get("_from_accelerator"):
            return
        plugin = fsdp_plugin or FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            cpu_ram_efficient_loading=False,
            state_dict_type="FULL_STATE_DICT",
        )
        plugin.set_mixed_precision("bf16")
        AcceleratorState._shared_state["fsdp_plugin"] = plugin
        for each in (AcceleratorState, PartialState):
            each._shared_state["distributed_type"] = DistributedType.FSDP

    monkeypatch.setattr(AcceleratorState, "__init__", init)


@ranks(2)
@pytest.mark.parametrize("way", LIBRARIES)
def test_a_model_that_fsdp2_shards_trains_saves_and_resumes_in_fp8(way: str) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        shard_on_cpus(monkeypatch)
        folder = shared_folder(way)
        native = run(way, folder / "bf16", None)
        ours = run(way, folder / "fp8", ALWAYS)
        sent = comm.statistics()["reduce_scatter_tensor"]
        resumed = run(way, folder / "fp8", ALWAYS, resume=True)
    parameters = list(ours.model.parameters())
    assert all(isinstance(each, DTensor) for each in parameters)
    assert ours.losses == pytest.approx(native.losses, rel=CLOSE)
    assert {row.name for row in report(ours.model).other} == {"lm_head"}
    layers = [*merged_layers(ours.model), *(each for each in ours.model.modules() if isinstance(each, FP8Layer))]
    assert all(type(each.fp8_weight) is ReshardedWeight for each in layers)
    assert sent.ratio < 0.55  # of bytes of BF16
    assert sent.calls >= len(ours.losses) * len(ours.model.model.layers)
    # embeddings, norms and the head are gathered in BF16
    assert comm.statistics()["parameter gather"].ratio < 0.8
    assert any(layer.fp8_weight.lacks_values for layer in layers)
    assert len(ours.losses) == STEPS
    assert resumed.losses == ours.losses[SAVED:]
    assert all(
        torch.equal(one.full_tensor(), other.full_tensor())
        for one, other in zip(parameters, resumed.model.parameters(), strict=True)
    )
    weights = {name: each.full_tensor() for name, each in ours.model.named_parameters()}
    loaded = AutoModelForCausalLM.from_pretrained(ours.last)
    assert all(torch.equal(weights[name], each) for name, each in loaded.named_parameters())


@ranks(2)
@pytest.mark.parametrize("sends", [True, False])
def test_the_last_call_says_whether_weights_and_gradients_are_sent_in_fp8(sends: bool) -> None:
    from accelerate import Accelerator

    off = replace(ALWAYS, messages=None)
    with pytest.MonkeyPatch.context() as monkeypatch:
        shard_on_cpus(monkeypatch)
        accelerator = Accelerator(mixed_precision="bf16", cpu=True)
        model = tiny_llama()
        for config in (off, ALWAYS) if sends else (ALWAYS, off):
            prepare(model, config, accelerator=accelerator)
        model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        comm.reset_statistics()
        accelerator.backward(model(input_ids=token_batch(0), labels=token_batch(0)).loss)
    assert isinstance(next(model.parameters()), DTensor)
    rows = comm.statistics().rows
    assert ({"reduce_scatter_tensor", "parameter gather"} <= rows.keys()) == sends
    assert sends or not rows
