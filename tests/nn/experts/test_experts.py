"""Experts by grouped products, against the same experts one by one and in FP32."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import DeepseekV3Config, MixtralConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MLP
from transformers.models.mixtral.modeling_mixtral import MixtralBlockSparseTop2MLP

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, report
from fp8booster.config import Activations, Formats, WeightCopies
from fp8booster.formats import E5M2
from fp8booster.nn.experts import grouped as module
from fp8booster.nn.experts import stack
from fp8booster.nn.experts.grouped import Grouped, GroupedExperts
from fp8booster.nn.experts.one_by_one import run_experts
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.fused.decoder import mix
from fp8booster.nn.fused.part import FusedGatedMLP
from fp8booster.nn.linear import speed_model
from fp8booster.nn.weights import freshness
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.engine import EngineWeight
from fp8booster.nn.weights.resharded import ReshardedWeight
from fp8booster.tensor import QuantizedMatrix
from tests.kernels.grouped_stand_in import stand_in
from tests.nn.reference import count_calls

HIDDEN, FEATURES, EXPERTS = 64, 96, 4
QUICK = FP8Config(emulate=True)
COUNTS = {"ragged": [[3, 0, 20, 1], [14, 0, 1, 40]], "even": [[16, 16, 16, 16]], "one expert has all": [[0, 0, 0, 33]]}


def mixtral() -> nn.ModuleList:
    sizes = MixtralConfig(hidden_size=HIDDEN, intermediate_size=FEATURES)
    return nn.ModuleList(MixtralBlockSparseTop2MLP(sizes) for _ in range(EXPERTS))


def deepseek() -> nn.ModuleList:
    sizes = DeepseekV3Config(hidden_size=HIDDEN, moe_intermediate_size=FEATURES)
    return nn.ModuleList(DeepseekV3MLP(sizes, intermediate_size=FEATURES) for _ in range(EXPERTS))


def experts(config: FP8Config = QUICK, make: Callable[[], nn.ModuleList] = mixtral) -> nn.ModuleList:
    """The same at every call."""
    torch.manual_seed(0)
    return convert_to_fp8(make().bfloat16(), config)


def in_fp32(fp8: nn.ModuleList, make: Callable[[], nn.ModuleList] = mixtral) -> nn.ModuleList:
    """Experts of the same weights without FP8."""
    exact = make()
    exact.load_state_dict(fp8.state_dict())
    return exact


def tokens(counts: list[list[int]]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(sum(map(sum, counts)), HIDDEN, generator=generator).bfloat16()


def routed(x: torch.Tensor, counts: list[list[int]]) -> Routed:
    """Tokens with one expert each, those of each sender sorted by expert."""
    chosen = [expert for sender in counts for expert, count in enumerate(sender) for _ in range(count)]
    owners = torch.tensor(chosen, dtype=torch.int64, device=x.device).unsqueeze(1)
    return Routed(x, owners, x.new_ones(owners.shape))


def called(grouped: GroupedExperts, x: torch.Tensor, counts: list[list[int]]) -> torch.Tensor | None:
    return grouped.prepared(x, len(x))(routed(x, counts), 1.0)


def run(
    x: torch.Tensor, counts: list[list[int]], of: nn.Module, grouped: GroupedExperts | None, factor: float = 1.0
) -> torch.Tensor:
    given = routed(x, counts)
    made = None if grouped is None else grouped.prepared(x, len(x))(given, factor)
    return run_experts(given, of, factor) if made is None else made


def results(
    of: nn.Module, counts: list[list[int]], grouped: GroupedExperts | None, factor: float = 1.0
) -> list[torch.Tensor]:
    """Output, gradient of the tokens, gradients of the weights, in FP32."""
    dtype = next(of.parameters()).dtype
    x = tokens(counts).to(dtype).requires_grad_()
    of.zero_grad()
    y = run(x, counts, of, grouped, factor)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    y.backward(dy)
    return [value.detach().float() for value in (y, x.grad, *(each.grad for each in of.parameters()))]


def assert_near(found: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() <= tolerance * other.norm()


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("make", [mixtral, deepseek])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("way", ["emulated", "group by group", "kernel"])
def test_grouped_experts_compute_what_they_compute_one_by_one(counts, way, make, monkeypatch) -> None:
    if way == "kernel":
        stand_in(monkeypatch)
    fp8 = experts(FP8Config(emulate=way == "emulated"), make)
    grouped = GroupedExperts(fp8)
    exact = results(in_fp32(fp8, make), COUNTS[counts], None, 3.0)
    one_by_one = results(fp8, COUNTS[counts], None, 3.0)
    found = results(fp8, COUNTS[counts], grouped, 3.0)
    assert grouped.why_one_by_one is None
    assert_near(found, exact, 0.08)
    assert_near(one_by_one, exact, 0.11)
    assert any(not torch.equal(one, other) for one, other in zip(found, one_by_one, strict=True))
    for gradient, other in zip(found[2:], one_by_one[2:], strict=True):
        assert gradient.any() == other.any()


def test_gradients_of_a_stack_are_views_of_one_product() -> None:
    fp8 = experts()
    results(fp8, COUNTS["ragged"], GroupedExperts(fp8))
    for of_expert in (("w1", "w3"), ("w2",)):
        gradients = [getattr(expert, name).weight.grad for expert in fp8 for name in of_expert]
        places = [gradient.data_ptr() for gradient in gradients]
        assert [place - places[0] for place in places] == [
            number * gradients[0].nbytes for number in range(len(places))
        ]
        assert len({gradient.untyped_storage().data_ptr() for gradient in gradients}) == 1


def test_one_frozen_expert_gets_no_gradient_and_changes_no_other() -> None:
    fp8 = experts()
    expected = results(fp8, COUNTS["ragged"], GroupedExperts(fp8))
    fp8.zero_grad()
    frozen = list(fp8[1].parameters())
    for parameter in frozen:
        parameter.requires_grad_(False)
    x = tokens(COUNTS["ragged"]).requires_grad_()
    grouped = GroupedExperts(fp8)
    y = run(x, COUNTS["ragged"], fp8, grouped)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype))
    assert grouped.why_one_by_one is None
    assert all(parameter.grad is None for parameter in frozen)
    found = [None if each.grad is None else each.grad.float() for each in fp8.parameters()]
    for gradient, other in zip(found, expected[2:], strict=True):
        assert gradient is None or torch.equal(gradient, other)


def test_without_any_token_every_gradient_is_zero() -> None:
    fp8 = experts()
    grouped = GroupedExperts(fp8)
    y, dx, *gradients = results(fp8, [[0] * EXPERTS] * 2, grouped)
    assert y.shape == dx.shape == (0, HIDDEN)
    assert len(gradients) == 3 * EXPERTS
    assert all(not gradient.any() for gradient in gradients)
    assert grouped.why_one_by_one is None


def test_transposes_made_in_backward_give_the_same_bits() -> None:
    found, expected = (
        results(fp8, COUNTS["ragged"], GroupedExperts(fp8))
        for fp8 in (
            experts(FP8Config(emulate=True, weight_copies=WeightCopies(transposes=kept))) for kept in (False, True)
        )
    )
    assert_same(found, expected)


def test_a_checkpointed_forward_gives_the_same_bits() -> None:
    fp8 = experts()
    expected = results(fp8, COUNTS["ragged"], GroupedExperts(fp8))

    class Recomputed(GroupedExperts):
        def prepared(self, tokens: torch.Tensor, rows: int) -> Grouped:
            return partial(checkpoint, super().prepared(tokens, rows), use_reentrant=False)

    assert_same(results(fp8, COUNTS["ragged"], Recomputed(fp8)), expected)


def test_weights_are_cast_once_a_step(casts: list) -> None:
    fp8 = experts()
    grouped = GroupedExperts(fp8)
    optimizer = torch.optim.SGD(fp8.parameters(), lr=0.1)
    optimizer.step()  # until the first, each backward counts as one
    made = []
    for _ in range(2):
        for _ in range(2):
            casts.clear()
            last = results(fp8, COUNTS["ragged"], grouped)
            made.append(len(casts))
        optimizer.step()
    # tokens, SwiGLU and their gradients; at first two weights more
    assert made == [6, 4, 6, 4]
    copied = copy.deepcopy(fp8)
    fresh = results(copied, COUNTS["ragged"], GroupedExperts(copied))
    assert not torch.equal(fresh[0], last[0])
    assert torch.equal(results(fp8, COUNTS["ragged"], grouped)[0], fresh[0])
    with torch.no_grad():
        fp8[0].w1.weight.zero_()  # torch counts it
    assert not torch.equal(results(fp8, COUNTS["ragged"], grouped)[0], fresh[0])


def reconfigure(fp8: nn.ModuleList) -> None:
    for layer in fp8.modules():
        if isinstance(layer, FP8Linear):
            layer.fp8_casts = layer.fp8_casts.under(FP8Config(emulate=True, scaling="amax"))


def write_past_torchs_count(fp8: nn.ModuleList) -> None:
    """As optimizers over shards do."""
    other = nn.Parameter(torch.zeros(1))
    other.grad = torch.ones(1)
    for value in fp8.parameters():
        value.data.mul_(2)
    torch.optim.SGD([other]).step()


def replace_a_weight(fp8: nn.ModuleList) -> None:
    fp8[2].w2.weight = nn.Parameter(2 * fp8[2].w2.weight.detach())


def let_an_engine_fill_them(fp8: nn.ModuleList) -> None:
    """With other values; the parameters stay as they are."""
    for layer in fp8.modules():
        if isinstance(layer, FP8Linear):
            layer.fp8_weight = EngineWeight()
            layer.fp8_weight.fill(
                [layer.weight], Casts(layer.fp8_config).quantize_weight(2 * layer.weight.detach(), transposed=True)
            )


@pytest.mark.parametrize(
    "change",
    [reconfigure, write_past_torchs_count, replace_a_weight, let_an_engine_fill_them],
    ids=lambda c: c.__name__,
)
def test_whatever_changes_grouped_weights_is_seen(change: Callable[[nn.ModuleList], None]) -> None:
    fp8 = experts()
    grouped = GroupedExperts(fp8)
    before = results(fp8, COUNTS["ragged"], grouped)
    change(fp8)
    after = results(fp8, COUNTS["ragged"], grouped)
    assert not torch.equal(before[0], after[0])
    assert_same(after, results(fp8, COUNTS["ragged"], GroupedExperts(fp8)))


# ---- weights that an engine keeps ----


def keep(layer: FP8Linear, quantized: QuantizedMatrix) -> None:
    """What ZeRO does after a step, where a parameter keeps no value."""
    layer.weight.data = torch.full((), torch.nan, dtype=torch.bfloat16).expand(layer.weight.shape)
    layer.fp8_weight = EngineWeight()
    layer.fp8_weight.fill([layer.weight], quantized)


@pytest.mark.parametrize("transposes", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_weights_that_an_engine_keeps_are_read_as_they_are(together: bool, transposes: bool, casts) -> None:
    config = FP8Config(emulate=True, weight_copies=WeightCopies(high_precision=False, transposes=transposes))
    fp8 = experts(config)
    for number, expert in enumerate(fp8):
        expert.w1.weight.data.mul_(number + 1)  # scales differ
    exact = results(in_fp32(fp8), COUNTS["ragged"], None)
    for expert in fp8:
        keep(expert.w2, Casts(config).quantize_weight(expert.w2.weight, transposed=transposes))
        if together:  # as ZeRO gathers merged layers
            whole = Casts(config).quantize_weight(
                torch.cat([expert.w1.weight, expert.w3.weight]).detach(), transposed=transposes
            )
            cut = [whole.transpose] * 2 if not transposes else whole.transpose.split(FEATURES, 1)
            for layer, data, transpose in zip((expert.w1, expert.w3), whole.data.split(FEATURES), cut, strict=True):
                keep(layer, QuantizedMatrix(data, transpose, whole.inverse_scale, None))
        else:
            for layer in (expert.w1, expert.w3):
                keep(layer, Casts(config).quantize_weight(layer.weight, transposed=transposes))
    grouped = GroupedExperts(fp8)
    casts.clear()
    found = results(fp8, COUNTS["ragged"], grouped)
    assert len(casts) == 4  # no weight
    assert grouped.why_one_by_one is None
    assert_near(found, exact, 0.1)
    fp8[0].w1.weight.data = torch.ones(FEATURES, HIDDEN).bfloat16()  # this one has a value of its own
    results(fp8, COUNTS["ragged"], grouped)
    assert grouped.why_one_by_one == "an engine keeps the FP8 weights of some of the layers alone"


# ---- one by one ----


def _rename(cls: type, layer: nn.Module) -> None:
    layer.__class__ = type("Adapted", (cls,), {})


def _resize(some: nn.ModuleList, features: int) -> None:
    for expert in some:
        for layer, shape in (
            (expert.w1, (features, HIDDEN)),
            (expert.w3, (features, HIDDEN)),
            (expert.w2, (HIDDEN, features)),
        ):
            layer.weight = nn.Parameter(torch.ones(shape).bfloat16())


class Derived(nn.SiLU):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


WHY = {
    "a layer has hooks or a forward of its own, which must run": lambda fp8: fp8[1].w2.register_forward_hook(
        lambda *_: None
    ),
    "an expert has hooks or a forward of its own, which must run": lambda fp8: fp8[1].register_forward_hook(
        lambda *_: None
    ),
    "an expert's activation has hooks or a forward of its own, which must run": lambda fp8: fp8[
        1
    ].act_fn.register_forward_hook(lambda *_: None),
    "Adapted has no grouped form": lambda fp8: _rename(FP8Linear, fp8[1].w3),
    "the activation is GELU": lambda fp8: setattr(fp8[1], "act_fn", nn.GELU()),
    "the activation is Derived": lambda fp8: setattr(fp8[1], "act_fn", Derived()),
    "the layers' FP8Configs differ": lambda fp8: setattr(
        fp8[1].w1, "fp8_casts", Casts.of_layer(FP8Config(emulate=True, scaling="amax"))
    ),
    "a layer has a bias": lambda fp8: setattr(fp8[1].w1, "bias", nn.Parameter(torch.ones(FEATURES).bfloat16())),
    "the experts' sizes differ": lambda fp8: _resize(fp8[1:2], FEATURES - 16),
    "a size is no multiple of 16": lambda fp8: _resize(fp8, FEATURES - 8),
    "pretraining_tp is more than 1": lambda fp8: setattr(fp8[1], "config", MixtralConfig(pretraining_tp=2)),
    "grouped products give BF16 alone": lambda fp8: fp8.half(),
}


@pytest.mark.parametrize("reason", WHY)
def test_what_cannot_be_grouped_runs_one_by_one_and_says_why(reason: str) -> None:
    fp8 = experts()
    WHY[reason](fp8)
    assert_one_by_one(fp8, reason)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (FP8Config(emulate=True, scaling="rowwise"), "rowwise scales"),
        (FP8Config(emulate=True, formats=Formats(input=E5M2, gradient=torch.float8_e4m3fn)), "multiply E4M3 alone"),
    ],
)
def test_configurations_that_cannot_be_grouped(config: FP8Config, reason: str) -> None:
    assert_one_by_one(experts(config), reason)


def test_experts_whose_class_was_given_another_forward_are_not_grouped(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = experts()
    written = next(each for each in type(fp8[0]).__mro__ if each.__module__.startswith("transformers."))
    forward = written.forward
    monkeypatch.setattr(written, "forward", lambda self, x: 2 * forward(self, x))
    assert_one_by_one(fp8, f"{type(fp8[0]).__name__} has no grouped form")


@pytest.mark.parametrize("name", ["w1", "w2", "w3"])
def test_layers_of_an_expert_with_configurations_of_their_own_are_not_grouped(name: str) -> None:
    fp8 = experts()
    for expert in fp8:
        getattr(expert, name).fp8_casts = getattr(expert, name).fp8_casts.under(FP8Config(emulate=True, scaling="amax"))
    assert_one_by_one(fp8, "the layers' FP8Configs differ")


def assert_one_by_one(fp8: nn.ModuleList, reason: str) -> None:
    fp8.grouped = grouped = GroupedExperts(fp8)
    found, expected = (results(fp8, COUNTS["ragged"], each) for each in (grouped, None))
    assert_same(found, expected)
    assert reason in grouped.why_one_by_one
    assert f"experts of 1 block one by one ({grouped.why_one_by_one})" in report(fp8).summary()


def test_code_of_anyone_is_known_by_what_it_computes() -> None:
    fp8 = experts(make=deepseek)
    doubled = {"forward": lambda self, x: 2 * DeepseekV3MLP.forward(self, x)}
    for members, reason in (({}, None), (doubled, "SomeMLP has no grouped form")):
        cls = type("SomeMLP", (DeepseekV3MLP,), {"__module__": "transformers_modules.someone.a_model", **members})
        for expert in fp8:
            expert.__class__ = cls
        assert GroupedExperts(fp8).why_one_by_one == reason


def test_one_expert_is_not_a_group() -> None:
    grouped = GroupedExperts(experts()[:1])
    assert grouped.why_one_by_one == "one expert"
    assert called(grouped, tokens([[5]]), [[5]]) is None


@torch.no_grad()
def test_the_number_of_tokens_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    fp8 = experts().eval()
    counts = COUNTS["even"]
    x = tokens(counts)
    products = 1.5 * HIDDEN * FEATURES
    monkeypatch.setattr(module, "ONE_BY_ONE_FROM", 16 * products + 1)
    grouped = GroupedExperts(fp8)
    assert called(grouped, x, counts) is not None
    assert not grouped.why_one_by_one_in_evaluation
    monkeypatch.setattr(module, "ONE_BY_ONE_FROM", 16 * products)
    assert called(grouped, x, counts) is None
    assert grouped.why_one_by_one_in_evaluation == "one by one is faster for so many tokens"


@pytest.mark.parametrize("in_training", [False, True])
def test_where_there_is_a_backward_no_number_of_rows_decides(in_training: bool, monkeypatch) -> None:
    """Experts that are spread over ranks get other numbers on each of them."""
    monkeypatch.setattr(module, "ONE_BY_ONE_FROM", 0)
    grouped = GroupedExperts(experts().train(in_training))
    assert called(grouped, tokens(COUNTS["even"]), COUNTS["even"]) is not None
    with torch.no_grad():  # what is computed in training may be computed again for backward
        assert (called(grouped, tokens(COUNTS["even"]), COUNTS["even"]) is not None) == in_training


def test_few_experts_of_few_tokens_are_left_to_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = count_calls(monkeypatch, speed_model, "fp8_pays")
    fp8, x = experts(FP8Config()), tokens(COUNTS["even"])
    chosen, weights = torch.arange(len(x)).view(-1, 1) % EXPERTS, torch.ones(len(x), 1)
    assert GroupedExperts(fp8).mix(Routed(x, chosen, weights)) is not None
    assert set(asked) == {(64, HIDDEN)}  # as one product of all rows
    monkeypatch.setattr(speed_model, "fp8_pays", lambda *_: False)
    grouped = GroupedExperts(fp8)
    assert grouped.mix(Routed(x, chosen, weights)) is None
    assert grouped.why_one_by_one == "too few tokens for so few experts"
    monkeypatch.setattr(stack, "EXPERTS_THAT_PAY", EXPERTS)
    assert GroupedExperts(fp8).mix(Routed(x, chosen, weights)) is not None
    always = experts(FP8Config(always=True))
    assert GroupedExperts(always).mix(Routed(x, chosen, weights)) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_under_autocast_experts_are_grouped_whatever_their_dtype(dtype: torch.dtype) -> None:
    fp8, counts = experts().to(dtype), COUNTS["ragged"]
    grouped = GroupedExperts(fp8)
    with torch.autocast("cpu", torch.bfloat16):
        found = results(fp8, counts, grouped)
    assert grouped.why_one_by_one is None
    assert_near(found, results(in_fp32(fp8), counts, None), 0.08)
    assert {parameter.grad.dtype for parameter in fp8.parameters()} == {dtype}


def test_under_another_dtype_of_autocast_experts_are_left_to_their_layers() -> None:
    grouped, counts = GroupedExperts(experts()), COUNTS["even"]
    with torch.autocast("cpu", torch.float16):
        assert called(grouped, tokens(counts), counts) is None
    assert grouped.why_one_by_one == "grouped products give BF16 alone"


@pytest.mark.parametrize("how", ["inference mode", "capture"])
def test_what_a_graph_captures_and_inference_mode_are_left_to_the_layers(how: str, monkeypatch) -> None:
    """The host reads how many tokens an expert gets, and what is kept there is not to be read again."""
    fp8, counts = experts(), COUNTS["even"]
    grouped = GroupedExperts(fp8)
    if how == "capture":
        for each in (freshness, module):
            monkeypatch.setattr(each, "captured_without_copies", lambda *_: True)
    with torch.inference_mode(how == "inference mode"):
        assert called(grouped, tokens(counts), counts) is None
    assert grouped.why_one_by_one == "inference mode or a graph that is captured"
    assert grouped._down.made is None
    if how == "capture":
        with torch.inference_mode():
            assert called(grouped.of_others(fp8.eval()), tokens(counts), counts) is None


@pytest.mark.parametrize("broken", range(3))
def test_experts_of_which_one_evaluates_run_one_by_one(broken: int) -> None:
    fp8, counts = experts(), COUNTS["even"]
    fp8[broken].eval()
    grouped = GroupedExperts(fp8)
    assert called(grouped, tokens(counts), counts) is None
    reasons = grouped.why_one_by_one, grouped.why_one_by_one_in_evaluation
    assert set(reasons) == {None, "some of the experts are in evaluation"}


@pytest.mark.parametrize("factor", [0.5, 4.0])
def test_a_factor_multiplies_the_gradients_of_weights_alone(factor: float) -> None:
    fp8 = experts()
    for grouped in (None, GroupedExperts(fp8)):
        plain, found = (results(fp8, COUNTS["ragged"], grouped, each) for each in (1.0, factor))
        assert_near(found[:2], plain[:2], 0.02 if grouped is None else 0.0)
        for one, other in zip(found[2:], plain[2:], strict=True):
            torch.testing.assert_close(one, factor * other, rtol=0.02, atol=1e-4)


def test_weights_that_are_whole_only_in_their_layers_stay_there() -> None:
    fp8, counts = experts(), COUNTS["even"]
    fp8[1].w3.fp8_weight = ReshardedWeight()  # as where FSDP gathers it twice
    grouped = GroupedExperts(fp8)
    assert called(grouped, tokens(counts), counts) is None
    assert grouped.why_one_by_one == "the weights are whole only while a layer runs"


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_in_evaluation_experts_are_grouped_and_give_what_they_give_in_training(mode: Callable) -> None:
    fp8 = experts()
    expected = results(fp8, COUNTS["ragged"], GroupedExperts(fp8))
    grouped = GroupedExperts(fp8.eval())
    for _ in range(2):
        with mode():
            y = run(tokens(COUNTS["ragged"]), COUNTS["ragged"], fp8, grouped)
        assert torch.equal(y, expected[0].bfloat16())
    # transposes are what backward reads
    assert (grouped._down.made.transpose.numel() > 0) == (mode is torch.enable_grad)
    assert_same(results(fp8, COUNTS["ragged"], grouped), expected)
    assert grouped.why_one_by_one is grouped.why_one_by_one_in_evaluation is None


def test_values_that_were_written_unseen_are_read_after_a_call_of_eval() -> None:
    fp8 = experts()
    grouped = GroupedExperts(fp8.eval())
    with torch.no_grad():
        before = called(grouped, tokens(COUNTS["even"]), COUNTS["even"])
        fp8[0].w2.weight.data.mul_(2)
        fp8.eval()
        after = called(grouped, tokens(COUNTS["even"]), COUNTS["even"])
        assert not torch.equal(before, after)
        assert torch.equal(after, called(GroupedExperts(fp8), tokens(COUNTS["even"]), COUNTS["even"]))


@torch.no_grad()
def test_few_tokens_in_evaluation_run_one_by_one_as_the_report_says(monkeypatch) -> None:
    monkeypatch.setattr(stack, "computes_in_fp8", lambda config, rows, *_: rows > 10)
    monkeypatch.setattr(stack, "EXPERTS_THAT_PAY", EXPERTS)
    fp8 = experts()
    fp8.grouped = GroupedExperts(fp8)
    few = [[1, 0, 2, 0]]
    assert called(fp8.grouped, tokens(few), few) is not None
    fp8.eval()
    assert called(fp8.grouped, tokens(COUNTS["even"]), COUNTS["even"]) is not None
    assert called(fp8.grouped, tokens(few), few) is None
    (row,) = report(fp8).grouped
    assert (row.why_one_by_one, row.why_one_by_one_in_evaluation) == (None, "too few tokens")
    assert "experts of 1 block in grouped products, of 1 block one by one for some batches in evaluation (too few" in (
        report(fp8).summary()
    )


def test_the_report_knows_what_is_grouped() -> None:
    fp8 = experts()
    fp8.grouped = GroupedExperts(fp8)
    rows = report(fp8).grouped
    assert [(row.experts, row.why_one_by_one) for row in rows] == [(EXPERTS, None)]
    assert ", experts of 1 block in grouped products" in report(fp8).summary()


@pytest.mark.parametrize("fused", [False, True])
def test_the_report_counts_experts_that_save_gate_and_up_in_8_bits(fused: bool) -> None:
    fp8 = experts(FP8Config(emulate=True, activations=Activations(saved="8-bit")))
    if fused:
        for expert in fp8:
            mix(FusedGatedMLP, expert)
    assert report(fp8).saved_in_8_bits == ((f"{EXPERTS} SwiGLUs",) if fused else ())
    fp8.grouped = GroupedExperts(fp8)
    assert report(fp8).saved_in_8_bits == (f"{EXPERTS} SwiGLUs",)
    assert saved_bytes(fp8.grouped) < saved_bytes(GroupedExperts(experts()))
    fp8[0].w1.register_forward_hook(lambda *_: None)
    assert fp8.grouped.why_one_by_one is not None
    assert report(fp8).saved_in_8_bits == ((f"{EXPERTS - 1} SwiGLUs",) if fused else ())


def test_weights_are_kept_for_gradients_of_tokens_alone() -> None:
    with_gradients, without = (saved_bytes(GroupedExperts(experts()), each) for each in (True, False))
    assert with_gradients - without >= EXPERTS * 2 * FEATURES * HIDDEN


def saved_bytes(grouped: GroupedExperts, of_tokens: bool = True) -> int:
    """What autograd keeps of a forward, whose tokens need gradients or not."""
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        assert called(grouped, tokens(COUNTS["even"]).requires_grad_(of_tokens), COUNTS["even"]) is not None
    return sum(kept.values())


def test_copies_and_pickles_hold_their_own_experts_and_no_fp8_weights() -> None:
    fp8 = experts()
    fp8.grouped = GroupedExperts(fp8)
    expected = results(fp8, COUNTS["ragged"], fp8.grouped)
    for copied in (copy.deepcopy(fp8), pickle.loads(pickle.dumps(fp8))):
        assert copied.grouped.experts == tuple(copied)
        assert copied[0] is not fp8[0]
        assert copied.grouped._down.made is None
        assert_same(results(copied, COUNTS["ragged"], copied.grouped), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_come_in_one_order_whatever_the_tokens(fused: bool) -> None:
    """ZeRO adds up what ranks give in the order in which they give it."""
    fp8 = experts()
    for expert in fp8 if fused else ():
        mix(FusedGatedMLP, expert)
    order = []
    for name, parameter in fp8.named_parameters():
        parameter.register_post_accumulate_grad_hook(partial(lambda name, _: order.append(name), name))
    for grouped in (None, GroupedExperts(fp8)):
        orders = []
        for counts in COUNTS.values():
            order.clear()
            results(fp8, counts, grouped)
            orders.append(list(order))
        assert len(orders[0]) == 3 * EXPERTS
        assert all(each == orders[0] for each in orders)


@pytest.mark.gpu
@pytest.mark.parametrize("kept", ["none", "each by itself"])
def test_grouped_experts_compute_what_they_compute_one_by_one_on_a_gpu(kept: str) -> None:
    device = torch.device("cuda", 0)
    reason = module.why_no_grouped_product(device, emulate=False)
    if reason is not None:
        pytest.skip(reason)
    config = FP8Config(always=True)
    fp8 = experts(config).to(device)
    if kept != "none":
        for layer in (layer for expert in fp8 for layer in expert.children() if isinstance(layer, FP8Linear)):
            layer.fp8_weight = EngineWeight()
            layer.fp8_weight.fill([layer.weight], Casts(config).quantize_weight(layer.weight, transposed=True))
    grouped = GroupedExperts(fp8)
    counts = COUNTS["ragged"]

    def on_gpu(each: GroupedExperts | None) -> list[torch.Tensor]:
        x = tokens(counts).to(device).requires_grad_()
        fp8.zero_grad()
        y = run(x, counts, fp8, each, 0.5)
        y.backward(torch.ones_like(y))
        return [value.detach().float() for value in (y, x.grad, *(each.grad for each in fp8.parameters()))]

    one_by_one, found = on_gpu(None), on_gpu(grouped)
    assert grouped.why_one_by_one is None
    assert_near(found, one_by_one, 0.12)


def test_transforms_of_torch_func_are_refused() -> None:
    """In them the function of autograd behind the products would be passed by."""
    made = experts()
    grouped, counts = GroupedExperts(made), COUNTS["even"]

    def of(tokens: torch.Tensor) -> torch.Tensor:
        return run(tokens, counts, made, grouped).float().sum()

    tokens = torch.randn(64, HIDDEN).bfloat16()
    of(tokens)
    assert grouped.why_one_by_one is None
    with pytest.raises(RuntimeError, match="functorch transforms"):
        torch.func.grad(of)(tokens)
