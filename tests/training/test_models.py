"""Layers that compute their activations again in backward: all of a model's, or the first so many."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from fp8booster import FP8Config, convert_to_fp8, fuse
from fp8booster.training.models import MODELS, build, prepared, recompute
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks

LAYERS = 4


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "_scaled_mm")
        return func(*args, **(kwargs or {}))


def step(model: torch.nn.Module) -> tuple[int, list[torch.Tensor]]:
    """Products of a forward and backward, and the gradients."""
    ids = token_batch(seed=1)
    with Products() as products:
        model(input_ids=ids, labels=ids).loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return products.count, gradients


def model_in(precision: str) -> torch.nn.Module:
    model = tiny_llama(num_hidden_layers=LAYERS).train()
    if precision == "fp8":
        convert_to_fp8(model, FP8Config(always=True))
        fuse(model)
    return model


@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_so_many_layers_run_twice_and_gradients_stay(precision: str) -> None:
    once, expected = step(model_in(precision))
    counts = []
    for layers in (1, 3, LAYERS, None):
        model = model_in(precision)
        recompute(model, layers)
        twice, gradients = step(model)
        counts.append(twice - once)
        assert all(map(torch.equal, gradients, expected))
    a_layer = counts[0]
    assert a_layer > 0
    assert counts == [a_layer, 3 * a_layer, LAYERS * a_layer, LAYERS * a_layer]


def test_evaluation_is_not_computed_again() -> None:
    model = model_in("fp8")
    recompute(model, 2)
    ids = token_batch(seed=1)
    assert torch.equal(model.eval()(input_ids=ids).logits, model_in("fp8").eval()(input_ids=ids).logits)


@ranks(2)
def test_layers_in_fsdp_keep_what_they_shall() -> None:
    counts = []
    for layers in (None, 1):
        model = tiny_llama(num_hidden_layers=LAYERS)
        recompute(model, layers)
        blocks = ModuleWrapPolicy({type(model.model.layers[0])})
        counts.append(step(FullyShardedDataParallel(model, auto_wrap_policy=blocks, device_id=torch.device("cpu")))[0])
    model = FullyShardedDataParallel(tiny_llama(num_hidden_layers=LAYERS), device_id=torch.device("cpu"))
    once = step(model)[0]
    assert counts[0] - once == LAYERS * (counts[1] - once) > 0


def test_more_layers_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match="the model has 4 layers"):
        recompute(tiny_llama(num_hidden_layers=LAYERS), 5)


def test_a_model_by_name_takes_a_number() -> None:
    config = MODELS["micro"].config(64)
    for checkpointing in (False, True, 1):
        model = build(config, device=torch.device("meta"), checkpointing=checkpointing)
        assert model.training
        assert model.is_gradient_checkpointing == bool(checkpointing)
    assert not prepared(tiny_llama(), False).is_gradient_checkpointing


def _skip_where_unknown(name: str) -> None:
    if MODELS[name].family not in transformers.CONFIG_MAPPING:
        pytest.skip("not a family of this transformers")


def test_a_family_that_transformers_does_not_have_is_refused_with_its_name() -> None:
    unknown = replace(MODELS["micro"], family="of-tomorrow")
    with pytest.raises(ValueError, match=f"transformers {transformers.__version__} has no of-tomorrow"):
        unknown.config(64)


def test_a_mixture_has_its_experts_under_the_names_of_its_family() -> None:
    shape = replace(MODELS["qwen3-30b-a3b"], layers=1)
    config = shape.config(64)
    assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (128, 8, 768)
    assert (config.head_dim, shape.key_value) == (128, 512)
    config = MODELS["mixtral-8x7b"].config(64)
    assert (config.num_local_experts, config.num_experts_per_tok, config.intermediate_size) == (8, 2, 14336)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("7b", 6_738_415_616),
        ("30b", 32_528_943_616),
        ("35b", 34_980_831_232),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen2.5-7b", 7_615_616_512),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_sizes_are_the_published_ones(name: str, parameters: int) -> None:
    _skip_where_unknown(name)
    network = build(MODELS[name].config(sequence=32), device=torch.device("meta"))
    assert sum(parameter.numel() for parameter in network.parameters()) == parameters


@pytest.mark.parametrize("name", MODELS)
def test_a_config_has_positions_for_the_sequence(name: str) -> None:
    _skip_where_unknown(name)
    assert MODELS[name].config(sequence=2**18).max_position_embeddings == 2**18
