from __future__ import annotations

import pytest
import torch

from benchmarks.training.arithmetic import (
    adapter_weights,
    layer_weights,
    linear_weights,
    model_flops,
    native_flops,
    parameters,
    product_weights,
)
from fp8booster.training.adapters import ALL_LINEAR, with_adapters
from fp8booster.training.models import MODELS, build


def test_flops_of_a_7b_token_by_hand() -> None:
    model = MODELS["7b"]
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    assert layer_weights(model) == layer == 202_375_168
    weights = 32 * layer + 4096 * 32000
    assert product_weights(model) == weights == 6_607_077_376
    # scores and values: 2 products of 2 x 4096 x 4096 operations, half of them masked, once forward and twice backward
    attention = 32 * 3 * 2 * (2 * 4096 * 4096) // 2
    assert model_flops(model, sequence=4096) == 6 * weights + attention == 42_863_689_728
    assert native_flops(model, checkpointing=False) == 6 * parameters(model) == 6 * 6_738_415_616
    assert native_flops(model, checkpointing=True) == 8 * parameters(model)


def test_grouped_queries_have_narrower_keys_and_values() -> None:
    assert layer_weights(MODELS["70b"]) == 8192 * (2 * 8192 + 2 * 1024 + 3 * 28672)
    assert parameters(MODELS["llama3-8b"]) == 8_030_261_248
    assert parameters(MODELS["30b"]) == 32_528_943_616
    assert parameters(MODELS["qwen2.5-7b"]) == 7_615_616_512
    assert parameters(MODELS["llama3-70b"]) == 70_553_706_496


def test_a_shared_head_is_multiplied_but_counted_once() -> None:
    model = MODELS["35b"]
    assert parameters(model) == 34_980_831_232
    assert product_weights(model) == 40 * (4 * 8192**2 + 3 * 8192 * 22528) + 8192 * 256000


def test_a_token_is_multiplied_by_the_experts_that_it_goes_through() -> None:
    model = MODELS["mixtral-8x7b"]
    assert parameters(model) == 46_702_792_704
    others = 32 * 6 * 3 * 4096 * 14336
    assert product_weights(model) == linear_weights(model) - others
    assert 12.5e9 < product_weights(model) < 13e9
    assert 0.95e9 < product_weights(MODELS["mixtral-1b"]) < 1.1e9
    assert native_flops(model, checkpointing=False) is None
    assert all(product_weights(other) == linear_weights(other) for other in (MODELS["7b"], MODELS["35b"]))


def test_adapters_alone_have_gradients_of_weights() -> None:
    model = MODELS["7b"].shortened(2)
    network = with_adapters(build(model.config(32), device=torch.device("meta")), 8, alpha=16, targets=ALL_LINEAR)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    assert adapter_weights(model, 8) == trained
    saved = model_flops(model, sequence=32) - model_flops(model, sequence=32, lora=8)
    assert saved == 2 * product_weights(model) - 6 * trained


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_those_of_the_model_that_is_built(name: str) -> None:
    short = MODELS[name].shortened(2)
    config = short.config(sequence=32)
    network = build(config, device=torch.device("meta"))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters(short)
    linear = [module for module in network.modules() if isinstance(module, torch.nn.Linear)]
    assert sum(module.weight.numel() for module in linear) == linear_weights(short)
    assert config.max_position_embeddings >= 32
