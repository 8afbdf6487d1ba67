from __future__ import annotations

import pytest
import torch

from benchmarks.training.arithmetic import model_flops, native_flops
from benchmarks.training.models import MODELS, build


def test_flops_of_a_7b_token_by_hand() -> None:
    model = MODELS["7b"]
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert model.layer_weights == layer == 202_375_168
    weights = 32 * layer + 4096 * 32000
    assert model.product_weights == weights == 6_607_077_376
    # scores and values: 2 products of 2 x 4096 x 4096 operations, half of them masked, once forward and twice backward
    attention = 32 * 3 * 2 * (2 * 4096 * 4096) // 2
    assert model_flops(model, sequence=4096) == 6 * weights + attention == 42_863_689_728
    assert native_flops(model, checkpointing=False) == 6 * model.parameters == 6 * 6_738_415_616
    assert native_flops(model, checkpointing=True) == 8 * model.parameters


def test_grouped_queries_have_narrower_keys_and_values() -> None:
    assert MODELS["70b"].layer_weights == 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    assert MODELS["llama3-8b"].parameters == 8_030_261_248
    assert MODELS["llama3-70b"].parameters == 70_553_706_496


def test_a_shared_head_is_multiplied_but_counted_once() -> None:
    model = MODELS["35b"]
    assert model.parameters == 34_980_831_232
    assert model.product_weights == 40 * (4 * 8192**2 + 3 * 8192 * 22528) + 8192 * 256000


def test_a_token_is_multiplied_by_the_experts_that_it_goes_through() -> None:
    model = MODELS["mixtral-8x7b"]
    assert model.parameters == 46_702_792_704
    others = 32 * 6 * 3 * 4096 * 14336
    assert model.product_weights == model.linear_weights - others
    assert 12.5e9 < model.product_weights < 13e9
    assert 0.95e9 < MODELS["mixtral-1b"].product_weights < 1.1e9
    assert native_flops(model, checkpointing=False) is None
    assert all(other.product_weights == other.linear_weights for other in (MODELS["7b"], MODELS["35b"]))


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_that_is_built(name: str) -> None:
    short = MODELS[name].shortened(2)
    config = short.config(sequence=32)
    network = build(config, dtype=torch.bfloat16, device=torch.device("meta"), checkpointing=False)
    assert sum(parameter.numel() for parameter in network.parameters()) == short.parameters
    linear = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(module.weight.numel() for module in linear) == short.linear_weights
    assert config.max_position_embeddings >= 32
