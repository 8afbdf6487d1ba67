"""Scales from other amaxes than the tensor's own: delayed and constant scaling."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, convert_to_fp8, formats, report
from fp8booster.config import Activations
from fp8booster.kernels.scales import scale_of
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.fuse import fuse
from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.held_casts import forget_step, remember_amaxes, remembered_amaxes
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, WEIGHT, Constant, Delayed
from fp8booster.scaling import delayed as module
from fp8booster.scaling.steps import note_step
from tests.kernels.matrices import same
from tests.nn.experts.test_experts import called, experts, tokens
from tests.nn.experts.test_fp8_experts import HIDDEN, Experts
from tests.nn.fused.models import batch, build
from tests.nn.reference import count_calls
from tests.scaling.waiting import never_waiting

DELAYED = FP8Config(scaling=Delayed(history=2), emulate=True)


def cast(casts: Casts, value: float, known: bool = False) -> float:
    """The inverse scale of a cast of a matrix of this amax."""
    matrix = torch.full((2, 16), value).requires_grad_()
    amax = torch.tensor([abs(value)]) if known else None
    made = casts.quantize(INPUT, matrix, transposed=True, amax=amax)
    assert torch.equal(made.data[:2, :16].view(torch.uint8), made.transpose[:16, :2].t().view(torch.uint8))
    return made.inverse_scale.item()


def inverse(amax: float) -> float:
    return scale_of(torch.tensor(amax), formats.E4M3)[1].item()


@pytest.mark.parametrize("known", [False, True])
def test_the_scale_is_that_of_the_largest_amax_of_the_steps_before(known: bool) -> None:
    casts = Casts.of_layer(DELAYED)
    assert [cast(casts, value, known=known) for value in (1.0, 4.0, 2.0)] == [inverse(1.0), inverse(4.0), inverse(2.0)]
    for value, expected in ((8.0, 4.0), (1.0, 8.0), (1.0, 8.0), (1.0, 1.0)):  # of two steps
        note_step()
        assert cast(casts, value, known=known) == inverse(expected)
        assert cast(casts, 0.5, known=known) == inverse(expected)  # within a step it stays


def test_the_most_recent_amax_and_a_margin_are_options() -> None:
    config = FP8Config(scaling=Delayed(amax="most recent", margin=3))
    casts = Casts.of_layer(config)
    assert cast(casts, 4.0) == inverse(4.0)
    for value, expected in ((1.0, 4.0), (2.0, 1.0), (0.0, 2.0), (1.0, 2.0)):  # zero says nothing
        note_step()
        assert cast(casts, value) == inverse(8 * expected)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("then", ["the next step", "a step of another optimizer", "an operand of zeros"])
def test_a_step_that_is_forgotten_is_as_if_it_had_not_begun(steps: int, then: str) -> None:
    casts = Casts.of_layer(FP8Config(scaling=Delayed(amax="most recent"), emulate=True))
    for _ in range(steps):
        cast(casts, 4.0)
        note_step()
    for _ in range(2):
        cast(casts, 8.0)
        casts.forget_step()
        casts.forget_step()
    if then == "a step of another optimizer":
        note_step()
    if then == "an operand of zeros" and steps:  # which says nothing, after the first step
        cast(casts, 0.0)
        note_step()
    assert cast(casts, 2.0) == inverse(4.0 if steps else 2.0)
    note_step()
    assert cast(casts, 1.0) == inverse(2.0)


def test_a_constant_scale_is_two_to_the_power_asked_for() -> None:
    config = FP8Config(scaling=Constant(forward_bias=3, gradient_bias=-2))
    casts, x = Casts.of_layer(config), torch.randn(2, 16)
    roles = ((INPUT, formats.E4M3, 3), (WEIGHT, formats.E4M3, 3), (OUTPUT_GRADIENT, formats.E5M2, -2))
    for factor in (1.0, 1e4):
        for role, dtype, bias in roles:
            made = casts.quantize(role, factor * x, dtype=dtype)
            assert made.inverse_scale.item() == 2.0**-bias
            limit = formats.MAX[dtype] * 2.0**-bias
            assert made.dequantize(2, 16).abs().max() <= limit
            torch.testing.assert_close(
                made.dequantize(2, 16), (factor * x).clamp(-limit, limit), rtol=0.13, atol=2.0 ** (-bias - 9)
            )
        note_step()


@pytest.mark.parametrize("scaling", ["delayed", "constant"])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_reaches_loss_and_gradients_and_not_the_next_step(bad: float, scaling: str) -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)), FP8Config(scaling=scaling, emulate=True))
    x = torch.randn(16, 32)

    def losses(x: torch.Tensor, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.clone().requires_grad_()
        loss = model(x).square().mean()
        (factor * loss).backward()
        note_step()
        return loss.detach(), x.grad

    first = losses(x)
    assert not losses(x.index_fill(0, torch.tensor([3]), bad))[0].isfinite()
    loss, gradient = losses(x, bad)
    assert loss.isfinite()
    assert not gradient.isfinite().any()
    for one, other in zip(losses(x), first, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_what_is_larger_than_before_saturates() -> None:
    casts = Casts.of_layer(DELAYED)
    cast(casts, 1.0)
    note_step()
    made = casts.quantize(INPUT, torch.full((1, 16), 100.0), dtype=formats.E4M3)
    torch.testing.assert_close(made.dequantize(1, 16), torch.ones(1, 16))


def test_one_pass_finds_an_amax_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    casts = Casts.of_layer(DELAYED)
    cast(casts, 1.0)
    note_step()
    by_known, finding = (count_calls(monkeypatch, module, name) for name in ("cast", "cast_by"))
    cast(casts, 3.0)
    assert (len(by_known), len(finding)) == (0, 1)
    cast(casts, 3.0, known=True)
    assert (len(by_known), len(finding)) == (1, 1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> float:
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def trained(config: FP8Config, steps: int = 4, **how: bool) -> tuple[nn.Module, list[float]]:
    model = convert_to_fp8(build(), config)
    fuse(model)
    if how.get("checkpointed"):
        model.gradient_checkpointing_enable({"use_reentrant": how["reentrant"]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ids = batch()
    return model, [step(model, optimizer, ids) for _ in range(steps)]


@pytest.mark.parametrize("scaling", ["tensorwise", "amax", "delayed", "constant(forward_bias=4, gradient_bias=12)"])
def test_a_model_learns_under_every_scaling(scaling: str) -> None:
    _, losses = trained(FP8Config(scaling=scaling, vocabulary_head=True, emulate=True))
    _, right = trained(FP8Config(vocabulary_head=True, emulate=True))
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(right, rel=5e-3)
    assert (losses == right) == (scaling == "tensorwise")


def test_what_backward_makes_again_is_scaled_as_in_forward() -> None:
    model, losses = trained(FP8Config(scaling="delayed", activations=Activations(saved="8-bit"), emulate=True))
    assert losses == pytest.approx(trained(DELAYED)[1], rel=5e-3)
    for layer in model.model.layers:
        assert (layer.mlp.down_proj.fp8_casts.state.by_role[INPUT].amaxes > 0).sum() == 4


def test_grouped_experts_keep_histories_of_each_product() -> None:
    counts = [[16, 16, 16, 16]]
    grouped = GroupedExperts(experts(DELAYED))
    held = convert_to_fp8(nn.Sequential(Experts().bfloat16()), FP8Config(scaling="delayed", always=True, emulate=True))
    x = torch.randn(40, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    note_step()  # until the first, weights are cast after each backward
    for _ in range(3):
        called(grouped, tokens(counts).requires_grad_(), counts).sum().backward()
        held[0](x, torch.arange(80).view(40, 2) % 4, torch.ones(40, 2, dtype=torch.bfloat16)).sum().backward()
        note_step()
    for casts in (*grouped.fp8_casts.values(), *held[0].fp8_casts.values()):
        assert casts.state.by_role.keys() == {INPUT, WEIGHT, OUTPUT_GRADIENT}
        for role, history in casts.state.by_role.items():
            # no weight has changed
            assert (history.amaxes > 0).sum() == (1 if role == WEIGHT else 3)


def test_real_time_scales_rounded_to_powers_of_two_are_those_of_amax_scaling() -> None:
    assert FP8Config(scaling="amax").power_of_two
    assert trained(FP8Config(scaling="amax"))[1] == trained(FP8Config(scaling="amax"))[1]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_computes_the_same_again(reentrant: bool) -> None:
    model, losses = trained(DELAYED)
    again, recomputed = trained(DELAYED, checkpointed=True, reentrant=reentrant)
    assert recomputed == losses
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_micro_batches_of_a_step_have_one_scale_in_any_order() -> None:
    layer = convert_to_fp8(nn.Sequential(nn.Linear(32, 16, bias=False)), DELAYED)
    other = copy.deepcopy(layer)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (layer, other)]
    for scale in (1.0, 2.0, 4.0):
        x = [scale * factor * torch.randn(16, 32) for factor in (1.0, 3.0)]
        losses = [layer(each.requires_grad_()).square().mean() for each in x]  # both in flight
        for loss in losses:
            loss.backward()
        for each in reversed(x):
            checkpoint(other, each.detach().requires_grad_(), use_reentrant=False).square().mean().backward()
        torch.testing.assert_close(layer[0].weight.grad, other[0].weight.grad, rtol=1e-5, atol=1e-6)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        histories = [each[0].fp8_casts.state.by_role for each in (layer, other)]
        for role in (INPUT, WEIGHT, OUTPUT_GRADIENT):
            torch.testing.assert_close(*(each[role].amaxes for each in histories), rtol=1e-5, atol=1e-6)


def test_evaluation_scales_in_real_time_and_notes_nothing() -> None:
    (layer,) = model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)), DELAYED)
    real_time = convert_to_fp8(nn.Sequential(copy.deepcopy(layer)), FP8Config(emulate=True)).eval()
    model(torch.randn(16, 32).requires_grad_()).sum().backward()
    note_step()
    before = {role: each.amaxes.clone() for role, each in layer.fp8_casts.state.by_role.items()}
    x = 100 * torch.randn(16, 32)
    assert torch.equal(model.eval()(x), real_time(x))
    assert before.keys() == {INPUT, WEIGHT, OUTPUT_GRADIENT}
    for role, each in layer.fp8_casts.state.by_role.items():
        assert torch.equal(each.amaxes, before[role])


@pytest.mark.parametrize("config", [DELAYED, FP8Config(scaling="constant", emulate=True)])
def test_it_learns_after_a_forward_in_inference_mode(config: FP8Config) -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)), config)
    with torch.inference_mode():
        model(torch.randn(16, 32))
    model(torch.randn(16, 32)).sum().backward()
    assert model[0].weight.grad.isfinite().all()


def test_compiled_code_computes_what_eager_code_does() -> None:
    torch.manual_seed(0)
    eager = convert_to_fp8(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 16)), DELAYED)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, backend="aot_eager")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (eager, other)]
    for scale in (1.0, 3.0, 0.5):
        x = scale * torch.randn(16, 32)
        losses = [model(x).square().mean() for model in (eager, compiled)]
        assert losses[0].item() == losses[1].item()
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(eager.modules(), other.modules(), strict=True):
        if isinstance(one, FP8Layer):
            for role, history in one.fp8_casts.state.by_role.items():
                assert same(history.amaxes, two.fp8_casts.state.by_role[role].amaxes)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda casts: pickle.loads(pickle.dumps(casts))])
def test_a_copy_goes_on_as_its_original(copied: Callable[[Casts], Casts]) -> None:
    casts = Casts.of_layer(DELAYED)
    cast(casts, 1.0)
    note_step()
    other = copied(casts)
    for amax, expected in ((4.0, 1.0), (2.0, 4.0)):
        assert cast(other, amax) == cast(casts, amax) == inverse(expected)
        note_step()
    cast(casts, 16.0)
    note_step()
    assert cast(other, 1.0) == inverse(4.0)  # they share nothing


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scaling": "delayed", "cuda_graphs": True}, "when a step begins"),
        ({"scaling": "last"}, "use tensorwise, rowwise"),
        ({"scaling": "delayed(history=0)"}, "Delayed.history is 0; use a whole number from 1 to 1024"),
        ({"scaling": "delayed(amax='mean')"}, "Delayed.amax is 'mean'; use 'max' or 'most recent'"),
        ({"scaling": "delayed(margin=17)"}, "Delayed.margin is 17"),
        ({"scaling": "delayed(power_of_two=2)"}, "Delayed.power_of_two is 2; use True or False"),
        ({"scaling": "constant(gradient_bias=0.5)"}, "whole number"),
        ({"scaling": "constant(margin=1)"}, "with arguments of fp8booster.scaling.Constant"),
        ({"scaling": "delayed(4)"}, "write delayed\\(argument=value\\)"),
        ({"scaling": "amax(power_of_two=False)"}, "with arguments of fp8booster.scaling.RealTime"),
        ({"scaling": "rowwise(granularity='blockwise')"}, "with arguments of fp8booster.scaling.RealTime"),
        ({"scaling": "constant", "cuda_graphs": True}, "when a step begins"),
        ({"scaling": "smooth-swiglu", "cuda_graphs": True}, "when a step begins"),
        ({"scaling": "smooth-swiglu", "fused": False}, "leave one of them out"),
    ],
)
def test_what_cannot_work_is_refused(options: dict, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        FP8Config(**options)


def test_layers_are_not_captured_and_say_why() -> None:
    model = convert_to_fp8(build(), DELAYED)
    capture_layers(model)
    ids = batch()
    model(input_ids=ids, labels=ids).loss.backward()
    assert list(captured_layers(model)) == ["delayed scales, of which a graph cannot tell when a step begins"]


def test_the_report_names_the_scaling() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)), DELAYED)
    assert report(model).rows[0].notes == "emulated in FP32; delayed scales"
    real_time = convert_to_fp8(nn.Sequential(nn.Linear(32, 16)), FP8Config(emulate=True))
    assert report(real_time).rows[0].notes == "emulated in FP32"


def noted(casts: Casts) -> torch.Tensor:
    """The amaxes that are kept for inputs."""
    if isinstance(casts.scaling, Delayed):
        return casts.state.by_role[INPUT].amaxes
    (amaxes,) = casts.state._made.values()
    return amaxes


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("config", [DELAYED, FP8Config(scaling="constant", emulate=True)], ids=["delayed", "constant"])
def test_devices_cast_the_bits_of_the_cpu_and_the_host_does_not_wait(
    config: FP8Config, known: bool, device: torch.device
) -> None:
    there_casts, casts = Casts.of_layer(config), Casts.of_layer(config)
    for step_number in range(5):
        torch.manual_seed(step_number)
        matrices = [(torch.randn(300, 144) * 2.0**step_number).bfloat16() for _ in range(2)]
        matrices[1][7, 9] = math.inf if step_number == 3 else 0.0
        there = [matrix.to(device) for matrix in matrices]
        amaxes = [matrix.abs().amax(1).float() if known else None for matrix in matrices]
        amaxes_there = [None if amax is None else amax.to(device) for amax in amaxes]
        with never_waiting(device):
            found = [
                there_casts.quantize(INPUT, matrix, transposed=True, amax=amax, dtype=formats.E4M3)
                for matrix, amax in zip(there, amaxes_there, strict=True)
            ]
        for made, matrix, amax in zip(found, matrices, amaxes, strict=True):
            expected = casts.quantize(INPUT, matrix, transposed=True, amax=amax, dtype=formats.E4M3)
            assert all(same(one.cpu(), other) for one, other in zip(made[:3], expected[:3], strict=True))
        assert same(noted(there_casts).cpu(), noted(casts))
        note_step()


SMOOTH = FP8Config(scaling="smooth-swiglu", emulate=True)


def fused(config: FP8Config) -> nn.Module:
    model = convert_to_fp8(build(), config)
    fuse(model)
    return model


def backward(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    model(input_ids=batch(), labels=batch()).loss.backward()


def take(model: nn.Module, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        backward(model, step)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("config", "roles"), [(DELAYED, {WEIGHT, INPUT, OUTPUT_GRADIENT}), (SMOOTH, {INPUT})])
def test_a_model_that_remembers_goes_on_bit_for_bit(config: FP8Config, roles: set[str]) -> None:
    whole, resumed, anew = (fused(config) for _ in range(3))
    take(whole, range(3))
    kept, state = copy.deepcopy(remembered_amaxes(whole)), copy.deepcopy(whole.state_dict())
    assert {role for of_layer in kept.values() for role in of_layer} == roles
    take(whole, range(3, 5))
    for model in (resumed, anew):
        model.load_state_dict(state)
    remember_amaxes(resumed, kept)
    assert same_amaxes(remembered_amaxes(resumed), kept)
    for model in (resumed, anew):
        take(model, range(3, 5))
    assert same_amaxes(remembered_amaxes(resumed), remembered_amaxes(whole))
    assert all(map(torch.equal, whole.parameters(), resumed.parameters()))
    assert not all(map(torch.equal, whole.parameters(), anew.parameters()))


MOST_RECENT = FP8Config(scaling=Delayed(amax="most recent"), emulate=True)


@pytest.mark.parametrize("forgets", [False, True], ids=["broken off", "skipped"])
@pytest.mark.parametrize("ended", [0, 3])
@pytest.mark.parametrize("config", [DELAYED, MOST_RECENT, SMOOTH], ids=["largest", "most recent", "smooth"])
def test_what_is_saved_is_of_steps_that_have_ended(config: FP8Config, ended: int, forgets: bool) -> None:
    expected, disturbed, resumed = (fused(config) for _ in range(3))
    for model in (expected, disturbed):
        take(model, range(ended))
    hook = disturbed.model.embed_tokens.register_forward_hook(lambda _, __, output: 64 * output)
    backward(disturbed, 7)
    hook.remove()
    disturbed.zero_grad()
    if forgets:
        forget_step(disturbed)
    resumed.load_state_dict(disturbed.state_dict())
    remember_amaxes(resumed, copy.deepcopy(remembered_amaxes(disturbed)))
    # the one that goes on first: steps of the others would count as steps of this one's
    runs = (disturbed, resumed) if forgets else (resumed,)
    for model in (*runs, expected):
        take(model, range(ended, ended + 3))
    for run in runs:
        assert all(map(torch.equal, expected.parameters(), run.parameters()))


def same_amaxes(one: dict[str, dict[str, torch.Tensor]], other: dict[str, dict[str, torch.Tensor]]) -> bool:
    flat = [{(name, role): each for name, roles in of.items() for role, each in roles.items()} for of in (one, other)]
    return flat[0].keys() == flat[1].keys() and all(each.equal(flat[1][key]) for key, each in flat[0].items())
