"""Keys and values in FP8, in the cache of transformers that is installed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM

from fp8booster import FP8Config, quantize
from fp8booster.serving.key_value_cache import FP8Cache, cache_bytes, pack, unpack
from tests.nn.models import tiny_llama

VOCABULARY = 128


def sequences(count: int, length: int = 24) -> torch.Tensor:
    """Tokens of which each but a few repeats the third before it."""
    ids = torch.randint(VOCABULARY, (count, length))
    for place in range(3, length):
        ids[:, place] = torch.where(torch.rand(count) < 0.95, ids[:, place - 3], ids[:, place])
    return ids


@pytest.fixture(scope="module")
def trained() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = tiny_llama(head_dim=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(150):
        ids = sequences(32)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss < 2.5  # of 4.85 by chance
    return model.bfloat16().eval()


def generate(model: LlamaForCausalLM, ids: torch.Tensor, cache: Any, **how: Any) -> Any:
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=12,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **how,
    )
    return made.sequences, torch.stack(made.logits or (), 1).float()


def divergence(logits: torch.Tensor, others: torch.Tensor) -> float:
    """Mean KL, in nats a token."""
    first, second = logits.log_softmax(-1), others.log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1).mean().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [16, 20, 64, 7])
def test_each_token_and_head_has_a_scale_of_its_own(dtype, size, device) -> None:
    states = torch.randn(2, 3, 5, size, device=device, dtype=dtype)
    states *= torch.tensor([1e-3, 1, 100, 30, 0], device=device, dtype=dtype)[:, None]
    packed = pack(states)
    assert packed.shape == (2, 3, 5, size + 4)
    assert packed.dtype is torch.uint8
    found = unpack(packed, dtype)
    assert found.dtype is dtype
    # E4M3 has 3 bits of mantissa, and of the largest value of a row 2**-9 / 448 at least
    bound = states.float().abs() * 2**-4 + states.float().abs().amax(-1, keepdim=True) * 2**-9 / 448
    assert bool(((found.float() - states.float()).abs() <= bound * 1.01 + 1e-7).all())
    assert torch.equal(unpack(packed[:, :, 1:3], dtype), found[:, :, 1:3])
    assert torch.equal(unpack(pack(states.transpose(1, 2)), dtype), found.transpose(1, 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tokens_are_packed_to_none(dtype) -> None:
    packed = pack(torch.empty(2, 3, 0, 16, dtype=dtype))
    assert packed.shape == (2, 3, 0, 20)
    assert packed.dtype is torch.uint8
    assert unpack(packed, dtype).shape == (2, 3, 0, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_keys_and_values_come_back_in_their_own_type_and_order(dtype) -> None:
    """Keys may have another size than values, and another type."""
    cache = FP8Cache()
    keys, values = torch.ones(1, 2, 3, 16, dtype=dtype), torch.full((1, 2, 3, 8), 2.0, dtype=torch.float32)
    cache.update(keys, values, 0)
    keys.mul_(4), values.mul_(4)  # what is kept is no view
    found = cache.update(keys[:, :, :1], values[:, :, :1], 0)
    assert [each.dtype for each in found] == [dtype, torch.float32]
    for each, (before, after), size in zip(found, ((1, 4), (2, 8)), (16, 8), strict=True):
        assert each.shape == (1, 2, 4, size)
        torch.testing.assert_close(each[:, :, :3].float(), torch.full((1, 2, 3, size), float(before)))
        torch.testing.assert_close(each[:, :, 3:].float(), torch.full((1, 2, 1, size), float(after)))
    assert cache_bytes(cache) == 2 * 4 * (16 + 4 + 8 + 4)


def test_the_bytes_of_every_kind_of_cache_are_counted() -> None:
    keys, values = torch.ones(1, 2, 3, 16, dtype=torch.bfloat16), torch.ones(1, 2, 3, 8, dtype=torch.float32)
    cache = DynamicCache()
    for layer in range(2):
        cache.update(keys, values, layer)
    expected = 2 * (keys.nbytes + values.nbytes)
    layers = [SimpleNamespace(keys=keys, values=values), SimpleNamespace(keys=None, values=None), SimpleNamespace()]
    assert cache_bytes(cache) == cache_bytes(((keys, values), (keys, values))) == expected
    assert 2 * cache_bytes(SimpleNamespace(layers=layers)) == expected
    assert 2 * cache_bytes(SimpleNamespace(key_cache=[keys], value_cache=[values])) == expected
    assert cache_bytes(None) == cache_bytes(DynamicCache()) == 0


@pytest.mark.parametrize("quantized", [False, True])
def test_greedy_outputs_are_near_those_of_the_cache_in_16_bits(trained, quantized) -> None:
    model = copy.deepcopy(trained)
    if quantized:
        quantize(model, FP8Config(emulate=True))
    torch.manual_seed(1)
    ids = sequences(16, 12)
    caches = DynamicCache(), FP8Cache()
    (expected, logits), (found, others) = (generate(model, ids, cache) for cache in caches)
    assert found.shape == expected.shape == (16, 24)
    # as far as both have chosen alike
    alike = (found == expected).cummin(1).values[:, 12:]
    assert alike.float().mean() > 0.8
    assert 0 < divergence(logits[alike], others[alike]) < 2e-3
    in_16_bits, in_fp8 = map(cache_bytes, caches)
    assert in_fp8 / in_16_bits == (64 + 4) / (2 * 64)


def test_a_token_sees_the_same_however_the_text_before_it_came(trained) -> None:
    ids = sequences(2, 12)
    cache = FP8Cache()
    with torch.no_grad():
        whole = trained(input_ids=ids, past_key_values=FP8Cache(), use_cache=True).logits
        steps = [trained(input_ids=ids[:, i : i + 4], past_key_values=cache, use_cache=True).logits for i in (0, 4, 8)]
    torch.testing.assert_close(torch.cat(steps, 1), whole, rtol=0.02, atol=0.05)
    assert cache.get_seq_length() == 12


def test_beams_reorder_it(trained) -> None:
    torch.manual_seed(2)
    ids = sequences(4, 8)
    (expected, _), (found, _) = (generate(trained, ids, cache, num_beams=3) for cache in (DynamicCache(), FP8Cache()))
    assert (found == expected).float().mean() > 0.8


def test_it_is_cropped_as_transformers_does(trained) -> None:
    ids = sequences(2, 12)
    cropped, short = FP8Cache(), FP8Cache()
    with torch.no_grad():
        trained(input_ids=ids, past_key_values=cropped, use_cache=True)
        cropped.crop(-4)
        trained(input_ids=ids[:, :8], past_key_values=short, use_cache=True)
        assert cropped.get_seq_length() == 8
        after, expected = (
            trained(input_ids=ids[:, 8:9], past_key_values=cache, use_cache=True).logits for cache in (cropped, short)
        )
    torch.testing.assert_close(after, expected, rtol=0.02, atol=0.05)
