"""AdamW that updates in backward over several micro-batches: as with gradients added up, in less memory."""

from __future__ import annotations

import functools
import math
import statistics

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.config import GRADIENT_ACCUMULATIONS as KINDS
from fp8booster.kernels.group_codes import GROUP, GroupCodes
from fp8booster.optim import AdamW, adamw, gradient_sums
from fp8booster.optim.gradient_sums import GradientSum, added, value_of
from fp8booster.optim.used_gradient import UsedGradient
from tests.optim.test_adamw import SETTINGS, model

N = 4


def learn(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int, micro_batches: int = N) -> list[float]:
    """The loss of each step; gradients of `micro_batches` parts of a batch are added up."""
    parameter = next(network.parameters())
    generator, losses = torch.Generator().manual_seed(7), []
    target = torch.randn(64, 32, generator=generator)
    for _ in range(steps):
        batch = torch.randn(96, 64, generator=generator)
        of_step = []
        for x in batch.chunk(micro_batches):
            y = torch.tanh(x @ target / 8).to(parameter.device)
            loss = F.mse_loss(network(x.to(parameter.device, parameter.dtype)).float(), y) / micro_batches
            loss.backward()
            of_step.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(of_step))
    return losses


def lean(parameters, kind: str = "8-bit", micro_batches: int = N) -> AdamW:
    options = {"update_in_backward": True, "micro_batches": micro_batches, "gradient_accumulation": kind}
    return AdamW(parameters, **SETTINGS, **options)


def nbytes(total: GradientSum) -> int:
    return sum(each.nbytes for each in total) if isinstance(total, GroupCodes) else total.nbytes


@functools.cache
def learned_in_fp32(device: torch.device) -> list[float]:
    """With gradients that PyTorch adds up."""
    plain = model(torch.float32, device)
    return learn(plain, AdamW(plain.parameters(), **SETTINGS), 60)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_learns_as_with_gradients_added_up_in_fp32(kind, dtype, device) -> None:
    expected, ours = learned_in_fp32(device), model(dtype, device)
    found = learn(ours, lean(ours.parameters(), kind), 60)
    assert expected[-1] < 0.5 * expected[0]
    within = 0.01 if dtype is torch.float32 else 0.03
    assert found == pytest.approx(expected, rel=2 * within)
    assert statistics.fmean(found[-10:]) == pytest.approx(statistics.fmean(expected[-10:]), rel=within)


def test_sums_of_32_bits_are_those_of_fp32_gradients(device) -> None:
    plain, ours = model(torch.float32, device), model(torch.float32, device)
    assert learn(plain, AdamW(plain.parameters(), **SETTINGS), 5) == learn(ours, lean(ours.parameters(), "32-bit"), 5)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(one, other)


def test_one_micro_batch_has_the_bits_of_updates_in_backward(device) -> None:
    one, other = model(torch.bfloat16, device), model(torch.bfloat16, device)
    as_ever = AdamW(one.parameters(), **SETTINGS, update_in_backward=True)
    assert learn(one, as_ever, 3, 1) == learn(other, lean(other.parameters(), "16-bit", 1), 3, 1)


@pytest.mark.parametrize(("kind", "allowed"), [("32-bit", 4), ("16-bit", 2), ("8-bit", 1 + 4 / GROUP)])
def test_between_micro_batches_no_gradient_is_there_but_the_sums(kind, allowed, device) -> None:
    weight = nn.Parameter(torch.ones(512, 256, dtype=torch.bfloat16, device=device))
    optimizer = lean([weight], kind, 3)
    before = weight.detach().clone()
    for _ in range(2):
        weight.square().sum().backward()
        assert isinstance(weight.grad, UsedGradient)
        assert torch.equal(weight, before)
    count, total = optimizer.gradient_sums[weight]
    assert count == 2
    assert nbytes(total) == allowed * weight.numel()
    weight.square().sum().backward()
    assert not optimizer.gradient_sums
    assert (weight != before).all()


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_autograd_gives_one_gradient_have_sums_of_their_own(kind, device) -> None:
    dtype = (
        torch.bfloat16 if kind == "16-bit" else torch.float32
    )  # of which the sum is, so that it is added to in place
    weights = [nn.Parameter(torch.ones(16, GROUP, dtype=dtype, device=device)) for _ in range(2)]

    def backward() -> None:
        (weights[0].view(-1) + weights[1].view(-1)).square().sum().backward()

    backward()
    assert weights[0].grad.data_ptr() == weights[1].grad.data_ptr()
    for weight in weights:
        weight.grad = None
    optimizer = lean(weights, kind)
    backward()
    backward()
    for weight in weights:
        count, total = optimizer.gradient_sums[weight]
        assert count == 2
        torch.testing.assert_close(value_of(total), torch.full((weight.numel(),), 8.0, device=device))


def test_step_updates_what_got_fewer_gradients_and_ends_an_accumulation(device) -> None:
    weights = [nn.Parameter(torch.ones(300, device=device)) for _ in range(2)]
    optimizer = lean(weights)
    for number in range(N):
        sum(each.sum() for each in weights[: 1 + number % 2]).backward()
    assert (weights[0] != 1).all()
    assert (weights[1] == 1).all()
    optimizer.step()
    assert (weights[1] != 1).all()
    assert [optimizer.state[each]["step"] for each in weights] == [1, 1]
    assert set(optimizer.amaxes) == {weights[1]}
    now = weights[0].detach().clone()
    weights[0].sum().backward()
    assert torch.equal(weights[0], now)
    optimizer.step()
    assert (weights[0] != now).all()
    assert not optimizer.gradient_sums


@pytest.mark.parametrize("is_a_tensor", [False, True])
@pytest.mark.parametrize("scale", [8.0, 0.125])
@pytest.mark.parametrize("kind", KINDS)
def test_step_divides_what_waits_for_further_micro_batches_too(kind, scale, is_a_tensor, device) -> None:
    """With an eps that tells gradients of other sizes apart, as moments alone do not."""
    settings, found = {"lr": 0.1, "weight_decay": 0.0, "eps": 1.0}, []
    for divisor in (1.0, scale):
        weights = [nn.Parameter(torch.zeros(GROUP, device=device)) for _ in range(2)]
        optimizer = AdamW(weights, **settings, update_in_backward=True, micro_batches=3, gradient_accumulation=kind)
        for _ in range(2):
            (weights[0] * (0.5 * divisor)).sum().backward()
        weights[1].grad = torch.full_like(weights[1], 2 * divisor)
        options = {"div_scale": torch.tensor(divisor, device=device) if is_a_tensor else divisor}
        optimizer.step(**(options if divisor != 1 else {}))
        assert all(weight.grad is None for weight in weights)
        assert not optimizer.gradient_sums
        found.append(torch.stack([weight.detach() for weight in weights]))
    torch.testing.assert_close(found[1], found[0], rtol=0.01, atol=0)
    expected = torch.tensor([[1.0], [2.0]], device=device)
    torch.testing.assert_close(found[0], (-0.1 * expected / (expected + 1)).expand_as(found[0]), rtol=0.02, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_gradient_is_added_in_fp32(kind, device) -> None:
    """One is lost beside 256 in BF16."""
    gradients = [torch.full((GROUP,), value, dtype=torch.bfloat16, device=device) for value in (256.0, 1.0)]
    total = added(None, gradients[0].clone(), kind)
    assert torch.equal(value_of(total, gradients[1]), torch.full((GROUP,), 257.0, device=device))
    assert torch.equal(value_of(total), torch.full((GROUP,), 256.0, device=device))
    for dtype in (torch.bfloat16, torch.float32):
        assert value_of(total, dtype=dtype).dtype is dtype
        assert value_of(total, gradients[1], dtype).dtype is dtype
    weights = [nn.Parameter(torch.zeros(GROUP, dtype=torch.bfloat16, device=device)) for _ in range(2)]
    optimizers = [lean(weights[:1], kind, 2), AdamW(weights[1:], **SETTINGS)]
    for gradient in gradients:
        (weights[0] * gradient).sum().backward()
    weights[1].grad = torch.full_like(weights[1], 257.0, dtype=torch.bfloat16)  # 256
    optimizers[1].update_shards(
        optimizers[1].param_groups[0], weights[1:], [torch.full((GROUP,), 257.0, device=device)]
    )
    first, second = (each.state[weight] for each, weight in zip(optimizers, weights, strict=True))
    assert torch.equal(first["exp_avg"], second["exp_avg"])


@pytest.mark.parametrize(
    ("kind", "dtypes"),
    [
        ("32-bit", (torch.bfloat16, torch.float32, torch.float32)),
        ("16-bit", (torch.bfloat16, torch.bfloat16, torch.bfloat16)),
    ],
)
def test_sums_have_the_dtype_of_their_kind(kind, dtypes, device) -> None:
    total: GradientSum | None = None
    for dtype in dtypes:
        total = added(total, torch.ones(4, dtype=torch.bfloat16, device=device), kind)
        assert total.dtype is dtype
    assert added(None, torch.ones(4, dtype=torch.float32, device=device), kind).dtype is (
        torch.float32 if kind == "32-bit" else torch.bfloat16
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_may_lie_transposed(kind, device) -> None:
    values = [torch.randn(GROUP, 4, device=device).mul_(8).round_().bfloat16() for _ in range(3)]
    sums = []
    for lay in (lambda each: each.clone(), lambda each: each.t().contiguous().t()):
        total: GradientSum | None = None
        for each in values[:2]:
            total = added(total, lay(each), kind)
        sums.append(value_of(total, lay(values[2])))
    assert torch.equal(*sums)
    torch.testing.assert_close(sums[0], sum(each.float() for each in values).flatten(), rtol=0.03, atol=0.3)


def test_a_sum_of_16_bits_may_go_on_in_8(device) -> None:
    values = torch.randn(4, GROUP, device=device).bfloat16()
    total = added(values.t().contiguous().t(), values.clone(), "8-bit")
    torch.testing.assert_close(value_of(total), 2 * values.float().flatten(), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_observers_are_told_of_the_models_parameter(kind, device, monkeypatch) -> None:
    """Which an engine may have put another tensor in the place of."""
    weight, model_parameter = nn.Parameter(torch.ones(GROUP, device=device)), nn.Parameter(torch.ones(GROUP))
    optimizer = lean([weight], kind, 2)
    optimizer.parameters = {weight: model_parameter}
    asked = {"sum": [], "update": []}
    done: list[str] = []

    def observer(name: str):
        def observe(parameter: int, sample):
            asked[name].append(parameter)
            sample()
            return lambda: done.append(name)

        return observe

    monkeypatch.setattr(gradient_sums, "observers", [observer("sum"), lambda *_: None])
    monkeypatch.setattr(adamw, "observers", [observer("update"), lambda *_: None])
    for _ in range(2):
        weight.sum().backward()
    assert asked["update"] == [id(model_parameter)]
    assert asked["sum"] == ([id(model_parameter)] if kind == "8-bit" else [])
    assert done == [*(["sum"] if kind == "8-bit" else []), "update"]


def test_zero_grad_forgets_what_was_added_up(device) -> None:
    weight = nn.Parameter(torch.ones(300, device=device))
    optimizer = lean([weight])
    for _ in range(N - 1):
        (weight * torch.nan).sum().backward()
    optimizer.zero_grad()
    optimizer.step()
    for _ in range(N):
        weight.sum().backward()
    assert (weight < 1).all()
    assert optimizer.state[weight]["step"] == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [0, N - 1])
def test_a_gradient_that_is_not_finite_in_any_micro_batch_skips_its_blocks(kind, bad, device) -> None:
    weight = nn.Parameter(torch.ones(600, device=device))
    optimizer = lean([weight], kind)
    for number in range(N):
        gradient = torch.ones_like(weight)
        gradient[3] = math.inf if number == bad else 1.0
        (weight * gradient).sum().backward()
    assert optimizer.skipped_blocks == 1
    assert (weight[:256] == 1).all()
    assert (weight[256:] != 1).all()


def test_fp8_layers_see_the_updates_of_micro_batches(device) -> None:
    losses = []
    for convert in (False, True):
        network = model(torch.bfloat16, device)
        if convert:
            convert_to_fp8(network, FP8Config(always=True))
        losses.append(learn(network, lean(network.parameters()), 60))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1][-1] < 0.5 * losses[1][0]


def test_states_are_neither_saved_nor_loaded_in_the_midst_of_an_accumulation() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = lean([weight])
    state = optimizer.state_dict()
    weight.sum().backward()
    for call, done in (
        (optimizer.state_dict, "saved"),
        (optimizer.full_state_dict, "saved"),
        (lambda: optimizer.load_state_dict(state), "loaded"),
    ):
        with pytest.raises(ValueError, match=f"cannot be {done} .* 1 parameters wait .* step.. or zero_grad.. first"):
            call()
    optimizer.step()
    assert optimizer.state_dict()["state"][0]["step"] == 1


def test_updates_in_backward_go_by_the_groups_of_a_loaded_state_dict() -> None:
    weight = nn.Parameter(torch.ones(300))
    optimizer = AdamW([weight], lr=1e-3, weight_decay=0.0, update_in_backward=True)
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.param_groups[0]["lr"] = 0.5  # as a schedule sets it
    weight.sum().backward()
    assert (weight == 0.5).all()


def test_accumulations_that_cannot_be_are_refused() -> None:
    weight = nn.Parameter(torch.ones(2))
    for count in (2, 4):
        with pytest.raises(ValueError, match=f"micro_batches={count} goes with update_in_backward=True; without it"):
            AdamW([weight], micro_batches=count)
    with pytest.raises(ValueError, match="micro_batches is 0; give at least 1"):
        lean([weight], micro_batches=0)
    with pytest.raises(ValueError, match="gradient_accumulation is 'fp8'; use '32-bit' or '16-bit' or '8-bit'"):
        lean([weight], "fp8")
