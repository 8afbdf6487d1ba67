"""Every family, fused: the numbers of transformers', and what of it is not fused."""

from __future__ import annotations

import copy
import re
from unittest import mock

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama

from fp8booster import FP8Config, convert_to_fp8, fuse, report
from fp8booster.config import Activations
from fp8booster.nn.fused.attention import attend_packed
from fp8booster.nn.fused.families import FAMILIES, PARTS
from fp8booster.nn.fused.lazy import LazySum
from fp8booster.nn.fused.norm import FusedNorm, HeadNorms
from fp8booster.nn.fused.part import FusedGatedMLP
from fp8booster.nn.fused.self_attention import FusedAttention, LatentAttention
from fp8booster.nn.fused.trials import is_gated, norm_of
from tests.nn.fused.models import INSTALLED, MAJOR, SIZES, batch, build
from tests.nn.fused.test_decoder import sqnr, step

EAGER = "attention but for its one product: attn_implementation='eager' has no fused form"


UNFUSED = {"gemma2": [] if MAJOR < 5 else [EAGER]}
"""What is not fused of a family's two layers; nothing of the others'."""


def test_all_families_have_a_small_model() -> None:
    assert {each.removesuffix("_text") for each in SIZES} == set(FAMILIES)


@pytest.mark.parametrize("family", INSTALLED)
def test_a_fused_family_has_the_gradients_of_transformers(family: str) -> None:
    exact = build(family, torch.float32)
    model = copy.deepcopy(exact)
    state = copy.deepcopy(model.state_dict())
    summary = fuse(model)
    left = re.search(r"fused \((.*?)\), loss", summary)
    assert summary.startswith("2 decoder layers fused")
    assert ([] if left is None else left[1].split("; ")) == [f"2 not: {each}" for each in UNFUSED.get(family, [])]
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    for options in ({}, {"attention_mask": torch.ones_like(batch()).index_fill_(1, torch.arange(4), 0)}):
        (right, expected), (loss, gradients) = (step(each, **options) for each in (exact, model))
        assert loss == pytest.approx(right, rel=1e-6)
        for name, gradient in expected.items():
            if gradient is None:
                assert gradients[name] is None, name
            else:
                assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("family", INSTALLED)
def test_in_fp8_it_is_as_exact_as_fp8_layers_alone(family: str) -> None:
    exact = build(family, torch.float32)
    plain, model = (convert_to_fp8(copy.deepcopy(exact), FP8Config(emulate=True)) for _ in range(2))
    fuse(model)
    (_, right), (_, alone), (_, ours) = map(step, (exact, plain, model))
    noise = [0.0, 0.0]
    for name, gradient in right.items():
        if gradient is not None and gradient.norm() > 1e-4:
            assert sqnr(ours[name], gradient) > min(14, sqnr(alone[name], gradient) - 5), name
            for number, found in enumerate((alone, ours)):
                noise[number] += ((found[name] - gradient).norm() / gradient.norm()).item()
    # where experts are chosen from noisy scores, some tokens go to others
    assert noise[1] < (1.5 if hasattr(exact.config, "num_experts_per_tok") else 1.2) * noise[0]


@pytest.mark.parametrize(
    ("family", "saved"),
    [
        ("gemma2", ("8 norms", "2 activations")),
        ("cohere", ("2 norms", "2 SwiGLUs")),
        ("phi3", ("4 norms", "2 SwiGLUs")),
        ("gpt_neox", ("4 norms", "2 activations")),
        ("gpt2", ("4 norms", "2 activations")),
    ],
)
def test_what_is_saved_in_8_bits(family: str, saved: tuple[str, ...]) -> None:
    found = []
    for kind in ("16-bit", "8-bit"):
        model = convert_to_fp8(build(family), FP8Config(emulate=True, activations=Activations(saved=kind)))
        fuse(model)
        found.append(step(model))
        assert report(model).saved_in_8_bits == (saved if kind == "8-bit" else ())
    (loss, gradients), (again, of_8_bits) = found
    assert again == loss
    for name, gradient in gradients.items():
        # keys' biases change no attention: noise
        if gradient.norm() > 1e-3 and not name.endswith(".bias"):
            assert sqnr(of_8_bits[name], gradient) > 15, name
    assert any(not torch.equal(of_8_bits[name], gradient) for name, gradient in gradients.items())


@pytest.mark.parametrize("family", INSTALLED)
def test_evaluation_and_the_cache_are_those_of_transformers(family: str) -> None:
    exact = build(family, torch.float32, initializer_range=0.2).eval()
    model = copy.deepcopy(exact)
    fuse(model)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    right, found = (each.generate(batch(), **how) for each in (exact, model))
    assert right.shape == (2, 36)
    assert torch.equal(found, right)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", INSTALLED)
def test_checkpointed_layers_have_the_same_gradients(family: str, reentrant: bool) -> None:
    model = build(family, torch.float32)
    fuse(model)
    loss, right = step(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    again, gradients = step(model)
    assert again == loss
    for name, gradient in right.items():
        assert gradient is None or torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize("family", ["phi3", "glm4", "stablelm", "gpt_neox"])
@pytest.mark.parametrize("factor", [0.25, 0.5])
def test_parts_of_heads_are_rotated(family: str, factor: float) -> None:
    """4.51.3 reads the factor from the configuration, 5 from the parameters of its rotary embedding."""
    name = "rotary_pct" if family == "gpt_neox" and MAJOR < 5 else "partial_rotary_factor"
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    exact = build(family, torch.float32, **({name: factor} if MAJOR < 5 else {"rope_parameters": rope}))
    cos, _ = exact.base_model.rotary_emb(torch.zeros(1, 4, 64), torch.arange(4)[None])
    assert cos.shape[-1] == 16 * factor
    model = copy.deepcopy(exact)
    fuse(model)
    (right, expected), (loss, gradients) = map(step, (exact, model))
    assert loss == pytest.approx(right, rel=1e-6)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


def as_unfused(exact: nn.Module, ids: torch.Tensor | None = None, **options: object) -> nn.Module:
    """A fused copy of a model, whose loss and gradients are those of the model."""
    model = copy.deepcopy(exact)
    assert " not: " not in fuse(model)
    (right, expected), (loss, gradients) = (step(each, ids, **options) for each in (exact, model))
    assert loss == pytest.approx(right, rel=1e-6)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    return model


@pytest.mark.parametrize("groups", [1, 2])
def test_each_head_may_have_a_norm_of_its_own(groups: int) -> None:
    exact = build("cohere", torch.float32, use_qk_norm=True, num_key_value_heads=4 // groups)
    for parameter in exact.parameters():
        nn.init.normal_(parameter, std=0.2)
    model = as_unfused(exact)
    with pytest.raises(ValueError, match=r"weights \[4, 16\] was given \[1, 5, 2, 16\]; give it those heads"):
        model.model.layers[0].self_attn.q_norm(torch.zeros(1, 5, 2, 16))


LATENTS = [each for each in ("deepseek_v2", "deepseek_v3") if each in INSTALLED]
"""Families whose heads are made of latents."""


@pytest.mark.parametrize("family", LATENTS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"q_lora_rank": None},
        {"qk_nope_head_dim": 48, "v_head_dim": 24},
        {"qk_rope_head_dim": 8, "v_head_dim": 32, "rope_interleave": False},
    ],
)
def test_heads_are_made_of_latents_of_any_size(family: str, sizes: dict[str, object]) -> None:
    if MAJOR < 5 and "q_lora_rank" in sizes:
        pytest.skip("4.51.3 always has a latent of queries")
    attention = as_unfused(build(family, torch.float32, **sizes)).model.layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    assert attention.form.rotation.interleaved == (family == "deepseek_v2" or "rope_interleave" not in sizes)


@pytest.mark.parametrize("family", LATENTS)
def test_a_cache_of_latents_is_that_of_transformers_and_reported(family: str) -> None:
    exact = build(family, torch.float32, use_cache=True)
    model = as_unfused(exact)
    model(input_ids=batch(), labels=batch(), use_cache=True)
    assert report(model).unfused_calls == (("a cache holds latents; give use_cache=False", 2),)
    right, found = (each(input_ids=batch(), use_cache=True) for each in (exact, model))
    torch.testing.assert_close(found.logits, right.logits)
    with pytest.raises(ValueError, match=r"packed sequences .* give use_cache=False"):
        model(input_ids=batch()[:1], position_ids=torch.arange(32)[None] % 16, use_cache=True)


def test_norms_of_heads_that_are_modules_are_one() -> None:
    exact = build("stablelm", torch.float32, qk_layernorm=True)
    for parameter in exact.parameters():
        nn.init.normal_(parameter, std=0.2)
    attention = as_unfused(exact).model.layers[0].self_attn
    norm = attention.k_layernorm.norms[1]
    x, seen = torch.randn(2, 3, 2, 16), []
    right = HeadNorms.of(attention.k_layernorm)(x)
    norm.register_forward_hook(lambda module, args, output: seen.append(output))
    torch.testing.assert_close(HeadNorms.of(attention.k_layernorm)(x), right)
    torch.testing.assert_close(seen[0], right[..., 1:, :])


@pytest.mark.parametrize("use_cache", [False, True] if MAJOR >= 5 else [False])
def test_llama_4_without_positions_scales_late_queries(use_cache: bool) -> None:
    """Layer 4 has no rotation in every version; the 32 tokens are on both sides of the place from which it scales."""
    sizes = {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "attn_scale": 2.0, "use_cache": use_cache}
    for floor_scale in (8192, 33, 32, 16):
        model = as_unfused(build("llama4_text", torch.float32, floor_scale=floor_scale, **sizes))
        attention = model.model.layers[3].self_attn
        assert attention.is_tempered
        model(input_ids=batch(), labels=batch(), use_cache=use_cache)
        why = f"queries are scaled from token {floor_scale} on, or behind a cache"
        assert report(model).unfused_calls == (((why, 1),) if use_cache or floor_scale <= 32 else ())
        assert isinstance(attention, FusedAttention)
        assert not attention.form.rotation.rotates
        assert model.model.layers[2].self_attn.form.angles == "complex"


@pytest.mark.skipif(MAJOR < 5, reason="4.51.3 makes no mask of chunks where it is given none")
def test_llama_4_attends_in_chunks() -> None:
    as_unfused(build("llama4_text", torch.float32, attention_chunk_size=12))


@pytest.mark.skipif("gpt_oss" not in INSTALLED, reason="this transformers has no gpt-oss")
@pytest.mark.parametrize("use_cache", [False, True])
def test_sinks_without_a_mask_are_those_of_transformers(use_cache: bool) -> None:
    """The first layer has a window of 6 tokens; sinks are as large as scores."""
    exact = build("gpt_oss", torch.float32, sliding_window=6, use_cache=use_cache)
    for layer in exact.model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    with mock.patch("fp8booster.nn.fused.self_attention.attend_packed", wraps=attend_packed) as called:
        model = as_unfused(exact)
    assert [each.kwargs["window"] for each in called.call_args_list[-2:]] == [6, None]
    assert model.model.layers[0].self_attn.sinks.grad.norm() > 0
    mask = torch.ones_like(batch()).index_fill_(1, torch.arange(4), 0)
    for options in ({"attention_mask": mask}, {"output_attentions": True}):
        right, found = (each(input_ids=batch(), **options) for each in (exact, model))
        torch.testing.assert_close(found.logits, right.logits)
        why = "attention with sinks takes no attention_mask, no cache, and gives no weights"
        assert f", attention of 2 layers unfused for some calls ({why})" in report(model).summary()
        if "output_attentions" in options:
            torch.testing.assert_close(found.attentions, right.attentions)


def test_a_layer_of_another_structure_is_what_its_class_makes_of_it() -> None:
    class Other(modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor | tuple[torch.Tensor]:
            attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)
            between = (hidden_states + 2 * attended) * 0.5
            after = self.mlp(self.post_attention_layernorm(between)).tanh() + torch.relu(between) - attended
            return (after,) if MAJOR < 5 else after

    Other.__module__ = modeling_llama.LlamaDecoderLayer.__module__
    exact = build(dtype=torch.float32)
    for layer in exact.model.layers:
        layer.__class__ = Other
    model = copy.deepcopy(exact)
    assert fuse(model).startswith("2 decoder layers fused, ")
    (right, expected), (loss, gradients) = map(step, (exact, model))
    assert loss == pytest.approx(right, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_parts_that_compute_something_else_are_seen() -> None:
    class Norm(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + 0.001 * x

    class MLP(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    class Attention(modeling_llama.LlamaAttention):
        def forward(self, hidden_states: torch.Tensor, position_embeddings: tuple, **kwargs: object) -> tuple:
            cos, sin = position_embeddings
            return super().forward(hidden_states, position_embeddings=(cos, -sin), **kwargs)

    gated = PARTS[5]
    assert gated.merged == ("gate_proj", "up_proj")
    assert norm_of(Norm) is None
    assert not is_gated(MLP, gated)
    assert norm_of(modeling_llama.LlamaRMSNorm) is not None
    assert is_gated(modeling_llama.LlamaMLP, gated)
    model = build(dtype=torch.float32)
    layer = model.model.layers[0]
    for part, cls in ((layer.input_layernorm, Norm), (layer.mlp, MLP), (layer.self_attn, Attention)):
        cls.__module__ = modeling_llama.__name__
        part.__class__ = cls
    exact = copy.deepcopy(model)
    assert fuse(model).startswith(
        "2 decoder layers fused (1 not: attention but for its one product: Attention has no fused form; 1 not: MLP but "
        "for its activation: MLP computes something else than this version knows; 1 not: norm: Norm has no fused form)"
    )
    kinds = [FusedNorm, FusedGatedMLP, FusedAttention]
    assert not any(map(isinstance, (layer.input_layernorm, layer.mlp, layer.self_attn), kinds))
    assert step(model)[0] == pytest.approx(step(exact)[0], rel=1e-6)


def test_a_lazy_sum_is_the_tensor_that_it_is() -> None:
    x, y = torch.randn(2, 3, 4)
    lazy = x + LazySum(y)
    assert isinstance(lazy, LazySum)
    assert len(lazy.terms) == 2
    assert torch.equal(lazy.relu(), (x + y).relu())
    assert len(lazy.terms) == 1
    for found, right in (
        (2 * LazySum(x) + y, 2 * x + y),
        (torch.add(x, LazySum(y)), x + y),
        (LazySum(x) + LazySum(y) + x, x + y + x),
        (x + LazySum(y[:1]), x + y[:1]),
        (LazySum(x) + 1, x + 1),
        (LazySum(x, y), x + y),
    ):
        assert isinstance(found, LazySum)
        assert torch.equal(found.made(), right)
    assert torch.equal(nn.functional.gelu(LazySum(x, y)), nn.functional.gelu(x + y))
    assert torch.equal(torch.sub(x, LazySum(y), alpha=2), x - 2 * y)
