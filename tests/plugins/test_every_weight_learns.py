"""Every weight learns with every plugin, in layers that stay in 16 bits too: none is saved as training began with it.

An engine that gathers to memory which a layer no longer reads trains its masters alone, while the loss falls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from fp8booster import FP8Config
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks, shared_folder
from tests.nn.experts.families import tiny_mixture
from tests.plugins import training

# colossalai, which takes seconds to import, is imported on the ranks alone
if TYPE_CHECKING:
    from colossalai.booster.plugin.plugin_base import Plugin

WHOLE = {"tp_size": 1, "pp_size": 1}


def dense() -> nn.Module:
    return tiny_llama(num_hidden_layers=3).bfloat16()


def mixture() -> nn.Module:
    return tiny_mixture("Mixtral", num_hidden_layers=3).bfloat16()


CASES: dict[str, tuple[str, dict[str, Any], Callable[[], nn.Module]]] = {
    "LowLevelZero, stage 1": ("LowLevelZeroPlugin", {"stage": 1, "overlap_communication": False}, dense),
    "LowLevelZero, stage 2": ("LowLevelZeroPlugin", {"stage": 2}, dense),
    "hybrid without ZeRO": ("HybridParallelPlugin", {**WHOLE, "zero_stage": 0}, dense),
    "hybrid, stage 1": ("HybridParallelPlugin", {**WHOLE, "zero_stage": 1}, dense),
    "hybrid, stage 1, gradients reduced after backward": (
        "HybridParallelPlugin",
        {**WHOLE, "zero_stage": 1, "overlap_communication": False},
        dense,
    ),
    "hybrid, stage 1, gathered late": (
        "HybridParallelPlugin",
        {**WHOLE, "zero_stage": 1, "overlap_communication": False, "overlap_allgather": True},
        dense,
    ),
    "hybrid, stage 2": ("HybridParallelPlugin", {**WHOLE, "zero_stage": 2, "overlap_communication": False}, dense),
    "hybrid, tensor parallel": ("HybridParallelPlugin", {"tp_size": 2, "pp_size": 1, "zero_stage": 1}, dense),
    "MoE, all experts on each rank": ("MoeHybridParallelPlugin", {**WHOLE, "ep_size": 1, "zero_stage": 1}, mixture),
    "MoE, experts spread": ("MoeHybridParallelPlugin", {**WHOLE, "ep_size": 2, "zero_stage": 1}, mixture),
    "Gemini": ("GeminiPlugin", {"min_chunk_size_m": 2**-4}, dense),
    "DDP": ("TorchDDPPlugin", {}, dense),
    "FSDP": ("TorchFSDPPlugin", {}, dense),
}


def plugin_of(name: str, arguments: dict[str, Any], fused: bool) -> Plugin:
    from fp8booster import plugins

    config = FP8Config(always=True, high_precision_ends=1, fused=fused)
    precision = {} if name.startswith("Torch") else {"precision": "bf16"}
    return getattr(plugins, name)(use_fp8=True, fp8_config=config, **precision, **arguments)


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_weights_of_layers_in_16_bits_learn_as_others_do(case: str, fused: bool) -> None:
    name, arguments, build = CASES[case]
    torch.manual_seed(0)
    model = build()
    before = {path: each.clone() for path, each in model.state_dict().items()}
    boosted = training.boost(plugin_of(name, arguments, fused), model)
    for _ in range(3):
        boosted.step(token_batch(0) % 64)  # of the smaller vocabulary
    folder = shared_folder(f"{case}-{fused}".replace(" ", "_").replace(",", ""))
    boosted.booster.save_model(boosted.model, str(folder), shard=True, use_safetensors=True)
    torch.distributed.barrier()
    saved: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        saved |= load_file(file)
    assert saved.keys() >= before.keys() - {"lm_head.weight"}
    same = [path for path, each in saved.items() if torch.equal(each.to(before[path].dtype), before[path])]
    assert not same
