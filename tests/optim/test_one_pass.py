"""A step in one pass leaves parameters and states as the optimizer's own step does, and is left where it cannot."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from fp8booster.optim import AdamW as AdamW8bit
from fp8booster.optim import HybridAdam, one_pass
from fp8booster.optim.steps import divisor_on

SIZES = (7, 1, 300, 64)

CLOSE = {"rtol": 2e-5, "atol": 5e-6}
"""On a GPU torch's fused step takes 1 - 0.999 in FP32, 1.3e-5 off, and the steps here are of 0.1."""


def parameters(device: torch.device | str = "cpu") -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(device)) for size in SIZES]


def groups(of: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": of[:2]}, {"params": of[2:], "lr": 0.3, "weight_decay": 0.0}]


def step(optimizer: Any, divisor: torch.Tensor | None = None) -> dict[nn.Parameter, torch.Tensor]:
    """Step with what has a gradient; the amax of each."""
    amaxes: dict[nn.Parameter, torch.Tensor] = {}
    for group in optimizer.param_groups:
        taken = [each for each in group["params"] if each.grad is not None]
        found = one_pass.step_group(optimizer, group, taken, [each.grad for each in taken], divisor)
        amaxes.update(zip(taken, found, strict=True))
    return amaxes


def give_gradients(of: list[nn.Parameter], step: int) -> None:
    torch.manual_seed(100 + step)
    for parameter in of:
        parameter.grad = torch.randn(parameter.numel()).to(parameter.device)
    if step == 1:
        of[1].grad = None


@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.3, "betas": (0.5, 0.7)}, {"lr": torch.tensor(0.1)}])
def test_parameters_and_states_are_those_of_the_optimizer(kind, options, device) -> None:
    theirs, ours = parameters(device), parameters(device)
    expected = kind(groups(theirs), fused=True, **({"lr": 0.1} | options))
    found = kind(groups(ours), fused=True, **({"lr": 0.1} | options))
    assert one_pass.why_not(found) is None
    for number in range(4):
        for each in (theirs, ours):
            give_gradients(each, number)
            if number == 0:
                each[3].grad = None  # it begins when another of its group has states already
        expected.step()
        amaxes = step(found)
        assert amaxes.keys() == {one for one in ours if one.grad is not None}
        for one, amax in amaxes.items():
            assert torch.equal(amax, one.detach().abs().max())
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        states = expected.state[one], found.state[other]
        assert states[0].keys() == states[1].keys()
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value, **CLOSE)
    # each goes on from the other's states
    found.load_state_dict(copy.deepcopy(expected.state_dict()))
    give_gradients(ours, 9)
    step(found)
    expected.load_state_dict(copy.deepcopy(found.state_dict()))
    give_gradients(theirs, 9)
    expected.step()


@pytest.mark.parametrize("kind", [Adam, AdamW, HybridAdam])
def test_a_group_that_does_not_say_how_it_decays_does_as_its_optimizer(kind, device) -> None:
    """As of a checkpoint that an earlier torch wrote."""
    found = []
    for says in (True, False):
        of = parameters(device)
        options = {"adamw_mode": False} if kind is HybridAdam else {"fused": True}
        optimizer = kind(groups(of), lr=0.1, weight_decay=0.5, **options)
        if not says:
            for group in optimizer.param_groups:
                del group["decoupled_weight_decay"]
        give_gradients(of, 0)
        step(optimizer)
        found.append(of)
    assert all(map(torch.equal, *found))


def test_gradients_are_divided(device) -> None:
    theirs, ours = parameters(device), parameters(device)
    expected, found = (AdamW(groups(of), lr=0.1, fused=True) for of in (theirs, ours))
    give_gradients(theirs, 0)
    for parameter in theirs:
        parameter.grad /= 8
    give_gradients(ours, 0)
    expected.step()
    step(found, torch.tensor(8.0))
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)


def test_gradients_need_not_have_the_dtype_of_the_parameters(device) -> None:
    """FP32 parameters with BF16 gradients step as if these were FP32, and what `.grad` holds is left alone."""
    theirs, ours = parameters(device), parameters(device)
    expected, found = (AdamW(groups(of), lr=0.1, fused=True) for of in (theirs, ours))
    give_gradients(theirs, 0)
    narrow = {one: other.grad.bfloat16() for one, other in zip(ours, theirs, strict=True)}
    for one, other in zip(ours, theirs, strict=True):
        other.grad = narrow[one].float()
    ours[0].grad = own = torch.full_like(ours[0], 7.0)
    expected.step()
    for group in found.param_groups:
        one_pass.step_group(found, group, group["params"], [narrow[each] for each in group["params"]])
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        assert found.state[other]["exp_avg"].dtype is torch.float32
    assert ours[0].grad is own
    assert torch.equal(own, torch.full_like(own, 7.0))
    assert all(parameter.grad is None for parameter in ours[1:])


@pytest.mark.parametrize("options", [{}, {"bias_correction": False}, {"adamw_mode": False, "weight_decay": 0.3}])
def test_a_hybrid_adam_is_stepped_as_it_steps_by_itself(options, device) -> None:
    theirs, ours = parameters(device), parameters(device)
    expected, found = (HybridAdam(groups(of), lr=0.1, **options) for of in (theirs, ours))
    assert one_pass.why_not(found) is None
    for number in range(3):
        for each in (theirs, ours):
            give_gradients(each, number)
            if number == 0:
                each[3].grad = None  # it begins when another of its group has states already
        expected.step()
        amaxes = step(found)
        assert all(torch.equal(amax, one.detach().abs().max()) for one, amax in amaxes.items())
    for one, other in zip(theirs, ours, strict=True):
        assert torch.equal(one, other)
        assert expected.state[one].keys() == found.state[other].keys()
        assert expected.state[one]["step"] == found.state[other]["step"]


def test_a_group_without_gradients_is_left_alone() -> None:
    optimizer = AdamW(parameters(), fused=True)
    assert one_pass.step_group(optimizer, optimizer.param_groups[0], [], []) == []
    assert not optimizer.state


class Mine(AdamW):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (SGD, "SGD is not torch's Adam or AdamW, nor fp8booster's HybridAdam or AdamW"),
        (lambda of: Mine(of, fused=True), "Mine is not torch's Adam or AdamW, nor fp8booster's HybridAdam or AdamW"),
        (AdamW, "it was not made with fused=True"),  # on the CPU torch's default is as good
        (lambda of: AdamW(of, foreach=True), "it was not made with fused=True"),
        (lambda of: AdamW(of, fused=True, amsgrad=True), "it was made with amsgrad=True"),
        (lambda of: AdamW(of, fused=True, maximize=True), "it was made with maximize=True"),
        (
            lambda of: AdamW(
                of, torch.tensor(0.1), (torch.tensor(0.9), torch.tensor(0.99)), fused=True, capturable=True
            ),
            "its betas are tensors",
        ),
    ],
)
def test_others_step_by_themselves_and_say_why(make, reason) -> None:
    assert one_pass.why_not(make(parameters())) == reason


def test_hooks_see_the_optimizers_own_step() -> None:
    optimizer = AdamW(parameters(), fused=True)
    for register in (
        optimizer.register_step_pre_hook,
        optimizer.register_step_post_hook,
        register_optimizer_step_pre_hook,
        register_optimizer_step_post_hook,
    ):
        handle = register(lambda *_: None)
        assert "hooks" in one_pass.why_not(optimizer)
        handle.remove()
        assert one_pass.why_not(optimizer) is None


def test_hooks_that_look_at_no_parameters_do_not_count() -> None:
    optimizer = AdamW(parameters(), fused=True)

    def counts(*_: object) -> None:
        pass

    setattr(counts, one_pass.COUNTS_STEPS, True)
    optimizer.register_step_post_hook(counts)

    def profiles(*_: object) -> None:
        pass

    profiles.__module__ = "torch.profiler"
    optimizer.register_step_pre_hook(profiles)
    assert one_pass.why_not(optimizer) is None


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable"])
def test_an_option_of_any_group_is_seen(option) -> None:
    of = parameters()
    for kind in (lambda groups: AdamW(groups, fused=True), HybridAdam, AdamW8bit):
        optimizer = kind([{"params": of[:2]}, {"params": of[2:]}])
        optimizer.param_groups[1][option] = True
        assert one_pass.why_not(optimizer) == f"it was made with {option}=True"


@pytest.mark.parametrize(
    ("chosen", "on_gpu", "taken"),
    [
        ({}, (True, True), True),
        ({}, (True, False), False),
        ({"fused": False}, (True, True), False),
        ({"foreach": False}, (True, True), False),
    ],
)
def test_a_group_is_left_to_torch_where_nobody_chose_and_all_of_it_is_on_a_gpu(chosen, on_gpu, taken) -> None:
    group = {"fused": None, "foreach": None, "params": [SimpleNamespace(is_cuda=each) for each in on_gpu]} | chosen
    assert one_pass._left_to_torch(group) is taken


@pytest.mark.parametrize("by_itself", [False, True])
def test_parameters_of_several_devices_keep_their_order(by_itself, monkeypatch) -> None:
    """What stands in for a device's update tells sizes for amaxes."""
    cpu, meta = torch.device("cpu"), torch.device("meta")
    devices = (cpu, meta, cpu, meta)
    of = [nn.Parameter(torch.zeros(size, device=device)) for size, device in zip(SIZES, devices, strict=True)]
    gradients = [torch.zeros(size, device=device) for size, device in zip(SIZES, devices, strict=True)]
    seen = []

    def update_shards(group: Any, here: Any, gradients: Any, divisor: torch.Tensor) -> torch.Tensor:
        assert [each.device for each in gradients] == [each.device for each in here]
        assert [each.numel() for each in gradients] == [each.numel() for each in here]
        seen.append((here[0].device, divisor.device))
        return torch.tensor([float(each.numel()) for each in here])

    optimizer = AdamW8bit(of)
    monkeypatch.setattr(optimizer, "update_shards", update_shards)
    if by_itself:
        for parameter, gradient in zip(of, gradients, strict=True):
            parameter.grad = gradient
        optimizer.step(div_scale=2.0)
        found = [optimizer.amaxes[each] for each in of]
    else:
        found = one_pass.step_group(optimizer, optimizer.param_groups[0], of, gradients, torch.tensor(2.0))
    assert [float(each) for each in found] == list(map(float, SIZES))
    assert seen == [(cpu, cpu), (meta, meta)]


@pytest.mark.gpu
def test_on_a_gpu_torchs_default_is_taken_and_what_was_chosen_is_not() -> None:
    assert one_pass.why_not(AdamW(parameters("cuda"))) is None
    assert "fused=True" in one_pass.why_not(AdamW(parameters("cuda"), fused=False))
    assert "fused=True" in one_pass.why_not(AdamW(parameters("cuda"), foreach=True))
    theirs, ours = parameters("cuda"), parameters("cuda")
    expected, found = AdamW(theirs, lr=0.1), AdamW(ours, lr=0.1)
    for number in range(3):
        give_gradients(theirs, number)
        give_gradients(ours, number)
        expected.step()
        step(found)
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(one, other, **CLOSE)
        assert found.state[other]["step"].device == expected.state[one]["step"].device


def test_a_number_that_divides_is_made_where_it_divides() -> None:
    meta = torch.device("meta")
    assert divisor_on(meta, None) is divisor_on(meta, -1) is None
    with _CopiesToDevices() as copies:
        made = divisor_on(meta, 2.0)
    assert (made.device, made.dtype, made.shape) == (meta, torch.float32, ())
    assert not copies.seen
    assert divisor_on(torch.device("cpu"), torch.tensor(3.0)) == 3.0


class _CopiesToDevices(TorchDispatchMode):
    """Sees what is copied, for which a host waits where the memory is not pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default):
            self.seen.append(args)
        return function(*args, **(kwargs or {}))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [AdamW8bit, HybridAdam])
def test_the_host_waits_for_no_divisor(kind: Any) -> None:
    of = parameters("cuda")
    optimizer = kind(of, lr=0.1)
    for number in range(3):
        give_gradients(of, number)
        torch.cuda.set_sync_debug_mode("error" if number else "default")  # the first step makes states and tables
        try:
            optimizer.step(div_scale=2.0)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("fails", [False, True])
def test_when_all_is_updated_the_optimizer_steps_over_nothing_and_has_its_parameters_again(fails: bool) -> None:
    stepped = []
    inner = SimpleNamespace(param_groups=[{"params": [1]}, {"params": [2, 3]}])

    def take() -> None:
        stepped.append([group["params"] for group in inner.param_groups])
        if fails:
            raise ArithmeticError

    inner.step = take
    if fails:
        with pytest.raises(ArithmeticError):
            one_pass.step_of_nothing(inner)
    else:
        one_pass.step_of_nothing(inner)
    assert stepped == [[[], []]]
    assert [group["params"] for group in inner.param_groups] == [[1], [2, 3]]
