"""ZeRO adds up each gradient with the same one of other ranks, whatever batches make of the ways that layers run."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, report
from fp8booster.nn.experts import grouped
from fp8booster.nn.linear import speed_model
from tests.colossal.hybrid import runs as hybrid_runs
from tests.colossal.models import tiny_llama, token_batch
from tests.colossal.zero.runs import Layers, features, masters, step, wire
from tests.distributed import ranks
from tests.nn.experts.families import tiny_mixture
from tests.plugins.training import assert_equal, boost, ours

LEARNING_RATE = 16.0
"""So large that what rounding to BF16 makes of a weight of one is little beside its change."""

LENGTHS = (16, 64)
"""Tokens of each rank."""

CASES: dict[str, dict[str, Any]] = {
    "ZeRO 1": {"stage": 1},
    "ZeRO 2, in 16 bits": {"stage": 2, "fp8_communication": False},
    "ZeRO 2, in 16 bits, unfused": {"stage": 2, "fp8_communication": False, "fp8_config": FP8Config(fused=False)},
    "hybrid, ZeRO 1": {"zero_stage": 1},
    "hybrid, ZeRO 1 beside backward, in 16 bits": {
        "zero_stage": 1,
        "overlap_communication": True,
        "fp8_communication": False,
    },
}


WITH_EXPERTS = "experts on every rank"
"""A further case: experts that are spread run in grouped products on all ranks, whatever their rows."""


def plugin_of(case: str) -> Any:
    """Return the plugin of a case, with FP8."""
    from fp8booster.plugins import MoeHybridParallelPlugin

    if case == WITH_EXPERTS:
        return MoeHybridParallelPlugin(1, 1, 1, precision="bf16", zero_stage=1, use_fp8=True)
    arguments = {"use_fp8": True} | CASES[case]
    return hybrid_runs.ours("DP2", **arguments) if "hybrid" in case else ours(**arguments)


def changes_of_weights(case: str, fp8_from: int) -> dict[str, torch.Tensor]:
    """By one step of plain descent, where batches of `fp8_from` tokens and more are computed in FP8."""
    from colossalai.booster import Booster

    model = tiny_llama(attention_bias=True, mlp_bias=True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    booster = Booster(plugin=plugin_of(case))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    tokens = token_batch(seed=dist.get_rank(), batch=1, length=LENGTHS[dist.get_rank()])
    with patch.object(speed_model, "fp8_pays", lambda rows, *_: rows >= fp8_from):
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
    if hasattr(optimizer, "gather_working_weights"):
        optimizer.gather_working_weights()
    return {name: value.detach().float() - before[name] for name, value in model.unwrap().named_parameters()}


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_ranks_whose_batches_run_in_different_ways_add_up_the_same_gradients(case: str) -> None:
    expected = changes_of_weights(case, fp8_from=max(LENGTHS) + 1)
    found = changes_of_weights(case, fp8_from=max(LENGTHS))  # on one rank of two
    for name, change in expected.items():
        assert (found[name] - change).norm() <= 0.25 * change.norm(), name


def changes_of_experts(case: str, one_by_one_from: float, grouped_on: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """By one step of a mixture whose experts are modules: on some ranks in grouped products, else one by one."""
    from colossalai.booster import Booster

    model = tiny_mixture("Qwen3-MoE", vocab_size=128)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    booster = Booster(plugin=plugin_of(case))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    tokens = token_batch(seed=dist.get_rank(), batch=1, length=LENGTHS[dist.get_rank()])
    with patch.object(grouped, "ONE_BY_ONE_FROM", one_by_one_from):
        loss = model.train()(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
    assert {row.why_one_by_one is None for row in report(model).grouped} == {dist.get_rank() in grouped_on}
    if hasattr(optimizer, "gather_working_weights"):
        optimizer.gather_working_weights()
    return {name: value.detach().float() - before[name] for name, value in model.unwrap().named_parameters()}


@ranks(2)
@pytest.mark.skipif(not version("transformers").startswith("4."), reason="experts are no modules")
@pytest.mark.parametrize("case", [case for case in (*CASES, WITH_EXPERTS) if "unfused" not in case])
def test_ranks_that_run_experts_in_different_ways_add_up_the_same_gradients(case: str) -> None:
    expected = changes_of_experts(case, grouped.ONE_BY_ONE_FROM, grouped_on=(0, 1))
    found = changes_of_experts(case, 4e4, grouped_on=(0,))  # the other has more tokens
    for name, change in expected.items():
        # a norm's weights are near one, where BF16 rounds changes; another expert's gradient differs by more than this
        assert (found[name] - change).norm() <= 0.75 * change.norm(), name


class Branches(nn.Module):
    """Two layers of one input, of which backward runs the one first that forward ran last."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(64, 64), nn.Linear(64, 64)
        self.swapped = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = (self.other, self.one) if self.swapped else (self.one, self.other)
        outputs = {layer: layer(x) for layer in layers}
        return (outputs[self.one].sin() * 3 + outputs[self.other]).float().square().mean()


def weights_of_branches(swapped: bool) -> list[torch.Tensor]:
    """After a step in which neither layer's bias got a gradient."""
    from colossalai.booster import Booster

    booster = Booster(plugin=ours(stage=2, use_fp8=True, fp8_communication=False))
    torch.manual_seed(0)
    model = Branches()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=LEARNING_RATE))
    branches = model.unwrap()
    branches.swapped = swapped
    for layer in (branches.one, branches.other):
        layer.bias.requires_grad_(False)  # as where a batch does not reach it
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(dist.get_rank())).bfloat16()
    booster.backward(model(x), optimizer)
    optimizer.step()
    return [layer.weight.detach().clone() for layer in (branches.one, branches.other)]


@ranks(2)
def test_sets_that_stay_incomplete_enter_in_one_order_whatever_came_first() -> None:
    expected = weights_of_branches(swapped=False)
    found = weights_of_branches(swapped=dist.get_rank() == 1)
    assert not torch.equal(*expected)
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one, other)


@ranks(2)
def test_a_frozen_mate_holds_nothing_back_in_a_pipeline() -> None:
    """q, k and v enter the buckets together; a pipeline's gradients go there by `sync_dp_grads`."""
    model = tiny_llama(**hybrid_runs.sizes(attention_bias=True))
    run = hybrid_runs.start(hybrid_runs.fp8("PP2 1f1b ZeRO 1"), model)
    masters = run.optimizer.get_working_to_master_map()
    trained = {}
    for name, parameter in run.model.unwrap().named_parameters():
        if name.endswith("q_proj.bias"):
            parameter.requires_grad_(False)
        elif id(parameter) in masters:
            trained[name] = masters[id(parameter)], masters[id(parameter)].detach().clone()
    assert any("k_proj" in name for name in trained)
    run.step(token_batch(seed=dist.get_rank(), batch=4, length=hybrid_runs.LENGTH) % 256)
    for name, (master, before) in trained.items():
        assert not torch.equal(master, before), name


@ranks(2)
@pytest.mark.parametrize("broken", ["weight", "bias"])
def test_a_backward_that_broke_off_leaves_nothing_behind(broken: str) -> None:
    run, fresh = (boost(wire(), Layers(64, 64, 64)) for _ in range(2))

    def break_off(gradient: torch.Tensor) -> None:
        raise InterruptedError

    handle = getattr(run.model.unwrap().layers[0], broken).register_hook(break_off)
    with pytest.raises(InterruptedError):
        run.booster.backward(run.model(features(rows=16)), run.optimizer)
    handle.remove()
    run.optimizer.zero_grad()
    losses = []
    for each in (run, fresh):
        each.model.unwrap().dropped = {0}  # the layer whose gradients were on their way
        losses.append([step(each, features())])
        each.model.unwrap().dropped = set()
        losses[-1] += [step(each, features()) for _ in range(2)]
    assert losses[0] == losses[1]
    assert_equal(*map(masters, (run, fresh)))
