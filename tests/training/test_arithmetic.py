from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, DeepseekV3Config, LlamaConfig, MistralConfig

from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.nn.linear.speed_model import Rates
from fp8booster.training.adapters import ALL_LINEAR, with_adapters
from fp8booster.training.arithmetic import token_flops
from fp8booster.training.models import MODELS, Architecture, build

META = torch.device("meta")
RATES = Rates(bf16=1e12, fp8=2e12, cast=1e12, product_overhead=0.0, cast_overhead=0.0)


def counted(architecture: Architecture, sequence: int = 32):
    return token_flops(build(architecture.config(sequence), device=META), sequence)


def test_flops_of_a_7b_token_by_hand() -> None:
    flops = counted(MODELS["7b"], 4096)
    layer = 4 * 4096 * 4096 + 3 * 4096 * 11008
    weights = 32 * layer + 4096 * 32000
    assert sum(flops.products.values()) == 2 * weights == 2 * 6_607_077_376
    assert flops.products["model.layers.31.mlp.down_proj"] == 2 * 4096 * 11008
    # scores and values: 2 products of 2 x 4096 x 4096 operations, half of them masked, once forward and twice backward
    assert flops.attention == 32 * 3 * 2 * (2 * 4096 * 4096) // 2
    assert flops.total == 6 * weights + flops.attention == 42_863_689_728


@pytest.mark.parametrize("name", ["micro", "micro-cohere"])
def test_products_are_those_that_torch_counts(name: str) -> None:
    # torch counts no attention by SDPA on a CPU
    model = AutoModelForCausalLM.from_config(MODELS[name].config(32), attn_implementation="eager")
    flops = token_flops(model, 32)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(1, 32, dtype=torch.long)).logits.sum().backward()
    counts = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    batched = sum(count for operator, count in counts.items() if "bmm" in operator)
    assert sum(counts.values()) - batched == 32 * (flops.total - flops.attention)
    # the masked half of attention's products as well, and with transformers 4 the angles of rotary embeddings
    assert batched == pytest.approx(2 * 32 * flops.attention, rel=1e-3)


def test_a_shared_head_is_multiplied() -> None:
    assert sum(counted(MODELS["35b"].shortened(2)).products.values()) == 2 * (
        2 * (4 * 8192**2 + 3 * 8192 * 22528) + 8192 * 256000
    )


def test_a_token_is_multiplied_by_the_experts_that_it_goes_through() -> None:
    short = MODELS["mixtral-8x7b"].shortened(2)
    attention = 2 * 4096**2 + 2 * 4096 * 1024
    weights = 2 * (attention + 2 * 3 * 4096 * 14336 + 8 * 4096) + 4096 * 32000
    assert sum(counted(short).products.values()) == 2 * weights


def test_adapters_alone_have_gradients_of_weights() -> None:
    architecture = MODELS["7b"].shortened(2)
    plain = counted(architecture)
    network = with_adapters(build(architecture.config(32), device=META), 8, alpha=16, targets=ALL_LINEAR)
    trained = sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad)
    saved = plain.total - token_flops(network, 32).total
    assert saved == sum(plain.products.values()) - 6 * trained


def attention_of(config: object, sequence: int = 64) -> int:
    return token_flops(build(config, device=META), sequence).attention


def test_attention_is_that_of_its_windows_and_of_its_sizes() -> None:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
    }
    whole = attention_of(LlamaConfig(**shape))
    assert whole == 6 * 2 * 64 * 64
    assert attention_of(LlamaConfig(**shape, head_dim=32)) == 2 * whole
    assert attention_of(MistralConfig(**shape, sliding_window=None)) == whole
    assert attention_of(MistralConfig(**shape, sliding_window=64)) == whole
    # counted one by one: tokens 1 to 15 see all before them and themselves, others 16; a half more in a causal mean
    seen = sum(min(token, 16) for token in range(1, 65)) / 64
    assert attention_of(MistralConfig(**shape, sliding_window=16)) == pytest.approx(whole * (seen - 0.5) / 32, rel=0.05)
    latent = DeepseekV3Config(
        **shape | {"num_key_value_heads": 4},
        first_k_dense_replace=2,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=40,
    )
    assert attention_of(latent) == 2 * whole


@pytest.mark.parametrize("lacking", ["num_attention_heads", "num_experts_per_tok"])
def test_a_model_that_cannot_be_counted_is_refused(lacking: str) -> None:
    model = build(MODELS["micro-mixtral"].config(32), device=META)
    known = {name: value for name, value in model.config.to_dict().items() if name != lacking}
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**known))
    with pytest.raises(ValueError, match=rf"does not tell how many .*; give it {lacking}"):
        token_flops(model, 32)


def test_products_reach_the_rates_of_what_they_compute_in() -> None:
    model = build(MODELS["micro"].config(32), device=torch.device("cpu"))
    flops = token_flops(model, 32)
    assert flops.reachable({}, RATES) == pytest.approx(1e12)
    convert_to_fp8(model, FP8Config())
    passes = {row.name: row.passes for row in report(model).rows}
    head = 3 * flops.products["lm_head"]
    in_fp8 = flops.total - flops.attention - head
    assert flops.reachable(passes, RATES) == pytest.approx(
        flops.total / (in_fp8 / 2e12 + (head + flops.attention) / 1e12)
    )
    assert 1.3e12 < flops.reachable(passes, RATES) < 2e12
