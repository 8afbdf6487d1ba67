"""What a look at experts remembers: it is used again while all is as it was, and for nothing that has changed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import MixtralConfig

from fp8booster import FP8Config
from fp8booster.nn.experts import alike
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.resharded import ReshardedWeight
from tests.nn.experts.test_experts import COUNTS, WHY, assert_same, called, experts, results, tokens
from tests.nn.reference import count_calls

COUNT = COUNTS["ragged"]


def looked_at() -> tuple[nn.ModuleList, GroupedExperts]:
    """Experts that have run."""
    fp8 = experts()
    grouped = GroupedExperts(fp8)
    assert run(grouped) is not None
    return fp8, grouped


def run(grouped: GroupedExperts) -> torch.Tensor | None:
    return called(grouped, tokens(COUNT), COUNT)


def test_layers_are_looked_at_once_while_nothing_but_values_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = count_calls(monkeypatch, alike, "_why_not_alike")
    fp8, grouped = looked_at()
    optimizer = torch.optim.SGD(fp8.parameters(), lr=0.1)
    for _ in range(3):
        expected = results(fp8, COUNT, GroupedExperts(fp8))
        looks.clear()
        assert_same(results(fp8, COUNT, grouped), expected)
        optimizer.step()
        with torch.no_grad():
            fp8[1].w2.weight.add_(1)
        fp8[2].w1.weight.data = 2 * fp8[2].w1.weight.data
        fp8.eval().train()
        run(grouped)
        assert looks == []


@pytest.mark.parametrize("reason", WHY)
def test_a_reason_that_comes_later_is_seen(reason: str) -> None:
    fp8, grouped = looked_at()
    WHY[reason](fp8)
    assert run(grouped) is None
    assert reason in grouped.why_one_by_one


def _own_forward(module: nn.Module) -> None:
    module.forward = module.forward


def _other_hooks(module: nn.Module) -> None:
    module._forward_pre_hooks = OrderedDict({1: lambda *_: None})


def _equal_configurations_of_which_one_changes(fp8: nn.ModuleList, grouped: GroupedExperts) -> None:
    for expert in fp8:
        expert.config = MixtralConfig(pretraining_tp=1)
    assert run(grouped) is not None
    fp8[3].config = MixtralConfig(pretraining_tp=1)
    assert run(grouped) is not None
    fp8[3].config.pretraining_tp = 2


def _narrow(layer: nn.Module) -> None:
    layer.weight.data = layer.weight.data[:, :48].contiguous()


def _replace_hook(fp8: nn.ModuleList, grouped: GroupedExperts) -> None:
    hook = lambda *_: None  # noqa: E731
    hook.fp8_looks_at_nothing = True
    fp8[0].register_forward_hook(hook)
    handle = fp8[1].register_forward_hook(hook)
    assert run(grouped) is not None
    fp8[1]._forward_hooks[handle.id] = lambda *_: None


LATER: dict[str, Callable[[nn.ModuleList, GroupedExperts], None]] = {
    "a forward of a layer": lambda fp8, _: _own_forward(fp8[3].w1),
    "a forward of an activation": lambda fp8, _: _own_forward(fp8[3].act_fn),
    "a forward of an expert": lambda fp8, _: _own_forward(fp8[3]),
    "a hook past torch's registration": lambda fp8, _: fp8[2].w3._backward_hooks.update({5: lambda *_: None}),
    "other hooks": lambda fp8, _: _other_hooks(fp8[2].act_fn),
    "another hook in the place of one that may be left out": _replace_hook,
    "equal configurations of which one changes": _equal_configurations_of_which_one_changes,
    "memory of another shape": lambda fp8, _: _narrow(fp8[2].w1),
    "memory of another dtype": lambda fp8, _: setattr(fp8[2].w1.weight, "data", fp8[2].w1.weight.data.float()),
    "a weight of another shape": lambda fp8, _: setattr(
        fp8[2].w1, "weight", nn.Parameter(torch.ones(16, 16).bfloat16())
    ),
    "other casts": lambda fp8, _: setattr(
        fp8[2].w1, "fp8_casts", Casts.of_layer(FP8Config(emulate=True, scaling="amax"))
    ),
    "another configuration of the same casts": lambda fp8, _: fp8[2].w1.fp8_casts.under(FP8Config()),
    "a source that is whole in its layer alone": lambda fp8, _: setattr(fp8[2].w1, "fp8_weight", ReshardedWeight()),
    "a layer of another class": lambda fp8, _: setattr(fp8[2], "w1", nn.Linear(64, 96, bias=False).bfloat16()),
}


@pytest.mark.parametrize("change", LATER)
def test_whatever_keeps_experts_apart_is_seen_after_a_look(change: str) -> None:
    fp8, grouped = looked_at()
    LATER[change](fp8, grouped)
    assert run(grouped) is None
    fresh = GroupedExperts(fp8)
    assert run(fresh) is None
    assert grouped.why_one_by_one == fresh.why_one_by_one


def test_experts_without_a_child_that_they_might_have_had_run_as_one() -> None:
    fp8, grouped = looked_at()
    fp8[1].register_module("adapter", None)
    assert run(grouped) is not None
    fp8[1].adapter = nn.Identity()
    fp8[1].w1.register_forward_hook(lambda *_: None)
    assert run(grouped) is None


def test_what_kept_experts_apart_and_is_gone_is_seen() -> None:
    fp8, grouped = looked_at()
    whole = fp8[2].w1.weight.data
    _narrow(fp8[2].w1)
    assert run(grouped) is None
    fp8[2].w1.weight.data = whole
    assert run(grouped) is not None


def test_an_engine_that_begins_to_give_weights_is_seen() -> None:
    fp8, grouped = looked_at()
    layer = fp8[1].w2
    layer.fp8_weight = EngineWeight()
    assert run(grouped) is not None  # it has filled nothing
    layer.fp8_weight.fill([layer.weight], Casts(layer.fp8_config).quantize_weight(layer.weight, transposed=True))
    assert run(grouped) is None
    assert grouped.why_one_by_one == "an engine keeps the FP8 weights of some of the layers alone"


def test_weights_in_the_place_of_others_are_what_is_multiplied_by_and_what_gets_gradients() -> None:
    fp8, grouped = looked_at()
    old = fp8[2].w2.weight
    fp8[2].w2.weight = nn.Parameter(2 * old.detach())
    assert_same(results(fp8, COUNT, grouped), results(fp8, COUNT, GroupedExperts(fp8)))
    assert old.grad is None
