"""AdamW with 8-bit moments learns as torch's does, resumes bit for bit, and exchanges states with torch's."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.optim import AdamW
from tests.distributed import ranks

SETTINGS = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.05}


def model(dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 32))
    return layers.to(device, dtype)


def learn(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[float]:
    parameter = next(network.parameters())
    generator, losses = torch.Generator().manual_seed(7), []
    target = torch.randn(64, 32, generator=generator)
    for step in range(first + steps):
        x = torch.randn(96, 64, generator=generator)
        if step < first:
            continue
        y = torch.tanh(x @ target / 8).to(parameter.device)
        loss = F.mse_loss(network(x.to(parameter.device, parameter.dtype)).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_it_learns_as_fp32_states_do(device) -> None:
    plain, ours, narrow = (model(dtype, device) for dtype in (torch.float32, torch.float32, torch.bfloat16))
    expected = learn(plain, torch.optim.AdamW(plain.parameters(), **SETTINGS), 60)
    found = learn(ours, AdamW(ours.parameters(), **SETTINGS), 60)
    assert expected[-1] < 0.5 * expected[0]
    assert found == pytest.approx(expected, rel=0.01)
    assert learn(narrow, AdamW(narrow.parameters(), **SETTINGS), 60) == pytest.approx(expected, rel=0.03)


def test_updates_too_small_for_bf16_are_not_lost(device) -> None:
    weights = [nn.Parameter(torch.ones(256, dtype=torch.bfloat16, device=device)) for _ in range(2)]
    optimizers = [
        kind([each], lr=1e-4, weight_decay=0.0) for kind, each in zip((AdamW, torch.optim.AdamW), weights, strict=True)
    ]
    for _ in range(100):
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
    torch.testing.assert_close(weights[0].float(), torch.full_like(weights[0], 0.99).float(), atol=0.004, rtol=0)
    assert (weights[1] == 1).all()


def test_weights_that_a_mask_sets_to_zero_learn_on(device) -> None:
    network = model(torch.bfloat16, device)
    optimizer = AdamW(network.parameters(), **SETTINGS)
    for step in range(5):
        learn(network, optimizer, 1, first=step)
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.mul_(torch.rand_like(parameter) > 0.5)
    learn(network, optimizer, 1, first=5)
    assert all(parameter.isfinite().all() for parameter in network.parameters())


def test_updates_in_backward_are_those_of_steps(device) -> None:
    steps, backward = model(torch.bfloat16, device), model(torch.bfloat16, device)
    optimizer = AdamW(backward.parameters(), **SETTINGS, update_in_backward=True)
    assert learn(steps, AdamW(steps.parameters(), **SETTINGS), 5) == learn(backward, optimizer, 5)
    for one, other in zip(steps.parameters(), backward.parameters(), strict=True):
        assert torch.equal(one, other)
    backward(torch.ones(1, 64, dtype=torch.bfloat16, device=device)).sum().backward()
    assert all(parameter.grad is None for parameter in backward.parameters())


def test_a_parameter_that_was_frozen_at_first_is_updated_in_backward() -> None:
    frozen, trained = nn.Parameter(torch.ones(4), requires_grad=False), nn.Parameter(torch.ones(4))
    optimizer = AdamW([frozen, trained], update_in_backward=True)
    (frozen * trained).sum().backward()
    assert (frozen == 1).all()
    assert not frozen.requires_grad
    frozen.requires_grad_(True)
    (frozen * trained).sum().backward()
    assert (frozen < 1).all()
    assert frozen.grad is None
    assert optimizer.state[frozen]["step"] == 1


@ranks(2)
def test_updates_in_backward_are_refused_under_ddp_which_reduces_gradients_later() -> None:
    network = nn.parallel.DistributedDataParallel(model(torch.float32))
    optimizer = AdamW(network.parameters(), update_in_backward=True)
    network(torch.ones(1, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="ranks are no longer alike; leave update_in_backward out"):
        optimizer.step()


def test_fp8_layers_see_the_updates(device) -> None:
    losses = []
    for convert in (False, True):
        network = model(torch.bfloat16, device)
        if convert:
            convert_to_fp8(network, FP8Config(always=True))
        optimizer = AdamW(network.parameters(), **SETTINGS, update_in_backward=convert)
        losses.append(learn(network, optimizer, 60))
    assert losses[1] == pytest.approx(losses[0], rel=0.1)
    assert losses[1] != losses[0]
    assert losses[1][-1] < 0.5 * losses[1][0]


def test_states_take_two_bytes_a_value_and_masters_two_more() -> None:
    for dtype, allowed in ((torch.float32, 2.06), (torch.bfloat16, 4.06)):
        weight = nn.Parameter(torch.zeros(512, 256, dtype=dtype))
        weight.grad = torch.ones_like(weight)
        optimizer = AdamW([weight])
        optimizer.step()
        assert allowed - 0.07 < optimizer.state[weight].nbytes / weight.numel() < allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_resumed_run_has_the_same_bits(dtype, tmp_path, device) -> None:
    whole, first, second = (model(dtype, device) for _ in range(3))
    learn(whole, AdamW(whole.parameters(), **SETTINGS), 6)
    optimizer = AdamW(first.parameters(), **SETTINGS)
    learn(first, optimizer, 3)
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved")
    saved = torch.load(tmp_path / "saved", weights_only=True)
    second.load_state_dict(saved["model"])
    resumed = AdamW(second.parameters(), lr=1.0)
    resumed.load_state_dict(saved["optimizer"])
    for number, parameter in enumerate(second.parameters()):
        assert resumed.full_state_dict()["state"][number]["exp_avg"].shape == parameter.shape
    assert resumed.param_groups[0]["lr"] == SETTINGS["lr"]
    learn(second, resumed, 3, first=3)
    for one, other in zip(whole.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update_in_backward", [False, True])
def test_copies_and_pickles_go_on_with_the_same_bits(dtype, update_in_backward, device) -> None:
    network = model(dtype, device)
    optimizer = AdamW(network.parameters(), **SETTINGS, update_in_backward=update_in_backward)
    learn(network, optimizer, 3)
    pairs = [copy.deepcopy((network, optimizer)), pickle.loads(pickle.dumps((network, optimizer)))]
    right = learn(network, optimizer, 3, first=3)
    for other, copied in pairs:
        assert learn(other, copied, 3, first=3) == right
        assert all(map(torch.equal, other.parameters(), network.parameters()))
        other(torch.ones(1, 64, dtype=dtype, device=device)).sum().backward()
        assert all((parameter.grad is None) is update_in_backward for parameter in other.parameters())


def test_an_accumulation_is_not_copied() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = AdamW([weight], update_in_backward=True, micro_batches=2)
    weight.sum().backward()
    with pytest.raises(ValueError, match="cannot be copied in the midst of an accumulation"):
        copy.deepcopy(optimizer)


def test_torchs_distributed_checkpoints_hold_states_by_name(device) -> None:
    whole, first, second = (model(torch.bfloat16, device) for _ in range(3))
    learn(whole, AdamW(whole.parameters(), **SETTINGS), 6)
    optimizer = AdamW(first.parameters(), **SETTINGS)
    learn(first, optimizer, 3)
    weights, states = get_state_dict(first, optimizer)
    resumed = AdamW(second.parameters(), **SETTINGS)
    set_state_dict(second, resumed, model_state_dict=weights, optim_state_dict=states)
    learn(second, resumed, 3, first=3)
    assert all(map(torch.equal, whole.parameters(), second.parameters()))


def test_states_go_to_torchs_adamw_and_back(device) -> None:
    ours, torchs, again = (model(torch.float32, device) for _ in range(3))
    optimizer = AdamW(ours.parameters(), **SETTINGS)
    learn(ours, optimizer, 20)
    full = optimizer.full_state_dict()
    assert all(torch.equal(full["state"][i]["master"], each) for i, each in enumerate(ours.parameters()))
    moments = copy.deepcopy(full)
    for state in moments["state"].values():
        del state["master"]
    of_torch = torch.optim.AdamW(torchs.parameters(), **SETTINGS)
    torchs.load_state_dict(ours.state_dict())
    of_torch.load_state_dict(moments)
    again.load_state_dict(ours.state_dict())
    back = AdamW(again.parameters(), **SETTINGS)
    back.load_state_dict(of_torch.state_dict())
    losses = [learn(*pair, 10, first=20) for pair in ((ours, optimizer), (torchs, of_torch), (again, back))]
    assert losses[1] == pytest.approx(losses[0], rel=0.01)
    assert losses[2] == pytest.approx(losses[0], rel=0.01)


@pytest.mark.parametrize("full", [False, True])
def test_states_of_bf16_weights_go_on_with_fp32_ones(full, device) -> None:
    narrow, wide = model(torch.bfloat16, device), model(torch.float32, device)
    optimizer = AdamW(narrow.parameters(), **SETTINGS)
    learn(narrow, optimizer, 20)
    wide.load_state_dict(narrow.state_dict())
    resumed = AdamW(wide.parameters(), **SETTINGS)
    resumed.load_state_dict(optimizer.full_state_dict() if full else optimizer.state_dict())
    assert learn(wide, resumed, 10, first=20) == pytest.approx(learn(narrow, optimizer, 10, first=20), rel=0.02)


def test_full_states_bring_the_masters_of_bf16_weights(device) -> None:
    one, other = (model(torch.bfloat16, device) for _ in range(2))
    optimizer = AdamW(one.parameters(), **SETTINGS)
    learn(one, optimizer, 5)
    full = optimizer.full_state_dict()
    loaded = AdamW(other.parameters(), **SETTINGS)
    loaded.load_state_dict(full)
    for one_parameter, other_parameter in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(one_parameter, other_parameter)
    assert all(
        torch.equal(full["state"][number]["master"], state["master"])
        for number, state in loaded.full_state_dict()["state"].items()
    )


def test_blocks_with_gradients_that_are_not_finite_are_counted(device) -> None:
    weight = nn.Parameter(torch.ones(600, device=device))
    optimizer = AdamW([weight])
    weight.grad = torch.ones_like(weight)
    weight.grad[3] = torch.nan
    optimizer.step()
    assert optimizer.skipped_blocks == 1
    assert (weight[:256] == 1).all()
    assert (weight[256:] != 1).all()


def test_a_closure_is_called_and_empty_parameters_are_left() -> None:
    weights = [nn.Parameter(torch.ones(0)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))]
    optimizer = AdamW(weights)

    def closure() -> torch.Tensor:
        loss = weights[0].sum() + weights[1].sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert (weights[1] < 1).all()
    assert (weights[2] == 1).all()


def test_a_group_that_was_refused_may_be_corrected_and_added_again() -> None:
    optimizer, weight = AdamW([nn.Parameter(torch.ones(2))]), nn.Parameter(torch.ones(2, dtype=torch.float16))
    with pytest.raises(TypeError, match="give BF16 or FP32"):
        optimizer.add_param_group({"params": [weight]})
    weight.data = weight.data.float()
    optimizer.add_param_group({"params": [weight]})
    weight.grad = torch.ones(2)
    optimizer.step()
    assert (weight < 1).all()


@pytest.mark.parametrize("micro_batches", [0, 1, 2], ids=["step", "backward", "micro-batches"])
def test_sparse_gradients_are_refused(micro_batches) -> None:
    embedding = nn.Embedding(10, 16, sparse=True)
    in_backward = {"update_in_backward": True, "micro_batches": micro_batches} if micro_batches else {}
    optimizer = AdamW(embedding.parameters(), **in_backward)

    def train() -> None:
        embedding(torch.tensor([1, 2])).sum().backward()
        optimizer.step()

    with pytest.raises(TypeError, match=r"a gradient is sparse.*; make it with sparse=False"):
        train()


def test_what_cannot_be_updated_is_refused() -> None:
    with pytest.raises(TypeError, match=r"torch.float16; give BF16 or FP32"):
        AdamW([nn.Parameter(torch.ones(2, dtype=torch.float16))])
    with pytest.raises(ValueError, match="give contiguous parameters"):
        AdamW([nn.Parameter(torch.ones(4, 4).t()[:, 1:])])
    flat = nn.Parameter(torch.ones(4))
    flat._is_flat_param = True  # as FullyShardedDataParallel's
    with pytest.raises(TypeError, match=r"FullyShardedDataParallel's flat one.*; leave update_in_backward out"):
        AdamW([flat], update_in_backward=True)
    with pytest.raises(ValueError, match=r"betas\[1\] is 1.0"):
        AdamW([nn.Parameter(torch.ones(2))], betas=(0.9, 1.0))
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = AdamW([weight])
    optimizer.step()
    state = optimizer.state_dict()
    with pytest.raises(ValueError, match="a state has 2 values and its parameter 3"):
        AdamW([nn.Parameter(torch.ones(3))]).load_state_dict(state)
    # as torch flattens it
    of_weight = {name: each for name, each in state["state"][0].items() if name != "exp_avg_amax"}
    with pytest.raises(ValueError, match="the state has no exp_avg_amax; load the whole state dict"):
        AdamW([weight]).load_state_dict({**state, "state": {0: of_weight}})
    with pytest.raises(ValueError, match="has no 'momentum'; load a state of an AdamW"):
        AdamW([weight]).load_state_dict({**state, "state": {0: {"step": 1, "momentum": torch.ones(2)}}})
