"""Blocks of transformers 4 with a list of experts, in grouped products, against their own loops."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.phimoe.modeling_phimoe import PhimoeConfig, PhimoeSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.nn.experts.mixture import Mixture
from tests.kernels.grouped_stand_in import stand_in

pytestmark = pytest.mark.skipif(int(transformers.__version__.split(".")[0]) > 4, reason="experts are one parameter")

EXPERTS = 8
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_experts_per_tok": 2}
SMALL = {"moe_intermediate_size": 32, "num_experts": EXPERTS, **SIZES}


def deepseek() -> nn.Module:
    groups = {"n_group": 2, "topk_group": 2, "n_shared_experts": 1}
    config = DeepseekV3Config(n_routed_experts=EXPERTS, moe_intermediate_size=32, **groups, **SIZES)
    block = DeepseekV3MoE(config)
    nn.init.normal_(block.gate.weight)
    return block


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "Mixtral": lambda: MixtralSparseMoeBlock(MixtralConfig(num_local_experts=EXPERTS, **SIZES)),
    "Qwen3": lambda: Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(norm_topk_prob=True, **SMALL)),
    "Qwen3, not normalized": lambda: Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(norm_topk_prob=False, **SMALL)),
    "Qwen2": lambda: Qwen2MoeSparseMoeBlock(Qwen2MoeConfig(shared_expert_intermediate_size=48, **SMALL)),
    "OLMoE": lambda: OlmoeSparseMoeBlock(OlmoeConfig(num_experts=EXPERTS, **SIZES)),
    "DeepSeek-V3": deepseek,
}


def block(name: str, config: FP8Config | None) -> nn.Module:
    torch.manual_seed(0)
    made = BLOCKS[name]().bfloat16()
    return made if config is None else convert_to_fp8(made, config)


def results(of: nn.Module) -> dict[str, torch.Tensor]:
    """The output, the router's logits if it gives them, and all gradients, in FP32."""
    dtype = next(of.parameters()).dtype
    x = torch.randn(2, 24, 64, generator=torch.Generator().manual_seed(1)).bfloat16().to(dtype).requires_grad_()
    made = of(x.clone())  # some blocks write to it
    y, *logits = made if isinstance(made, tuple) else (made,)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(dtype))
    found = {"y": y, "dx": x.grad, **dict(enumerate(logits))}
    found |= {name: parameter.grad for name, parameter in of.named_parameters()}
    of.zero_grad()
    return {name: value.detach().float() for name, value in found.items() if value is not None}


@pytest.mark.parametrize("name", BLOCKS)
@pytest.mark.parametrize("way", ["emulated", "group by group", "kernel", "one by one"])
def test_values_and_gradients_are_near_those_of_the_loop_in_fp32(name: str, way: str, monkeypatch) -> None:
    if way == "kernel":
        stand_in(monkeypatch)
    fp8 = block(name, FP8Config(always=True, emulate=way == "emulated"))
    assert isinstance(fp8, Mixture)
    if way == "one by one":
        monkeypatch.setattr(type(fp8.fp8_grouped_experts), "_why_never", lambda self, look: "a test")
    exact, found = results(block(name, None).float()), results(fp8)
    assert found.keys() == exact.keys()
    for each, value in found.items():
        assert (value - exact[each]).norm() <= 0.15 * exact[each].norm(), each
    (row,) = report(fp8).grouped
    assert (row.experts, row.why_one_by_one) == (EXPERTS, "a test" if way == "one by one" else None)


@pytest.mark.parametrize("name", BLOCKS)
def test_evaluation_gives_what_the_loop_does(name: str) -> None:
    x = torch.randn(1, 40, 64).bfloat16()
    blocks = [block(name, FP8Config(always=True, fused=fused)).eval() for fused in (True, False)]
    assert [isinstance(each, Mixture) for each in blocks] == [True, False]
    with torch.no_grad():
        found, expected = ([*made] if isinstance(made := each(x), tuple) else [made] for each in blocks)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= 0.1 * other.norm()  # experts share their scales
    assert report(blocks[0]).grouped[0].why_one_by_one_in_evaluation is None


def test_a_block_that_draws_noise_runs_its_own_loop() -> None:
    fp8 = block("Mixtral", FP8Config(always=True))
    expected = results(fp8)
    fp8.jitter_noise = 0.5
    assert not torch.equal(results(fp8)["y"], expected["y"])
    assert report(fp8).grouped[0].why_one_by_one == "the block draws noise"
    assert torch.equal(results(fp8.eval())["y"], results(block("Mixtral", FP8Config(always=True)).eval())["y"])


def test_a_block_that_computes_something_else_stays_as_it_is() -> None:
    config = PhimoeConfig(num_local_experts=EXPERTS, **SIZES)
    assert not isinstance(convert_to_fp8(PhimoeSparseMoeBlock(config).bfloat16()), Mixture)

    class Doubled(Qwen3MoeSparseMoeBlock):
        def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y, logits = super().forward(hidden_states)
            return 2 * y, logits

    assert not isinstance(convert_to_fp8(Doubled(Qwen3MoeConfig(**SMALL)).bfloat16()), Mixture)
    own = BLOCKS["Qwen3"]().bfloat16()
    own.forward = lambda hidden_states: (hidden_states, hidden_states)
    assert not isinstance(convert_to_fp8(own), Mixture)


class LimitedTokens(DeepseekV3MoE):
    def moe(self, hidden_states: torch.Tensor, topk_indices: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
        return super().moe(hidden_states, topk_indices, topk_weights).clamp(-100, 100)


class LimitedLogits(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, logits = super().forward(hidden_states)
        return y.clamp(-100, 100), logits


class LessInEvaluation(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, logits = super().forward(hidden_states)
        return (y if self.training else y / 2), logits


class OneIsNotDivided(Qwen3MoeSparseMoeBlock):
    def forward(self, hidden_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, logits = super().forward(hidden_states)
        return (y / 2 if self.top_k == 1 else y), logits


@pytest.mark.parametrize("cls", [LimitedTokens, LimitedLogits, LessInEvaluation, OneIsNotDivided])
def test_a_block_that_computes_something_else_of_some_numbers_stays_as_it_is(cls: type[nn.Module]) -> None:
    own = BLOCKS["DeepSeek-V3" if cls is LimitedTokens else "Qwen3"]().bfloat16()
    own.__class__ = cls
    assert type(convert_to_fp8(own)) is cls


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(expert(x + torch.randn_like(x)) for expert in self.experts)


class Demanding(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.dtype == torch.bfloat16
        return super().forward(x)


@pytest.mark.parametrize("cls", [Noisy, Demanding])
def test_trials_of_any_block_with_experts_leave_random_numbers_as_they_are(cls: type[nn.Module]) -> None:
    before = torch.get_rng_state()
    own = cls()
    torch.set_rng_state(before)
    assert type(convert_to_fp8(own)) is cls
    assert torch.equal(torch.get_rng_state(), before)


class Scaled(Qwen3MoeSparseMoeBlock):
    def forward(self, x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        y, logits = super().forward(x)
        return factor * y, logits


def test_further_arguments_are_those_of_the_block_itself() -> None:
    own = BLOCKS["Qwen3"]().bfloat16()
    own.__class__ = Scaled
    fp8, x = convert_to_fp8(own, FP8Config(always=True)), torch.randn(1, 40, 64).bfloat16()
    assert isinstance(fp8, Mixture)
    y, _ = fp8(x)
    for twice, _ in (fp8(x, 2.0), fp8(x=x, factor=2.0)):
        assert (twice - 2 * y).norm() <= 0.1 * (2 * y).norm()


def test_experts_that_are_replaced_compute() -> None:
    fp8 = block("Qwen3", FP8Config(always=True))
    results(fp8)
    fp8.experts[2] = copy.deepcopy(fp8.experts[3])
    nn.init.normal_(fp8.experts[2].down_proj.weight)
    exact, expected = results(fp8), results(copy.deepcopy(fp8))
    assert exact.keys() == expected.keys()
    assert all(torch.equal(value, expected[each]) for each, value in exact.items())


def test_casts_of_experts_that_are_replaced_are_still_observed() -> None:
    fp8, seen = block("Qwen3", FP8Config(always=True)), []
    for casts in fp8.fp8_grouped_experts.fp8_casts.values():
        casts.observers.append(lambda role, *_: seen.append(role))
    results(fp8)
    before = list(seen)
    fp8.experts[2] = copy.deepcopy(fp8.experts[3])
    results(fp8)
    assert before
    assert seen == before + before


@pytest.mark.parametrize("other", [{"fused": False}, {"layers": lambda name, _: "experts" not in name}])
def test_another_configuration_leaves_nothing_of_the_one_before(other: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Linear(64, 64).bfloat16(), block("Qwen3", FP8Config(always=True)))
    convert_to_fp8(model, FP8Config(always=True, **other))
    assert type(model[1]) is Qwen3MoeSparseMoeBlock
    assert not report(model).grouped
    convert_to_fp8(model, FP8Config(always=True))
    assert isinstance(model[1], Mixture)
    assert results(model[1])["y"].any()


@pytest.mark.parametrize(("name", "method"), [("Qwen3", "forward"), ("DeepSeek-V3", "moe")])
def test_a_forward_that_its_class_gets_later_runs(name: str, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = block(name, FP8Config(always=True))
    original, tried = type(fp8).tried

    def zeros(self: nn.Module, *args: Any) -> Any:
        made = tried(self, *args)
        return tuple(torch.zeros_like(each) for each in made) if isinstance(made, tuple) else torch.zeros_like(made)

    monkeypatch.setattr(original, method, zeros)
    x = torch.randn(1, 16, 64).bfloat16()
    made = fp8(x)
    y = made[0] if isinstance(made, tuple) else made - fp8.shared_experts(x)
    assert not y.any()


def test_hooks_on_router_and_experts_run() -> None:
    fp8, seen = block("Qwen3", FP8Config(always=True)), []
    fp8.gate.register_forward_hook(lambda *_: seen.append("router"))
    fp8.experts[3].register_forward_hook(lambda *_: seen.append("expert"))
    results(fp8)
    assert seen == ["router", "expert"]
    assert report(fp8).grouped[0].why_one_by_one == "an expert has hooks or a forward of its own, which must run"


def test_copies_and_pickles_have_their_own_experts() -> None:
    fp8 = block("Qwen3", FP8Config(always=True))
    expected = results(fp8)
    for other in (copy.deepcopy(fp8), pickle.loads(pickle.dumps(fp8))):
        assert other.fp8_grouped_experts.experts == tuple(other.experts)
        assert torch.equal(results(other)["y"], expected["y"])
        assert report(other).grouped[0].why_one_by_one is None


@pytest.mark.gpu
def test_the_host_waits_for_nothing() -> None:
    fp8 = block("Qwen3", FP8Config(always=True)).cuda()
    x = torch.randn(2, 24, 64, device="cuda").bfloat16().requires_grad_()
    for step in range(3):
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            fp8(x)[0].sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert report(fp8).grouped[0].why_one_by_one is None
