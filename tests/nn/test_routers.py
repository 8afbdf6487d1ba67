"""Which layers choose a token's experts, and so stay in 16 bits, whatever families call them and wherever they lie."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel

from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.nn.convert import WHY_NOT_ROUTERS
from fp8booster.serving.layout import layout_of_config
from tests.nn.fused.models import MAJOR

SIZES = {
    "hidden_size": 96,
    "intermediate_size": 192,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 128,
    "pad_token_id": 0,
}
EXPERTS = dict.fromkeys(
    ("num_experts", "num_local_experts", "n_routed_experts", "expert_num", "moe_num_experts", "moe_n_routed_experts"),
    32,  # of which a router's rounded size is no reason to stay in 16 bits
)

FAMILIES: dict[str, tuple[dict[str, Any], set[str]]] = {
    "qwen2_moe": ({}, {"mlp.shared_expert_gate", *(["mlp.gate"] if MAJOR < 5 else [])}),
    "jetmoe": ({"kv_channels": 32}, {"mlp.router.layer", "self_attention.experts.router.layer"}),
    "switch_transformers": (
        {"d_model": 96, "d_ff": 192, "num_heads": 4, "d_kv": 32, "num_layers": 2, "num_sparse_encoder_layers": 1},
        {"mlp.router.classifier"},
    ),
}
SINCE_5: dict[str, tuple[dict[str, Any], set[str]]] = {
    "hunyuan_v1_moe": ({"moe_topk": 2, "num_shared_expert": 1}, {"mlp.gate.wg"}),
    "gemma4_text": (
        {
            "enable_moe_block": True,
            "top_k_experts": 2,
            "num_kv_shared_layers": 0,
            "hidden_size_per_layer_input": 0,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        {"router.proj"},
    ),
    "afmoe": ({"num_dense_layers": 1}, {"mlp.router.gate"}),
    "longcat_flash": ({"num_layers": 2, "zero_expert_num": 16}, {"mlp.router.classifier"}),
    "zaya": ({}, {"mlp.gate.down_proj", "mlp.gate.router_mlp.fc", "mlp.gate.router_mlp.out_proj"}),
    "doge": ({"is_moe": True, "num_experts": 256}, {"mlp.router_gate"}),
}


@pytest.mark.parametrize("family", [*FAMILIES, *(SINCE_5 if MAJOR >= 5 else ())])
def test_the_routers_of_a_family_and_nothing_else_of_it_stay_in_16_bits(family: str) -> None:
    sizes, expected = (FAMILIES | SINCE_5)[family]
    config = AutoConfig.for_model(family, **(SIZES | EXPERTS | sizes))
    with torch.device("meta"):
        model = AutoModel.from_config(config)
    convert_to_fp8(model, FP8Config(always=True))
    rows = report(model).rows
    routers = {row.name for row in rows if row.notes == WHY_NOT_ROUTERS}
    # without the places in lists of layers
    assert {re.sub(r"^.*?\d+\.(layer\.\d+\.)?|\d+$", "", name) for name in routers} == expected
    others = [row for row in rows if row.precision != "FP8" and row.name not in routers]
    assert all("rounded up to multiples of 16" in row.notes for row in others)


@pytest.mark.parametrize("family", ["jetmoe", *(["hunyuan_v1_moe"] if MAJOR >= 5 else [])])
def test_an_export_keeps_the_same_routers_in_16_bits(family: str) -> None:
    sizes, routers = (FAMILIES | SINCE_5)[family]
    layout = layout_of_config(AutoConfig.for_model(family, **(SIZES | EXPERTS | sizes)), FP8Config())
    expected = {f"model.layers.{layer}.{router}" for layer in range(2) for router in routers}
    assert {*layout.kept, "lm_head"} == expected | {"lm_head"}
    assert not {f"{name}.weight" for name in expected} & layout.groups.keys()


class Block(nn.Module):
    """Experts, what chooses among them under a name of its own, and what only looks like that."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts
        self.selector = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 32))
        self.scorer = nn.Linear(64, 32, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(64, 256), nn.Linear(64, 256)
        self.down_proj = nn.Linear(256, 64)
        self.k_proj_of_block = nn.ModuleDict({"k": nn.Linear(64, 32), "o": nn.Linear(32, 64)})
        self.shared_experts = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 64))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.zeros(32, 64, 64, dtype=torch.float32))


@pytest.mark.parametrize("experts", [Stack(), nn.ModuleList(nn.Linear(64, 64) for _ in range(32))], ids=["one", "list"])
def test_what_gives_a_number_for_each_expert_is_a_router_under_any_name(experts: nn.Module) -> None:
    model = convert_to_fp8(Block(experts), FP8Config(always=True))
    routers = {row.name for row in report(model).rows if row.notes == WHY_NOT_ROUTERS}
    assert routers == {"selector.0", "selector.2", "scorer"}
    assert len(report(model).fp8) == len(report(model).rows) - 3


def test_without_experts_a_gate_is_a_layer_like_others() -> None:
    model = nn.ModuleDict({"gate": nn.Linear(64, 32), "up": nn.Linear(64, 32), "conv": nn.Conv1d(32, 32, 3)})
    assert len(report(convert_to_fp8(model)).fp8) == 2


def test_a_choice_of_layers_may_name_routers() -> None:
    block = Block(Stack())
    convert_to_fp8(block, FP8Config(layers=lambda name, module: name == "scorer"))
    assert [row.name for row in report(block).fp8] == ["scorer"]
