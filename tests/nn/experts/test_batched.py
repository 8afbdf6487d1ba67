"""LLaMA 4's mixture in FP8, whose tokens go to their own experts alone, against transformers' in FP32."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from transformers import Llama4TextConfig
from transformers.models.llama4.modeling_llama4 import Llama4TextExperts, Llama4TextMoe

from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.nn.experts.batched import BatchedExperts, ScaledMixture
from fp8booster.nn.experts.fp8_experts import FP8Experts
from tests.kernels.grouped_stand_in import stand_in

HIDDEN, EXPERTS = 64, 8


def block(config: FP8Config | None, top_k: int = 2) -> Llama4TextMoe:
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 96, "intermediate_size_mlp": 96}
    made = Llama4TextMoe(Llama4TextConfig(num_local_experts=EXPERTS, num_experts_per_tok=top_k, **sizes))
    for parameter in made.parameters():  # transformers leaves some empty
        nn.init.normal_(parameter, std=parameter.shape[-2] ** -0.5)
    made = made.bfloat16()
    return made if config is None else convert_to_fp8(made, config)


def results(of: nn.Module, length: int = 24) -> dict[str, torch.Tensor]:
    """The outputs and all gradients, in FP32."""
    dtype = next(of.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, length, HIDDEN, generator=generator).bfloat16().to(dtype).requires_grad_()
    y, told = of(x)
    y.backward(torch.randn(y.shape, generator=generator).to(dtype))
    found = {"y": y, "told": told, "dx": x.grad} | {name: each.grad for name, each in of.named_parameters()}
    of.zero_grad()
    return {name: value.detach().float() for name, value in found.items()}


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("way", ["emulated", "group by group", "kernel"])
def test_values_and_gradients_are_near_those_in_fp32(way: str, top_k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if way == "kernel":
        stand_in(monkeypatch)
    fp8 = block(FP8Config(always=True, emulate=way == "emulated"), top_k)
    assert isinstance(fp8, ScaledMixture)
    exact, found = results(block(None, top_k).float()), results(fp8)
    for name, value in found.items():
        assert value.shape == exact[name].shape, name
        assert (value - exact[name]).norm() <= 0.15 * exact[name].norm(), name
    assert {row.precision for row in report(fp8).outside} == {"FP8"}


def test_a_token_goes_to_its_own_experts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8, rows = block(FP8Config(always=True, emulate=True)), []
    run = FP8Experts.on_rows

    def seen(self: FP8Experts, given: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        rows.append(len(given))
        return run(self, given, *others)

    monkeypatch.setattr(FP8Experts, "on_rows", seen)
    results(fp8)
    unfused = block(FP8Config(always=True, emulate=True, fused=False))
    assert not isinstance(unfused, ScaledMixture)
    assert isinstance(unfused.experts, BatchedExperts)
    results(unfused)
    assert rows == [48 * 2, 48 * EXPERTS]


def test_a_subclass_that_computes_something_else_stays_as_it_is() -> None:
    class Twice(Llama4TextExperts):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(hidden_states)

    made = block(None)
    vars(made)["_modules"]["experts"].__class__ = Twice
    convert_to_fp8(made)
    assert type(made.experts) is Twice
    assert not isinstance(made, ScaledMixture)


def test_a_forward_that_the_class_of_experts_gets_later_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = block(FP8Config(always=True, layers=lambda name, _: name == "experts"))
    results(fp8)
    assert {row.precision for row in report(fp8).outside if row.name.startswith("experts")} == {"FP8"}
    monkeypatch.setattr(Llama4TextExperts, "forward", lambda self, hidden_states: 2 * hidden_states)
    x = torch.randn(1, 16, HIDDEN).bfloat16()
    assert torch.equal(fp8(x)[0], block(None)(x)[0])
    assert all("which must run" in row.notes for row in report(fp8).outside if row.name.startswith("experts"))


def test_hooks_on_experts_run_and_another_configuration_turns_the_block_back() -> None:
    fp8, seen = block(FP8Config(always=True)), []
    handle = fp8.experts.register_forward_hook(lambda module, args, output: seen.append(len(args[0])))
    expected = results(fp8)["y"]
    handle.remove()
    found = results(fp8)["y"]
    assert seen == [48 * EXPERTS]
    assert (found - expected).norm() <= 0.1 * expected.norm()
    x = torch.randn(1, 16, HIDDEN).bfloat16()
    assert torch.equal(fp8(hidden_states=x)[0], fp8(x)[0])
    convert_to_fp8(fp8, FP8Config(always=True, fused=False))
    assert type(fp8) is Llama4TextMoe
    convert_to_fp8(fp8, FP8Config(always=True))
    assert torch.equal(results(fp8)["y"], found)


def test_experts_that_turn_back_run_as_transformers_has_them() -> None:
    fp8 = block(FP8Config(always=True))
    fp8.experts.revert()
    assert type(fp8.experts) is Llama4TextExperts
    exact, found = results(block(None)), results(fp8)
    assert (found["y"] - exact["y"]).norm() <= 0.1 * exact["y"].norm()


def test_copies_pickles_and_evaluation_give_the_same() -> None:
    fp8 = block(FP8Config(always=True))
    expected = results(fp8)
    for other in (copy.deepcopy(fp8), pickle.loads(pickle.dumps(fp8))):
        assert torch.equal(results(other)["y"], expected["y"])
    assert torch.equal(results(fp8.eval())["y"], expected["y"])
