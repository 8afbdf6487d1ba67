"""What a fused layer takes and returns is what transformers' own does, in the version that is installed."""

from __future__ import annotations

import copy
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from fp8booster import convert_to_fp8, fuse
from fp8booster.nn.fused.packing import CACHES
from fp8booster.nn.fused.self_attention import unfused_calls
from tests.colossal.moe.models import tiny_mixtral
from tests.nn.fused.models import FAMILIES, batch, build
from tests.nn.fused.test_decoder import sqnr

ALL = [*FAMILIES, "mixtral"]


def make(family: str, **changes: Any) -> nn.Module:
    """In FP32: what is fused differs by the order of sums alone."""
    if family != "mixtral":
        return build(family, torch.float32, **changes)
    return tiny_mixtral(**{"max_position_embeddings": 64, "use_cache": False} | changes).train()


def pair(family: str, **changes: Any) -> tuple[nn.Module, nn.Module]:
    """A model, and the same with its blocks fused."""
    plain = make(family, **changes)
    model = copy.deepcopy(plain)
    assert fuse(model).startswith("2 decoder layers fused")
    return plain, model


def arguments_of_a_layer(model: nn.Module) -> tuple[torch.Tensor, dict[str, Any]]:
    hidden = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(32)[None]
    return hidden, {"position_ids": positions, "position_embeddings": model.model.rotary_emb(hidden, positions)}


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("by_position", [False, True])
def test_a_layer_returns_what_its_class_does(family: str, by_position: bool) -> None:
    plain, model = pair(family)
    hidden, named = arguments_of_a_layer(plain)
    names = [
        each.name
        for each in inspect.signature(type(plain.model.layers[0]).forward).parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD
    ][2:]
    given = [named.pop(name, None) for name in names] if by_position else []
    right, found = (each.model.layers[0](hidden, *given, **named) for each in (plain, model))
    assert type(found) is type(right)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("family", ALL)
def test_what_a_caller_asks_for_besides(family: str) -> None:
    plain, model = pair(family, attn_implementation="eager")
    ids = batch()
    asked = {"output_hidden_states": True, "output_attentions": True}
    if family == "mixtral":
        asked["output_router_logits"] = True
    right, found = (each(input_ids=ids, labels=ids, **asked) for each in (plain, model))
    assert found.logits is None
    assert found.keys() == right.keys() - {"logits"}
    for name in found.keys() - {"past_key_values"}:
        assert found[name] is not None
        torch.testing.assert_close(found[name], right[name], msg=lambda text, name=name: f"{name}: {text}")


def keys_and_values(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of each layer, [B, H, S, D]."""
    if hasattr(cache, "key_cache"):
        return list(zip(cache.key_cache, cache.value_cache, strict=True))
    return [(layer.keys, layer.values) for layer in cache.layers]


@pytest.mark.parametrize("family", ALL)
def test_the_cache_is_filled_in_training_too(family: str) -> None:
    plain, model = pair(family, use_cache=True)
    ids = batch()
    right, found = (each(input_ids=ids, labels=ids, use_cache=True) for each in (plain, model))
    torch.testing.assert_close(found.loss, right.loss)
    assert not unfused_calls(model)
    held, expected = keys_and_values(found.past_key_values), keys_and_values(right.past_key_values)
    assert len(held) == len(expected) == 2
    assert held[0][0].shape == (2, 2, 32, 16)
    torch.testing.assert_close(held, expected)
    found.loss.backward()
    assert all(parameter.grad is not None for parameter in model.model.layers.parameters())
    # attention reads it: with tokens before them the next ones differ
    following = (
        each.model(ids[:, :4], past_key_values=out.past_key_values).last_hidden_state
        for each, out in ((plain, right), (model, found))
    )
    right, found = following
    torch.testing.assert_close(found, right)
    assert not torch.allclose(found, model.model(ids[:, :4]).last_hidden_state, atol=1e-3)


def test_an_attention_takes_a_cache_by_its_name_and_the_one_before() -> None:
    plain, model = pair("llama")
    hidden, named = arguments_of_a_layer(plain)
    taken = inspect.signature(type(plain.model.layers[0].self_attn).forward).parameters
    own = next(name for name in CACHES if name in taken)
    for name in {own, "past_key_values"} if own == "cache" else {own}:
        caches = DynamicCache(), DynamicCache()
        for _ in range(2):
            outputs = [
                each.model.layers[0].self_attn(hidden, attention_mask=None, **named, **{name: cache})[0]
                for each, cache in zip((plain, model), caches, strict=True)
            ]
            torch.testing.assert_close(*outputs)
        held, expected = map(keys_and_values, caches)
        assert held[0][0].shape == (2, 2, 64, 16)
        torch.testing.assert_close(held, expected)
    assert not unfused_calls(model)


@pytest.mark.parametrize("family", ALL)
def test_generation_with_and_without_the_cache_gives_the_same_tokens(family: str) -> None:
    _, model = pair(family, initializer_range=0.2)
    model.eval()
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = batch()
    tokens = model.generate(ids, use_cache=True, **how)
    assert tokens.shape == (2, 38)
    assert torch.equal(tokens, model.generate(ids, use_cache=False, **how))
    assert torch.equal(tokens, model.generate(ids, cache_implementation="static", **how))


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_evaluation_attends_to_what_the_cache_holds(family: str, in_fp8: bool) -> None:
    model = make(family, initializer_range=0.2)
    if in_fp8:
        convert_to_fp8(model)
    fuse(model)
    model.eval()
    ids = batch()
    with torch.no_grad():
        right = model(ids).logits[:, -1]
        cache = model(ids[:, :-1], use_cache=True).past_key_values
        found = model(ids[:, -1:], past_key_values=cache).logits[:, -1]
        alone = model(ids[:, -1:]).logits[:, -1]
    assert sqnr(found, right) > (15 if in_fp8 else 90)
    assert sqnr(alone, right) < 5


@pytest.mark.parametrize("argument", ["position_bias", "cache", "softcap", "is_causal"])
def test_what_attention_would_read_is_not_ignored(argument: str) -> None:
    _, model = pair("llama")
    attention = model.model.layers[0].self_attn
    assert attention.why_unlike(attention_mask=None, position_ids=None) is None
    is_own = argument in attention.native_arguments  # the cache of transformers 5.24
    assert attention.why_unlike(**{argument: SimpleNamespace()}) == (None if is_own else f"it is given {argument}")


def test_an_attention_may_be_told_later_not_to_be_causal() -> None:
    plain, model = pair("llama")
    for each in (plain, model):
        for layer in each.model.layers:
            layer.self_attn.is_causal = False
    ids = batch()
    right, found = (each(input_ids=ids, labels=ids).loss for each in (plain, model))
    torch.testing.assert_close(found, right)
