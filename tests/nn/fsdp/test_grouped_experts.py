"""Experts that are modules run as one under FSDP2, where the unit that gathers them is around all of them."""

from __future__ import annotations

from importlib.metadata import version
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_by_torch

from fp8booster import FP8Config, convert_to_fp8, fully_shard, fuse, report
from fp8booster.comm.encoding import DEFAULT, Encoding
from fp8booster.nn.experts.grouped import grouped_experts
from fp8booster.nn.weights.resharded import ReshardedWeight
from tests.distributed import ranks
from tests.nn.experts.families import batch_of, tiny_mixture

pytestmark = pytest.mark.skipif(not version("transformers").startswith("4."), reason="experts are no modules")

FAMILIES = ["Mixtral", "Qwen3-MoE", "DeepSeek V3"]
IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


def learned(model: nn.Module, steps: int = 3) -> list[float]:
    """Losses of a rank's own batch."""
    optimizer, tokens, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), batch_of(dist.get_rank()), []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def evaluated(model: nn.Module) -> float:
    tokens = batch_of(dist.get_rank())
    return model.eval()(input_ids=tokens, labels=tokens).loss.item()


def sharded_by_torch(family: str) -> nn.Module:
    model = tiny_mixture(family).float()
    for unit in (*model.model.layers, model):
        shard_by_torch(unit, mp_policy=IN_BF16)
    model.set_reduce_scatter_unused_params(True)
    return model


def in_fp8(family: str, *, messages: Encoding | None = DEFAULT, **options: object) -> nn.Module:
    return fully_shard(tiny_mixture(family).float(), FP8Config(always=True, messages=messages), **options)


def ways(model: nn.Module) -> set[str | None]:
    """Why experts ran one by one, in training and in evaluation."""
    told = report(model).grouped
    assert told
    return {row.why_one_by_one for row in told} | {row.why_one_by_one_in_evaluation for row in told}


@ranks(2)
@pytest.mark.parametrize("family", FAMILIES)
def test_they_learn_as_torch_s_do(family: str) -> None:
    model, exact = in_fp8(family), sharded_by_torch(family)
    assert learned(model) == pytest.approx(learned(exact), rel=1e-2)
    assert evaluated(model) == pytest.approx(evaluated(exact), rel=1e-2)
    assert ways(model) == {None}


@ranks(2)
@pytest.mark.parametrize("by_torch", [False, True])
def test_the_report_counts_them_whose_weights_fsdp2_has_read(by_torch: bool) -> None:
    if by_torch:
        model = convert_to_fp8(tiny_mixture("Qwen3-MoE").float(), FP8Config(always=True))
        fuse(model)
        for unit in (*model.model.layers, model):
            shard_by_torch(unit, mp_policy=IN_BF16)
    else:
        model = in_fp8("Qwen3-MoE")
    assert not any(block.has_run for block in grouped_experts(model))
    learned(model, 1)
    rows = [row for row in report(model).rows if ".experts." in row.name]
    assert rows
    assert {row.passes for row in rows} == {("FP8", "FP8", "FP8")}


@ranks(2)
def test_weights_that_are_gathered_in_16_bits_are_cast_again_in_backward() -> None:
    model, gathered_in_fp8 = in_fp8("Qwen3-MoE", messages=None), in_fp8("Qwen3-MoE")
    assert learned(model) == pytest.approx(learned(gathered_in_fp8), rel=1e-2)
    assert ways(model) == {None}
    assert not any(layer.fp8_weight.lacks_values for each in grouped_experts(model) for layer in each.products()[0])


@ranks(2)
@pytest.mark.parametrize("reshard_after_forward", [True, False])
def test_their_weights_have_no_values_in_16_bits(reshard_after_forward: bool) -> None:
    model = in_fp8("Qwen3-MoE", reshard_after_forward=reshard_after_forward)
    learned(model, 1)  # FSDP2 looks at each parameter when a model runs first
    with mock.patch.object(ReshardedWeight, "keep_values", side_effect=AssertionError("values are made")):
        losses = [*learned(model), evaluated(model)]
    assert losses == sorted(losses, reverse=True)
    assert ways(model) == {None}


@ranks(2)
def test_experts_that_are_units_of_their_own_run_one_by_one() -> None:
    """What runs them as one would find shards."""
    model = tiny_mixture("Qwen3-MoE").float()
    blocks = [each.mlp for each in model.model.layers if hasattr(each.mlp, "experts")]
    units = [*(expert for block in blocks for expert in block.experts), *model.model.layers]
    expected = learned(sharded_by_torch("Qwen3-MoE"))
    model = fully_shard(model, FP8Config(always=True), units=units)
    assert all(isinstance(expert, FSDPModule) for block in blocks for expert in block.experts)
    assert learned(model) == pytest.approx(expected, rel=1e-2)
    assert None not in {row.why_one_by_one for row in report(model).grouped}


@ranks(2)
def test_experts_of_two_units_run_one_by_one() -> None:
    model = tiny_mixture("Qwen3-MoE").float()
    block = next(each.mlp for each in model.model.layers if hasattr(each.mlp, "experts"))
    model = fully_shard(model, FP8Config(always=True), units=[block.experts[0].gate_proj, *model.model.layers])
    grouped = next(each for each in grouped_experts(model) if each.experts[0] is block.experts[0])
    assert not grouped.are_whole
    learned(model, 1)
    assert grouped.why_one_by_one is not None


@ranks(2)
@pytest.mark.parametrize("as_one", [False, True])
def test_without_a_way_to_reduce_what_one_rank_has_only_grouped_experts_are_taken(as_one: bool) -> None:
    """PyTorch before 2.13: grouped products give experts without tokens gradients of zeros."""
    former = FSDPModule.set_reduce_scatter_unused_params
    del FSDPModule.set_reduce_scatter_unused_params
    try:
        model, config = tiny_mixture("Qwen3-MoE").float(), FP8Config(always=True, fused=as_one)
        if not as_one:
            with pytest.raises(ValueError, match="and this PyTorch's FSDP2 cannot"):
                fully_shard(model, config)
            return
        losses = learned(fully_shard(model, config))
        assert losses[-1] < losses[0]
    finally:
        FSDPModule.set_reduce_scatter_unused_params = former
