"""Symptoms of shardformer without the patches of its layers, and of attention."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.monitor.traffic import count_traffic
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.symptom import Symptom
from tests.colossal.tensor.models import AXIS, mesh, shard, sharding, tiny_command, tiny_gpt2


def _run_gpt2() -> None:
    model = shard(tiny_gpt2())
    tokens = token_batch(0)
    assert model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss.isfinite()


def _reduce_behind_a_conv1d() -> None:
    tokens = token_batch(0)
    model = shard(tiny_gpt2(), fp8_communication=True)
    model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss.backward()
    assert model.transformer.h[0].attn.c_attn.weight.grad.isfinite().all()


def _gather_by_ring() -> None:
    from colossalai.shardformer.layer import _operation

    rank = dist.get_rank()
    part, weight = torch.full((1, 2, 4), rank + 1.0), torch.eye(4)
    output, gathered = _operation._ring_as_gather(
        nn.functional.linear, {"input": part}, {"weight": weight}, dist.group.WORLD
    )
    expected = torch.tensor([1.0, 1.0, 2.0, 2.0]).view(1, 4, 1).expand(1, 4, 4)
    assert torch.equal(output, expected)
    assert torch.equal(gathered["input"], expected), "other ranks' parts are missing"


def _assert_causal(run: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What is computed of the first half of a sequence stays while its second half changes."""
    tokens = token_batch(0)
    other = torch.cat((tokens[:, :16], tokens[:, 16:].flip(1)), 1)
    with torch.no_grad():
        difference = (run(tokens)[:, :16] - run(other)[:, :16]).abs().max()
    assert difference < 1e-4, "tokens attend to those that follow"


def _look_ahead() -> None:
    model = shard(tiny_llama(), mode="split_gather").eval()
    _assert_causal(lambda tokens: model(input_ids=tokens).logits)


def _look_ahead_in_gpt2() -> None:
    model = shard(tiny_gpt2()).eval()
    _assert_causal(lambda tokens: model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).logits)


def _look_ahead_in_a_pipeline() -> None:
    from colossalai.shardformer import ShardFormer
    from colossalai.shardformer.modeling.qwen2 import Qwen2PipelineForwards
    from transformers import Qwen2Config, Qwen2Model

    config = sharding("split_gather")
    stage = SimpleNamespace(is_first_stage=lambda: True, is_last_stage=lambda: True)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = ShardFormer(config).optimize(Qwen2Model(Qwen2Config(vocab_size=128, **sizes, **heads)))[0].eval()

    def run(tokens: torch.Tensor) -> torch.Tensor:
        return Qwen2PipelineForwards.qwen2_model_forward(
            model, tokens, stage_manager=stage, stage_index=[0, 2], shard_config=config
        ).last_hidden_state

    _assert_causal(run)


def _attend() -> None:
    from colossalai.shardformer.layer import ColoAttention

    q, k, v = torch.randn(3, 2, 4, 32, 16).unbind()
    arguments = ColoAttention.prepare_attn_kwargs((2, 1, 32, 32), q.dtype, q.device, is_causal=True)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(ColoAttention.attention(q, k, v, **arguments), expected)
    assert arguments["attention_mask"].numel() == 0


def _attend_in_a_ring() -> None:
    model = shard(tiny_llama(), mode="ring_attn")
    tokens = token_batch(0)
    loss = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss
    loss.backward()
    assert loss.isfinite()
    _send_fp8_in_a_ring()


def _send_fp8_in_a_ring() -> None:
    from colossalai.shardformer.layer.attn import AttnMaskType, RingAttention

    heads = (torch.randn(1, 2, 16, 32).bfloat16() for _ in range(3))
    arguments = {"sp_axis": AXIS, "attention_mask_type": AttnMaskType.CAUSAL, "pg_mesh": mesh(compressed=True)}
    with torch.no_grad(), count_traffic() as traffic:
        RingAttention.attention(*heads, **arguments)
    assert {dtype for _, dtype in traffic.counts} == {torch.uint8}, "16 bits are sent"


def _pad_a_ring() -> None:
    from colossalai.shardformer.layer import RingAttention

    mask, group, rank = torch.ones(2, 16), dist.group.WORLD, dist.get_rank()
    mask[1, 8:] = 0
    positions = torch.arange(16).unsqueeze(0)
    _, _, found = RingAttention.prepare_varlen_batch(mask, group, torch.randn(2, 16, 4), positions)
    labels, *_ = RingAttention.prepare_varlen_batch(mask, group, positions.repeat(2, 1), is_label=True)
    for row, length in enumerate((16, 8)):
        chunks = torch.arange(length).chunk(4)
        expected = torch.cat((chunks[rank], chunks[3 - rank]))
        assert torch.equal(found[min(row, len(found) - 1), : length // 2], expected), "wrong positions"
        shifted = torch.where(expected == length - 1, -100, expected + 1)
        assert torch.equal(labels[row, : length // 2], shifted)
        assert (labels[row, length // 2 :] == -100).all(), "padding has labels"


def _leave_out_the_mask(make: Callable[[], nn.Module], *modes: str | None) -> None:
    tokens = token_batch(0)
    for mode in modes:
        model = shard(make(), mode)
        with torch.no_grad():
            found = model(input_ids=tokens, labels=tokens)
            expected = model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens))
        assert torch.equal(found.logits, expected.logits)
        assert torch.equal(found.loss, expected.loss)


def _leave_out_the_labels(make: Callable[[], nn.Module], *modes: str | None) -> None:
    tokens = token_batch(0)
    padded = torch.ones_like(tokens)
    padded[1, 24:] = 0
    for mode in modes:
        model = shard(make(), mode)
        for mask in (torch.ones_like(tokens), padded):
            with torch.no_grad():
                found = model(input_ids=tokens, attention_mask=mask)
                expected = model(input_ids=tokens, labels=tokens, attention_mask=mask)
            assert torch.equal(found.logits, expected.logits)
            assert found.loss is None
            assert expected.loss.isfinite()


def _pipe_a_ring() -> None:
    from colossalai.shardformer.modeling.llama import LlamaPipelineForwards

    model, config = shard(tiny_llama(), mode="ring_attn"), sharding("ring_attn")
    tokens = token_batch(0)
    padded = torch.ones_like(tokens)
    padded[1, 24:] = 0

    def run(first: bool, **inputs: Any) -> Any:
        stage = SimpleNamespace(is_first_stage=lambda: first, is_last_stage=lambda: not first)
        return LlamaPipelineForwards.llama_for_causal_lm_forward(
            model,
            input_ids=tokens,
            labels=tokens,
            stage_manager=stage,
            stage_index=[0, 1] if first else [1, 2],
            shard_config=config,
            **inputs,
        )

    every_second = torch.arange(0, 2 * tokens.shape[1], 2).unsqueeze(0)
    for inputs in ({}, {"attention_mask": padded}, {"position_ids": every_second}):
        with torch.no_grad():
            expected = model(input_ids=tokens, labels=tokens, **inputs).loss
            middle = run(True, **inputs)["hidden_states"]
            found = run(False, hidden_states=middle, **inputs).loss
        assert torch.equal(found, expected), "wrong positions"


SIZES = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def _pipe_embeddings() -> None:
    from colossalai.shardformer.modeling.mistral import MistralForwards
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    model, config = shard(MistralForCausalLM(MistralConfig(**SIZES, **HEADS))), sharding()
    tokens = token_batch(0)
    stage = SimpleNamespace(is_first_stage=lambda: True, is_last_stage=lambda: False)
    given = {"input_ids": tokens}, {"inputs_embeds": model.model.embed_tokens(tokens)}
    found = [
        MistralForwards.mistral_for_causal_lm_forward(
            model, **inputs, stage_manager=stage, stage_index=[0, 1], shard_config=config
        )["hidden_states"]
        for inputs in given
    ]
    assert torch.equal(*found)


def _pipe_without_a_window() -> None:
    from colossalai.shardformer.modeling.qwen2 import Qwen2PipelineForwards
    from transformers import Qwen2Config, Qwen2Model

    config = sharding()
    stage = SimpleNamespace(is_first_stage=lambda: True, is_last_stage=lambda: True)
    torch.manual_seed(0)
    whole = Qwen2Config(**SIZES, **HEADS, use_sliding_window=False, sliding_window=8)
    model, tokens = shard(Qwen2Model(whole)).eval(), token_batch(0)
    with torch.no_grad():
        found = Qwen2PipelineForwards.qwen2_model_forward(
            model, tokens, torch.ones_like(tokens), stage_manager=stage, stage_index=[0, 2], shard_config=config
        ).last_hidden_state
        expected = model(tokens).last_hidden_state
    assert torch.allclose(found, expected, atol=1e-5), "tokens attend in a window"


def _shard_qwen3() -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    whole = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS, head_dim=16))
    tokens = token_batch(0)
    expected = whole(input_ids=tokens, labels=tokens).loss
    torch.testing.assert_close(shard(whole)(input_ids=tokens, labels=tokens).loss, expected)


def _refuse_gpt2() -> None:
    refusal = ""
    try:
        shard(tiny_gpt2())
    except ImportError as error:
        refusal = str(error)
    assert _IS_4 or "of which LLaMA" in refusal, "it is not refused"


def _mark(cls: str, conv: bool) -> None:
    from colossalai.shardformer import layer
    from colossalai.shardformer.layer.utils import SeqParallelUtils
    from transformers.pytorch_utils import Conv1D

    whole = Conv1D(16, 32) if conv else nn.Linear(32, 16)
    split = {"split_sizes": [16, 16]} if "Fused" in cls and not conv else {}
    row = getattr(layer, cls).from_native_module(
        whole, process_group=dist.group.WORLD, seq_parallel_mode="split_gather", **split
    )
    assert SeqParallelUtils.is_sp_partial_derived_param(row.bias), "gradients are not added up"


def _mark_bias() -> None:
    _mark("Linear1D_Row", conv=False)


def _mark_fused_biases() -> None:
    _mark("FusedLinear1D_Row", conv=False)
    _mark("GPT2FusedLinearConv1D_Row", conv=True)


def _refuse_a_ring() -> None:
    from transformers import Qwen2Config, Qwen2Model

    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1}
    refusal = ""
    try:
        shard(Qwen2Model(Qwen2Config(num_attention_heads=4, **sizes)), mode="ring_attn")
    except ValueError as error:
        refusal = str(error)
    assert "use sequence_parallelism_mode='split_gather' or 'all_to_all'" in refusal, "it is not refused"


def _mark_norms_of_command() -> None:
    from colossalai.shardformer.layer.utils import SeqParallelUtils

    model = shard(tiny_command(), mode="split_gather").model
    for norm in (model.norm, model.layers[0].input_layernorm):
        assert SeqParallelUtils.is_sp_partial_derived_param(norm.weight), "gradients are not added up"


def _shard_opt() -> None:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 128}
    config = OPTConfig(**sizes, num_hidden_layers=1, num_attention_heads=4, dropout=0.0, attn_implementation="sdpa")
    whole = OPTForCausalLM(config)
    tokens = token_batch(0)
    batch = {"input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}
    expected = whole(**batch).loss
    torch.testing.assert_close(shard(whole)(**batch).loss, expected)


def _fuse_norms() -> None:
    from colossalai.shardformer.layer import FusedLayerNorm, FusedRMSNorm
    from colossalai.shardformer.layer.utils import SeqParallelUtils
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for kind, norm in (
        (FusedRMSNorm, LlamaRMSNorm(64)),
        (FusedLayerNorm, nn.LayerNorm(64)),
        (FusedLayerNorm, nn.LayerNorm(1024)),
    ):
        fused = kind.from_native_module(norm, sp_partial_derived=True)
        assert SeqParallelUtils.is_sp_partial_derived_param(fused.weight), "gradients are not added up"


def _gather_fused_weight() -> None:
    from colossalai.shardformer.layer import qkv_fused_linear

    group = dist.group.WORLD
    whole = torch.arange(12.0).view(1, 12)
    part = qkv_fused_linear.split_fused_qkv_in_gpt2_style(whole, [4, 4, 4], group, True)
    found = qkv_fused_linear.gather_fused_qkv_in_gpt2_style(part, [4, 4, 4], group, True)
    assert torch.equal(found, whole)


_NO_CUDA = "NVIDIA driver" if torch.backends.cuda.is_built() else "not compiled with CUDA"

_IS_4 = version("transformers").startswith("4.")

SYMPTOMS: dict[str, Any] = {
    "a_cpu_is_no_cuda_device_to_set": Symptom(_run_gpt2, "Expected a cuda device"),
    "conv1d_names_the_group": Symptom(_reduce_behind_a_conv1d, "group"),
    "ring_gathers_what_others_hold": Symptom(_gather_by_ring, "other ranks' parts are missing"),
    "llama_is_causal_along_a_sequence": Symptom(_look_ahead, "tokens attend to those that follow"),
    "qwen2_is_causal_along_a_sequence": Symptom(_look_ahead_in_a_pipeline, "tokens attend to those that follow"),
    "gpt2_is_causal": Symptom(_look_ahead_in_gpt2, "tokens attend to those that follow"),
    "attention_needs_no_mask": Symptom(_attend, "No usable kernel found"),
    "rings_run_on_pytorch": Symptom(_attend_in_a_ring, "Flash Attention is not installed"),
    "ring_attention_knows_padding": Symptom(_pad_a_ring, "wrong positions"),
    "llama_rings_need_no_mask": Symptom(
        lambda: _leave_out_the_mask(tiny_llama, "ring_attn"), "has no attribute 'bool'"
    ),
    "gpt2_needs_no_mask": Symptom(
        lambda: _leave_out_the_mask(tiny_gpt2, None, "split_gather", "ring_attn"), "has no attribute 'size'"
    ),
    "rings_need_no_labels": Symptom(
        lambda: _leave_out_the_labels(tiny_llama, "ring_attn"), "'NoneType' object is not iterable"
    ),
    "gpt2_needs_no_labels": Symptom(
        lambda: _leave_out_the_labels(tiny_gpt2, None, "split_gather", "ring_attn"), "UnboundLocalError"
    ),
    "llama_has_one_body": Symptom(_pipe_a_ring, "wrong positions" if _IS_4 else "Error"),
    "mistral_has_one_body": Symptom(_pipe_embeddings, "TypeError" if _IS_4 else "Error"),
    "qwen2_has_one_body": Symptom(_pipe_without_a_window, "tokens attend in a window" if _IS_4 else "Error"),
    "qwen3_has_a_policy": Symptom(_shard_qwen3, "is not implemented"),
    "models_that_are_not_sharded_are_refused": Symptom(_refuse_gpt2, "it is not refused"),
    "biases_along_a_sequence_are_added_up": Symptom(_mark_bias, "gradients are not added up"),
    "biases_of_fused_layers_are_added_up": Symptom(_mark_fused_biases, "gradients are not added up"),
    "ring_attention_is_refused_where_there_is_none": Symptom(_refuse_a_ring, "it is not refused"),
    "norms_of_command_are_added_up": Symptom(_mark_norms_of_command, "gradients are not added up"),
    "opt_is_sharded_with_any_attention": Symptom(_shard_opt, "KeyError('sdpa')"),
    "norms_are_fused_where_apex_is": Symptom(_fuse_norms, "NoneType"),
    "fused_weights_are_gathered_on_cpu": Symptom(_gather_fused_weight, _NO_CUDA),
}
