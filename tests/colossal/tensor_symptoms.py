"""What goes wrong in shardformer without each mend of `compat/tensor_parallel.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.symptom import Symptom
from tests.colossal.tensor.models import shard, tiny_gpt2


def _run_gpt2() -> None:
    model = shard(tiny_gpt2())
    tokens = token_batch(0)
    assert model(input_ids=tokens, labels=tokens, attention_mask=torch.ones_like(tokens)).loss.isfinite()


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


def _look_ahead() -> None:
    """Logits of the first half of a sequence, while its second half changes."""
    model = shard(tiny_llama(), mode="split_gather").eval()
    tokens = token_batch(0)
    other = torch.cat((tokens[:, :16], tokens[:, 16:].flip(1)), 1)
    with torch.no_grad():
        logits = [model(input_ids=each).logits[:, :16] for each in (tokens, other)]
    difference = (logits[0] - logits[1]).abs().max()
    assert difference < 1e-4, "tokens attend to those that follow"


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

SYMPTOMS: dict[str, Any] = {
    "a_cpu_is_no_cuda_device_to_set": Symptom(_run_gpt2, "Expected a cuda device"),
    "ring_gathers_what_others_hold": Symptom(_gather_by_ring, "other ranks' parts are missing"),
    "llama_is_causal_along_a_sequence": Symptom(_look_ahead, "tokens attend to those that follow"),
    "attention_needs_no_mask": Symptom(_attend, "No usable kernel found"),
    "ring_attention_runs_on_pytorch": Symptom(_attend_in_a_ring, "Flash Attention is not installed"),
    "norms_are_fused_where_apex_is": Symptom(_fuse_norms, "NoneType"),
    "fused_weights_are_gathered_on_cpu": Symptom(_gather_fused_weight, _NO_CUDA),
}
