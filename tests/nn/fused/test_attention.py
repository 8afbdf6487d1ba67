"""Attention of fused layers against softmax written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from fp8booster.nn.fused import attention
from fp8booster.nn.fused.attention import attend, why_unlike
from fp8booster.nn.fused.attention_form import Form
from fp8booster.nn.fused.self_attention import FusedAttention

QUERIES, PAST = 5, 3
"""Tokens that attend, and those of a cache before them."""


def written_out(query, key, value, seen, scale) -> torch.Tensor:
    groups = query.shape[1] // key.shape[1]
    heads = []
    for head in range(query.shape[1]):
        scores = query[:, head] @ key[:, head // groups].mT * scale
        heads.append(scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value[:, head // groups])
    return torch.stack(heads, 1)


@pytest.mark.parametrize("scale", [None, 0.9])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("kernel", [True, False], ids=["shared keys", "repeated keys"])
@pytest.mark.parametrize("case", ["causal", "masked", "behind a cache", "one token behind a cache"])
def test_scores_are_scaled_masked_and_shared(case, kernel, key_heads, scale, monkeypatch) -> None:
    """A mask may be longer than the keys, as transformers makes it for a cache of a fixed length."""
    monkeypatch.setattr(attention, "takes_mask_and_groups", lambda query: kernel)
    past = PAST if "cache" in case else 0
    queries = 1 if "one" in case else QUERIES
    keys = past + queries
    query = torch.randn(2, 4, queries, 16, requires_grad=True)
    key = torch.randn(2, key_heads, keys, 16, requires_grad=True)
    value = torch.randn(2, key_heads, keys, 8, requires_grad=True)
    seen = torch.ones(2, queries, keys, dtype=torch.bool).tril(past)
    mask = None
    if case == "masked":
        seen[0, :, :2] = False
        seen[0].fill_diagonal_(True)
    if case in ("masked", "behind a cache"):
        mask = torch.cat([seen, torch.ones(2, queries, 4, dtype=torch.bool)], -1)[:, None]
    found = attend(query, key, value, mask, scale=scale)
    right = written_out(query, key, value, seen, 16**-0.5 if scale is None else scale)
    torch.testing.assert_close(found, right)
    dy = torch.randn_like(right)
    gradients = [torch.autograd.grad(each, [query, key, value], dy) for each in (found, right)]
    torch.testing.assert_close(*gradients)


def test_scores_drop_out_by_the_share_that_is_asked_for() -> None:
    ones = torch.ones(1, 1, 64, 16)
    kept = attend(ones, ones, torch.eye(64)[None, None], torch.ones(1, 1, 64, 64, dtype=torch.bool), dropout=0.75)
    assert (kept == 0).float().mean().item() == pytest.approx(0.75, abs=0.05)
    assert kept.max().item() == pytest.approx(4 / 64)
    assert math.isclose(attend(ones, ones, ones).mean().item(), 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("name", ["is_causal", "position_bias", "cache", "softcap", "head_mask"])
def test_arguments_that_only_transformers_reads_are_left_to_it(name) -> None:
    assert why_unlike("sdpa", {name: None}) is None
    assert why_unlike("sdpa", {name: False}) == f"it is given {name}"


def test_other_implementations_and_weights_are_left_to_transformers() -> None:
    assert why_unlike("eager", {}) == "attn_implementation='eager'"
    assert why_unlike("sdpa", {"output_attentions": True}) == "its weights are asked for"
    assert why_unlike("sdpa", {"output_attentions": False, "use_cache": True}) is None


@pytest.mark.parametrize("window", [None, 7])
def test_a_cache_is_told_where_and_of_the_window(window) -> None:
    told = []
    cache = SimpleNamespace(update=lambda key, value, layer, place: told.append((layer, place)) or (key, value))
    layer = SimpleNamespace(native_arguments=("cache_position",), form=Form(), layer_idx=3, sliding_window=window)
    cos, sin, place = torch.ones(1), torch.zeros(1), torch.arange(2)
    key, value = torch.randn(2, 1, 2, 2, 4)
    arguments = {"cache_position": place, "position_embeddings": (cos, sin)}
    assert FusedAttention.cached(layer, key, value, cache, arguments) == (key, value)
    of_window = {} if window is None else {"sliding_window": window}
    assert told == [(3, {"cache_position": place, "sin": sin, "cos": cos} | of_window)]


@pytest.mark.parametrize(
    ("activated", "features", "dropout", "first"),
    [
        (None, 64, 0.0, None),
        ("FA4", 64, 0.0, SDPBackend.FLASH_ATTENTION),
        ("FA4", 192, 0.0, None),
        ("FA4", 64, 0.1, None),
    ],
)
def test_a_flash_attention_that_was_activated_comes_first(activated, features, dropout, first, monkeypatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: activated, raising=False)
    seen: list[int] = []

    def sdpa(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        seen.extend(torch._C._get_sdp_priority_order())
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    usual = torch._C._get_sdp_priority_order()
    query = torch.randn(1, 2, 4, features)
    attend(query, query, query, dropout=dropout)
    assert seen[0] == (usual[0] if first is None else first.value)
    assert sorted(seen) == sorted(usual)
    assert torch._C._get_sdp_priority_order() == usual


@pytest.mark.parametrize("chosen", [[SDPBackend.MATH], [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]])
def test_what_the_program_has_switched_off_stays_off_beside_an_activated_flash_attention(chosen, monkeypatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    seen: list[list[SDPBackend]] = []

    def sdpa(query: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        seen.append(attention._allowed())
        return query

    monkeypatch.setattr(F, "scaled_dot_product_attention", sdpa)
    query = torch.randn(1, 2, 4, 64)
    with sdpa_kernel(chosen):
        attend(query, query, query)
    assert seen == [chosen]


def test_attention_is_compiled_whole_beside_an_activated_flash_attention(monkeypatch) -> None:
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: "FA4", raising=False)
    query = torch.randn(1, 2, 4, 64)
    compiled = torch.compile(attend, fullgraph=True, backend="eager")
    assert torch.equal(compiled(query, query, query), attend(query, query, query))
