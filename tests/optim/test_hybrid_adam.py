"""HybridAdam computes what torch's fused AdamW and Adam do, from gradients of 16 or 32 bits, divided by a scale."""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW

from fp8booster.optim import HybridAdam, hybrid_adam

SIZES = (7, 1, 300, 64)
STEPS = 4


def shards(device: torch.device) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(device)) for size in SIZES]


def give_gradients(
    parameters: list[nn.Parameter], step: int, dtype: torch.dtype = torch.float32, factor: float = 1.0
) -> None:
    """Gradients that 16 bits hold exactly, in a dtype that the parameter need not have, as Gemini gives them."""
    torch.manual_seed(100 + step)
    for parameter in parameters:
        gradient = torch.randn(parameter.numel()).to(torch.bfloat16).clamp(-4, 4)
        values = parameter.data
        parameter.data = (gradient * factor).to(parameter.device, dtype)
        parameter.grad = parameter.data
        parameter.data = values


def train(
    optimizer: Any,
    parameters: list[nn.Parameter],
    steps: range = range(STEPS),
    scale_is_a_tensor: bool = False,
    **gradients: Any,
) -> None:
    factor = gradients.get("factor", 1.0)
    divisor = torch.tensor(factor, device=parameters[0].device) if scale_is_a_tensor else factor
    scale = {"div_scale": divisor} if factor != 1.0 else {}
    for step in steps:
        give_gradients(parameters, step, **gradients)
        optimizer.step(**scale)
        optimizer.zero_grad(set_to_none=True)


def assert_same(expected: list[nn.Parameter], found: list[nn.Parameter]) -> None:
    """Bit for bit on the CPU. On a GPU torch takes 1 - 0.999 in FP32, 1.3e-5 off, and roundings are fused otherwise."""
    for one, other in zip(expected, found, strict=True):
        if one.is_cuda:
            torch.testing.assert_close(one, other, rtol=2e-5, atol=5e-6)
        else:
            assert torch.equal(one, other)


CASES: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "AdamW": (AdamW, {}, {"weight_decay": 0.01}),
    "decay": (AdamW, {"weight_decay": 0.3}, {"weight_decay": 0.3}),
    "Adam with decay": (Adam, {"weight_decay": 0.3}, {"weight_decay": 0.3, "adamw_mode": False}),
    "amsgrad": (AdamW, {"amsgrad": True}, {"amsgrad": True, "weight_decay": 0.01}),
    "maximize": (AdamW, {"maximize": True}, {"maximize": True, "weight_decay": 0.01}),
    "betas": (Adam, {"betas": (0.5, 0.7), "eps": 1e-3}, {"betas": (0.5, 0.7), "eps": 1e-3, "adamw_mode": False}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_it_is_torchs_fused_optimizer(case, dtype, device) -> None:
    reference, theirs, ours = CASES[case]
    expected, found = shards(device), shards(device)
    train(reference(expected, lr=0.1, fused=True, **theirs), expected)
    optimizer = HybridAdam(found, lr=0.1, **ours)
    train(optimizer, found, dtype=dtype)
    assert_same(expected, found)
    # the unfused one rounds in another order
    slow = shards(device)
    train(reference(slow, lr=0.1, foreach=False, **theirs), slow)
    for one, other in zip(slow, found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("is_a_tensor", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_are_divided_by_the_scale(dtype, is_a_tensor, device) -> None:
    expected, found = shards(device), shards(device)
    train(HybridAdam(expected, lr=0.1), expected)
    train(HybridAdam(found, lr=0.1), found, scale_is_a_tensor=is_a_tensor, dtype=dtype, factor=64.0)
    assert_same(expected, found)


@pytest.mark.parametrize("value_lies_transposed", [False, True])
def test_a_gradient_may_lie_otherwise_than_its_parameter(value_lies_transposed) -> None:
    torch.manual_seed(0)
    value, gradient = torch.randn(6, 8), torch.randn(8, 6)
    value = value.t() if value_lies_transposed else value.t().contiguous()
    gradient = gradient if value_lies_transposed else gradient.t().contiguous().t()
    ours, expected = (nn.Parameter(value.clone(memory_format=torch.preserve_format)) for _ in range(2))
    expected.grad = gradient.clone(memory_format=torch.preserve_format)
    ours.grad = gradient
    HybridAdam([ours], lr=0.1).step()
    AdamW([expected], lr=0.1, weight_decay=0.0, foreach=False).step()
    torch.testing.assert_close(ours, expected)


def test_without_bias_correction_the_moments_are_taken_as_they_are(device) -> None:
    parameter = nn.Parameter(torch.zeros(3, device=device))
    optimizer = HybridAdam([parameter], lr=1.0, bias_correction=False, eps=0.0)
    parameter.grad = torch.ones(3, device=device)
    optimizer.step()
    expected = -(1 - 0.9) / (1 - 0.999) ** 0.5
    # on a GPU the fused step takes 1 - 0.999 in FP32
    torch.testing.assert_close(parameter.data, torch.full_like(parameter.data, expected), rtol=2e-5, atol=0)


def test_arguments_of_colossal_ai_are_taken() -> None:
    parameters = shards(torch.device("cpu"))
    HybridAdam(parameters, 1e-3, True, (0.9, 0.999), 1e-8, 0.0, True, 0.0, None)
    with pytest.warns(UserWarning, match="give it to the plugin"):
        HybridAdam(parameters, initial_scale=2**5)
    with pytest.warns(UserWarning, match="simd_log has no effect .* leave it out"):
        HybridAdam(parameters, simd_log=True)
    with pytest.raises(ValueError, match=r"nvme_offload_fraction is 0.5, .* leave it out"):
        HybridAdam(parameters, nvme_offload_fraction=0.5, nvme_offload_dir="somewhere")
    with pytest.raises(ValueError, match=r"nvme_offload_dir is 'somewhere', .* leave it out"):
        HybridAdam(parameters, nvme_offload_dir="somewhere")


def test_arguments_are_colossal_ai_s_in_its_order_with_its_defaults() -> None:
    from colossalai.nn.optimizer import HybridAdam as Native

    import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)

    theirs, ours = (inspect.signature(kind).parameters for kind in (Native, HybridAdam))
    named = [each for each in theirs.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
    assert len(named) == 9
    for one, other in zip(named, ours.values(), strict=False):
        assert (one.name, one.kind, one.default) == (other.name, other.kind, other.default)
    # what its documentation names besides, and what examples give it, it drops unseen
    assert set(ours) - {each.name for each in named} == {"amsgrad", "maximize", "simd_log", "initial_scale"}
    theirs, ours = (inspect.signature(kind.step).parameters for kind in (Native, HybridAdam))
    assert [(each.name, each.default) for each in theirs.values()] == [
        (each.name, each.default) for each in ours.values()
    ]
    assert Native.num_fp32_shards_per_param == HybridAdam.num_fp32_shards_per_param


def test_groups_and_betas_are_given_as_examples_give_them() -> None:
    first, second = shards(torch.device("cpu"))[:2]
    groups = [{"params": [first], "weight_decay": 0.1}, {"params": [second], "weight_decay": 0.0}]
    optimizer = HybridAdam(groups, lr=2.4e-5, betas=[0.9, 0.95], eps=1e-8)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    # a generator is read once
    optimizer = HybridAdam(model_params=(each for each in (first, second)), lr=3e-4, betas=(0.9, 0.95), adamw_mode=True)
    train(optimizer, [first, second])
    assert len(optimizer.state) == 2


def test_states_are_what_gemini_saves(device) -> None:
    parameters = shards(device)
    optimizer = HybridAdam(parameters)
    train(optimizer, parameters)
    for parameter in parameters:
        state = optimizer.state[parameter]
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert (type(state["step"]), state["step"]) == (int, STEPS)
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].shape == parameter.shape
            assert state[name].dtype is torch.float32


def test_states_of_torchs_optimizer_are_taken(device) -> None:
    theirs, ours = shards(device), shards(device)
    expected, found = AdamW(theirs, fused=True), HybridAdam(ours)
    train(expected, theirs)
    found.load_state_dict(copy.deepcopy(expected.state_dict()))  # else both hold the same tensors
    for one, other in zip(theirs, ours, strict=True):
        other.data.copy_(one.data)
    later = range(STEPS, 2 * STEPS)
    train(expected, theirs, steps=later)
    train(found, ours, steps=later)
    assert_same(theirs, ours)
    assert [found.state[one]["step"] for one in ours] == [2 * STEPS] * len(ours)
    assert all(type(found.state[one]["step"]) is int for one in ours)


def test_moments_of_a_checkpoint_are_rounded_to_the_dtype_of_the_values(device) -> None:
    parameters = [nn.Parameter(one.data.bfloat16()) for one in shards(device)]
    optimizer = HybridAdam(parameters)
    train(optimizer, parameters, dtype=torch.bfloat16)
    for parameter in parameters:
        state = optimizer.state[parameter]
        state.update({name: state[name].float() for name in ("exp_avg", "exp_avg_sq")})  # as Gemini loads them
    train(optimizer, parameters, dtype=torch.bfloat16)
    for parameter in parameters:
        assert {value.dtype for name, value in optimizer.state[parameter].items() if name != "step"} == {torch.bfloat16}


def test_parameters_without_gradient_or_values_are_left_out(device) -> None:
    used, unused, empty = (nn.Parameter(torch.ones(size, device=device)) for size in (3, 3, 0))
    optimizer = HybridAdam([used, unused, empty], lr=0.1)
    used.grad, empty.grad = torch.ones_like(used), torch.ones_like(empty)
    optimizer.step()
    assert used.ne(1).all()
    assert unused.eq(1).all()
    assert set(optimizer.state) == {used}
    # from here on the two are at different steps
    unused.grad = torch.ones_like(unused)
    optimizer.step()
    assert [optimizer.state[one]["step"] for one in (used, unused)] == [2, 1]
    assert torch.allclose(unused, torch.full_like(unused, 0.9))


def test_shards_that_share_a_call_change_nothing(device, monkeypatch) -> None:
    runs = []
    for at_once in (1, 8, 2**26):
        monkeypatch.setattr(hybrid_adam, "VALUES_AT_ONCE", at_once)
        parameters = shards(device)
        train(HybridAdam(parameters, lr=0.1), parameters, dtype=torch.bfloat16)
        runs.append(parameters)
    for others in runs[1:]:
        assert all(map(torch.equal, runs[0], others))


def test_a_call_takes_so_many_values_at_most(monkeypatch) -> None:
    """What torch's update copies of a call's gradients is bounded."""
    monkeypatch.setattr(hybrid_adam, "VALUES_AT_ONCE", 100)
    parameters = [nn.Parameter(torch.zeros(size)) for size in (40, 40, 40, 300, 60, 40)]
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = HybridAdam(parameters)
    batches = [list(map(len, batch)) for batch in optimizer._batches(optimizer.param_groups[0])]
    assert batches == [[40, 40], [40], [300], [60, 40]]


def test_a_call_takes_gradients_of_one_dtype(device) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.bfloat16]
    runs = []
    for shared in (True, False):
        parameters = shards(device)
        optimizers = [HybridAdam(of, lr=0.1) for of in ([parameters] if shared else [[each] for each in parameters])]
        for step in range(2):
            for number, (parameter, dtype) in enumerate(zip(parameters, dtypes, strict=True)):
                torch.manual_seed(10 * step + number)
                values, gradient = parameter.data, torch.randn(len(parameter)).to(device, dtype)
                parameter.data = gradient
                parameter.grad = gradient
                parameter.data = values
            for optimizer in optimizers:
                for batch in optimizer._batches(optimizer.param_groups[0]):
                    assert len({parameter.grad.dtype for parameter in batch}) == 1
                optimizer.step()
        runs.append(parameters)
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_amaxes_are_told_of_what_one_pass_updated(amsgrad, device, monkeypatch) -> None:
    parameters = shards(device)
    optimizer = HybridAdam(parameters, amsgrad=amsgrad)
    assert not optimizer.amaxes
    if device.type == "cpu" and not amsgrad:
        monkeypatch.setattr(hybrid_adam, "_in_one_pass", lambda group, parameter: True)
    train(optimizer, parameters)
    told = [] if amsgrad else parameters
    assert list(optimizer.amaxes) == told
    for parameter in told:
        assert optimizer.amaxes[parameter] == parameter.abs().max()
    optimizer.step()  # without gradients
    assert not optimizer.amaxes


def test_groups_keep_their_own_settings(device) -> None:
    fast, slow = (nn.Parameter(torch.ones(4, device=device)) for _ in range(2))
    optimizer = HybridAdam([{"params": [fast]}, {"params": [slow], "lr": torch.tensor(0.0)}], lr=0.1)
    for parameter in (fast, slow):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert fast.ne(1).all()
    assert slow.eq(1).all()


def test_each_group_decays_by_its_own_rule(device) -> None:
    kinds = {True: AdamW, False: Adam}
    ours, theirs = ([nn.Parameter(torch.ones(4, device=device)) for _ in kinds] for _ in range(2))
    optimizer = HybridAdam(
        [{"params": [one], "decoupled_weight_decay": kind} for one, kind in zip(ours, kinds, strict=True)],
        lr=0.1,
        weight_decay=0.5,
    )
    optimizers = [kind([one], lr=0.1, weight_decay=0.5) for one, kind in zip(theirs, kinds.values(), strict=True)]
    for _ in range(2):
        for parameter in (*ours, *theirs):
            parameter.grad = torch.full_like(parameter, -1.0)
        for each in (optimizer, *optimizers):
            each.step()
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected)
    assert not torch.allclose(*ours)


def test_one_pass_takes_all_values_at_once_and_torch_a_bounded_number(monkeypatch) -> None:
    monkeypatch.setattr(hybrid_adam, "VALUES_AT_ONCE", 100)
    of = [nn.Parameter(torch.zeros(60)) for _ in range(3)]
    for each in of:
        each.grad = torch.zeros(60)
    optimizer = HybridAdam(of)
    for in_one_pass, count in ((True, 1), (False, 3)):
        monkeypatch.setattr(hybrid_adam, "_in_one_pass", lambda *_, found=in_one_pass: found)
        assert len(list(optimizer._batches(optimizer.param_groups[0]))) == count


def test_a_call_takes_parameters_of_one_dtype() -> None:
    of = [nn.Parameter(torch.zeros(4, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    for each in of:
        values, each.data = each.data, torch.zeros(4, dtype=torch.bfloat16)
        each.grad = torch.zeros(4, dtype=torch.bfloat16)  # of all, as Gemini gives them
        each.data = values
    optimizer = HybridAdam(of)
    batches = list(optimizer._batches(optimizer.param_groups[0]))
    assert [[each.dtype for each in batch] for batch in batches] == [[torch.float32] * 2, [torch.bfloat16]]


@pytest.mark.parametrize("default", [torch.float64, torch.float16])
def test_steps_and_scales_are_fp32_under_any_default_dtype(default, device) -> None:
    found = []
    for dtype in (torch.float32, default):
        of = shards(device)
        torch.set_default_dtype(dtype)
        try:
            for each in of:
                each.grad = torch.full_like(each, 3e4)
            optimizer = HybridAdam(of, lr=0.1)
            optimizer.step(div_scale=70000.0)  # which FP16 does not hold
            shards_of = optimizer.next_shards(optimizer.param_groups[0], of, [each.grad for each in of])
        finally:
            torch.set_default_dtype(torch.float32)
        assert {each.dtype for each in shards_of.steps} == {torch.float32}
        found.append(of)
    assert all(map(torch.equal, *found))


def test_a_closure_gives_what_step_returns() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = HybridAdam([parameter], lr=0.1)

    def closure() -> float:
        loss = parameter.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert parameter.ne(1).all()


def test_values_out_of_range_are_refused() -> None:
    parameters = shards(torch.device("cpu"))
    for name, value in {"lr": -1.0, "eps": -1.0, "weight_decay": -1.0, "betas": (0.9, 1.0)}.items():
        with pytest.raises(ValueError, match=name):
            HybridAdam(parameters, **{name: value})


@pytest.mark.parametrize("kind", [AdamW, Adam])
def test_torchs_optimizer_turns_into_it_with_its_settings(kind, device) -> None:
    settings = {"lr": 0.1, "betas": (0.8, 0.9), "eps": 1e-4, "weight_decay": 0.2}
    expected, found = shards(device), shards(device)
    train(kind(expected, fused=True, **settings), expected)
    optimizer = kind(found, **settings)
    groups = optimizer.param_groups[0]
    HybridAdam.convert_in_place(optimizer)
    assert type(optimizer) is HybridAdam
    assert optimizer.param_groups[0] is groups
    train(optimizer, found, dtype=torch.bfloat16)
    assert_same(expected, found)


def test_a_schedule_made_before_goes_on_without_a_warning() -> None:
    runs = []
    for turned in (False, True):
        parameters = shards(torch.device("cpu"))
        optimizer = AdamW(parameters, lr=0.1, fused=True)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        if turned:
            HybridAdam.convert_in_place(optimizer)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(3):
                train(optimizer, parameters, range(step, step + 1))
                schedule.step()
        assert optimizer.param_groups[0]["lr"] == 0.0125
        runs.append(parameters)
    assert all(map(torch.equal, *runs))


def test_hooks_on_the_step_are_called() -> None:
    parameters = shards(torch.device("cpu"))
    optimizer = AdamW(parameters)
    HybridAdam.convert_in_place(optimizer)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(optimizer, parameters)
    assert len(calls) == STEPS


def test_hooks_are_called_around_the_step_of_a_class_that_torch_has_not_seen() -> None:
    calls: list[str] = []

    class Fresh(HybridAdam):
        def step(self, closure: Any = None, div_scale: float = -1) -> None:
            calls.append("step")

    optimizer = AdamW(shards(torch.device("cpu")))
    Fresh.convert_in_place(optimizer)
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "step", "after"]


def test_the_scale_goes_to_where_the_parameters_are(monkeypatch) -> None:
    parameter = nn.Parameter(torch.empty(3, device="meta"))
    parameter.grad = torch.empty(3, device="meta")
    seen = []
    monkeypatch.setattr(hybrid_adam, "update_by_torch", lambda shards, rates, divisor, *_: seen.append(divisor.device))
    optimizer = HybridAdam([parameter])
    for scale in (torch.tensor(2.0), 2.0):
        optimizer.step(div_scale=scale)
    assert seen == [torch.device("meta")] * 2


def test_what_cannot_turn_is_refused_with_what_to_give() -> None:
    parameters = shards(torch.device("cpu"))

    class Own(AdamW):
        pass

    for other in (SGD(parameters, lr=0.1), Own(parameters)):
        with pytest.raises(TypeError, match=r"give torch.optim.AdamW, torch.optim.Adam or fp8booster"):
            HybridAdam.convert_in_place(other)
    used = AdamW(parameters)
    train(copy.copy(used), parameters, range(1))
    with pytest.raises(ValueError, match="has taken steps"):
        HybridAdam.convert_in_place(used)
    with pytest.raises(ValueError, match="differentiable=False"):
        HybridAdam.convert_in_place(AdamW(parameters, differentiable=True))
