"""AdamW with 8-bit moments learns as torch's does, resumes bit for bit, and exchanges states with torch's."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from benchmarks.harness.calls import idle_gpu, python_calls
from fp8booster import FP8Config, convert_to_fp8
from fp8booster.kernels.adamw_8bit import Shards8bit
from fp8booster.kernels.code_statistics import MomentSample
from fp8booster.optim import AdamW, HybridAdam, adamw
from fp8booster.optim.used_gradient import UsedGradient
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
    assert all(isinstance(parameter.grad, UsedGradient) for parameter in backward.parameters())
    optimizer.step()
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
    assert isinstance(frozen.grad, UsedGradient)
    assert optimizer.state[frozen]["step"] == 1


@ranks(2)
def test_updates_in_backward_are_refused_under_ddp_which_reduces_gradients_later() -> None:
    network = nn.parallel.DistributedDataParallel(model(torch.float32))
    optimizer = AdamW(network.parameters(), update_in_backward=True)
    with pytest.raises(RuntimeError, match="the ranks' weights diverge; leave update_in_backward out"):
        network(torch.ones(1, 64)).sum().backward()
    for parameter in network.parameters():  # as whoever reduces gradients and sets them
        parameter.grad = torch.ones_like(parameter)
    with pytest.raises(RuntimeError, match="the ranks' weights diverge; leave update_in_backward out"):
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


def test_a_parameter_that_two_optimizers_take_in_backward_is_refused(device) -> None:
    weight = nn.Parameter(torch.ones(256, dtype=torch.float32, device=device))
    optimizers = [AdamW([weight], lr=lr, weight_decay=0.0, update_in_backward=True) for lr in (0.5, 0.25)]
    with pytest.raises(RuntimeError, match="train a parameter by one of them only"):
        weight.square().sum().backward()
    assert torch.equal(weight, torch.full_like(weight, 0.5))  # the first one's update
    assert all(optimizer.updates_in_backward for optimizer in optimizers)


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
        used = [isinstance(parameter.grad, UsedGradient) for parameter in other.parameters()]
        assert all(each is update_in_backward for each in used)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_copies_keep_how_gradients_add_up_and_what_was_skipped(copied) -> None:
    weight = nn.Parameter(torch.ones(300))
    optimizer = AdamW([weight], update_in_backward=True, micro_batches=2, gradient_accumulation="32-bit")
    for value in (torch.nan, 1.0):
        (weight * value).sum().backward()
    assert optimizer.skipped_blocks == 2
    other_weight, other = copied((weight, optimizer))
    assert other.skipped_blocks == 2
    other_weight.sum().backward()
    count, total = other.gradient_sums[other_weight]
    assert (count, total.dtype) == (1, torch.float32)
    assert not optimizer.gradient_sums
    other_weight.sum().backward()
    assert other.state[other_weight]["step"] == 2
    assert optimizer.state[weight]["step"] == 1
    assert (other_weight < 1).all()
    assert (weight == 1).all()


def test_an_engines_optimizer_and_its_copy_are_not_updated_in_backward(device) -> None:
    weight = nn.Parameter(torch.ones(8, device=device))
    optimizer = AdamW([weight], update_in_backward=True)
    optimizer.train_for_engine({weight: (0, 0)})
    weight.sum().backward()  # before ranks have reduced it
    assert (weight == 1).all()
    assert weight.grad is not None
    optimizer.update_shards(optimizer.param_groups[0], [weight], [weight.grad])
    weight.grad = None
    other_weight, _ = copy.deepcopy((weight, optimizer))
    other_weight.sum().backward()
    assert other_weight.grad is not None
    assert torch.equal(other_weight, weight)


@pytest.mark.parametrize("same", [(0, 0), (1, 0), (0, 1)])
def test_chance_differs_between_parameters_and_their_parts(same) -> None:
    """Second moments are rounded by chance, which must not be alike but on the ranks' copies of one part."""
    found = []
    for number, part in ((0, 0), same):
        weight = nn.Parameter(torch.zeros(4096))
        optimizer = AdamW([weight])
        optimizer.train_for_engine({weight: (number, part)})
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            gradient = torch.randn(4096, generator=generator)
            optimizer.update_shards(optimizer.param_groups[0], [weight], [gradient])
        found.append(optimizer.state[weight]["exp_avg_sq"])
    assert torch.equal(*found) is (same == (0, 0))


def test_parameters_of_one_optimizer_have_chance_of_their_own() -> None:
    weights = [nn.Parameter(torch.zeros(4096)) for _ in range(2)]
    optimizer = AdamW(weights)
    for _ in range(3):
        gradient = torch.randn(4096)
        for weight in weights:
            weight.grad = gradient.clone()
        optimizer.step()
    assert not torch.equal(*(optimizer.state[weight]["exp_avg_sq"] for weight in weights))


def test_a_part_and_the_next_parameter_have_other_chance() -> None:
    weights = [nn.Parameter(torch.zeros(4)) for _ in range(2)]
    optimizer = AdamW(weights)
    optimizer.train_for_engine({weights[0]: (0, 1), weights[1]: (1, 0)})
    assert len(set(optimizer._numbers.values())) == 2


def test_updates_in_backward_have_the_rates_of_their_group(device) -> None:
    weights = [nn.Parameter(torch.ones(8, device=device)) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.5}, {"params": [weights[1]], "lr": 0.25}]
    AdamW(groups, weight_decay=0.0, update_in_backward=True)
    sum(weight.sum() for weight in weights).backward()
    assert [weight[0].item() for weight in weights] == [0.5, 0.75]


def test_step_updates_and_frees_what_backward_did_not_take(device) -> None:
    """A gradient that was set by hand."""
    weight = nn.Parameter(torch.ones(8, device=device))
    optimizer = AdamW([weight], update_in_backward=True)
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert (weight < 1).all()
    assert weight.grad is None
    in_step = AdamW([weight])
    weight.grad = torch.ones_like(weight)
    in_step.step()
    assert weight.grad is not None  # as torch's, which leaves that to zero_grad


def test_a_step_ends_what_backward_has_taken(device) -> None:
    """Gradients that come after it are another step's."""
    weight = nn.Parameter(torch.ones(8, device=device))
    optimizer = AdamW([weight], update_in_backward=True)
    weight.sum().backward()
    optimizer.step()
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    assert optimizer.state[weight]["step"] == 2


@pytest.mark.parametrize("scale", [8.0, 0.125])
def test_gradients_are_divided_by_the_scale(scale, device) -> None:
    found = []
    for divisor in (1.0, scale):
        weight = nn.Parameter(torch.zeros(8, device=device))
        optimizer = AdamW([weight], lr=0.1, weight_decay=0.0, eps=1.0)
        weight.grad = torch.full_like(weight, 2 * divisor)
        optimizer.step(**({} if divisor == 1 else {"div_scale": divisor}))
        found.append(weight.detach())
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], torch.full_like(found[0], -0.1 * 2 / 3), rtol=0.01, atol=0)


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_group_decays_as_it_says(decoupled, device) -> None:
    """As torch's Adam and AdamW."""
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    ours, theirs = (nn.Parameter(torch.full((8,), 2.0, device=device)) for _ in range(2))
    settings = {"lr": 0.1, "weight_decay": 0.5}
    optimizers = (
        AdamW([{"params": [ours], "decoupled_weight_decay": decoupled}], **settings),
        kind([theirs], **settings),
    )
    for weight, optimizer in zip((ours, theirs), optimizers, strict=True):
        weight.grad = torch.full_like(weight, -0.75)
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


def test_masters_are_loaded_into_fp32_weights_and_are_copies(device) -> None:
    one, other = (nn.Parameter(torch.full((8,), value, device=device)) for value in (1.0, 5.0))
    optimizer, loaded = AdamW([one]), AdamW([other])
    one.grad = torch.ones_like(one)
    optimizer.step()
    full = optimizer.full_state_dict()
    kept = full["state"][0]["master"].clone()
    loaded.load_state_dict(full)
    assert torch.equal(other, one)
    assert loaded.state[other]["step"] == 1
    for weight, each in ((one, optimizer), (other, loaded)):
        weight.grad = torch.ones_like(weight)
        each.step()
    assert torch.equal(full["state"][0]["master"], kept)
    assert torch.equal(other, one)


def test_a_state_dict_that_was_loaded_or_saved_is_not_written_to(device) -> None:
    """The codes of both optimizers change in place."""
    one, other = (nn.Parameter(torch.ones(8, dtype=torch.bfloat16, device=device)) for _ in range(2))
    optimizer, loaded = AdamW([one]), AdamW([other])

    def step(weight: nn.Parameter, of: AdamW) -> None:
        weight.grad = torch.ones_like(weight)
        of.step()

    step(one, optimizer)
    saved = optimizer.state_dict()
    assert type(saved["state"][0]) is dict
    loaded.load_state_dict(copy.deepcopy(saved))
    given = copy.deepcopy(saved)
    loaded.load_state_dict(given)
    before = copy.deepcopy(given)
    step(other, loaded)
    for name, value in before["state"][0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(given["state"][0][name])), name
    step_before = saved["state"][0]["step"]
    step(one, optimizer)
    assert saved["state"][0]["step"] == step_before  # a number, which is no one's but the dict's


def test_weights_of_another_dtype_get_or_lose_what_bf16_lacks(device) -> None:
    weight = nn.Parameter(torch.ones(8, device=device))
    optimizer = AdamW([weight])
    for dtype, has in ((torch.float32, False), (torch.bfloat16, True), (torch.float32, False)):
        weight.data = weight.data.to(dtype)
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert ("master_low" in optimizer.state[weight]) is has


def test_gradients_may_lie_otherwise_than_their_parameters(device) -> None:
    gradient, found = torch.randn(6, 8, device=device), []
    for lies_transposed in (False, True):
        weight = nn.Parameter(torch.zeros(6, 8, device=device))
        optimizer = AdamW([weight], lr=0.1)
        given = gradient.t().contiguous().t() if lies_transposed else gradient
        optimizer.update_shards(optimizer.param_groups[0], [weight], [given])
        found.append(weight.detach())
    assert torch.equal(*found)


def test_what_an_optimizer_was_not_given_and_groups_of_torchs_options_are_refused(device) -> None:
    weight, other = (nn.Parameter(torch.ones(4, device=device)) for _ in range(2))
    optimizer = AdamW([weight])
    group, gradients = optimizer.param_groups[0], [torch.ones(4, device=device)]
    with pytest.raises(TypeError, match="an engine has put tensors in the place of this optimizer's parameters"):
        optimizer.update_shards(group, [other], gradients)
    for option in ("amsgrad", "maximize"):
        with pytest.raises(ValueError, match="neither amsgrad nor maximize"):
            optimizer.update_shards(group | {option: True}, [weight], gradients)
    assert (weight == 1).all()
    flat = nn.Parameter(torch.ones(4))
    flat._is_flat_param = True  # as FullyShardedDataParallel's
    AdamW([flat])  # which steps when ranks have reduced its gradient


@ranks(1)
def test_dtensors_that_cannot_be_updated_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    weight = nn.Parameter(distribute_tensor(torch.ones(4), mesh))
    with pytest.raises(TypeError, match=r"a parameter is a DTensor, .* leave update_in_backward out"):
        AdamW([weight], update_in_backward=True)
    sums = DTensor.from_local(torch.ones(4), mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match="partial sums"):
        AdamW([nn.Parameter(sums)])
    wide = nn.Parameter(DTensor.from_local(torch.ones(4, 3).t(), mesh, [Shard(0)], run_check=False))
    with pytest.raises(ValueError, match="not contiguous"):
        AdamW([wide])


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
    optimizer._skipped[torch.device("meta")] = torch.tensor(2)  # of another device
    assert optimizer.skipped_blocks == 3


def test_tensors_are_updated_at_once_but_for_those_whose_moments_are_sampled(device, monkeypatch) -> None:
    weights = [nn.Parameter(torch.ones(300, device=device)) for _ in range(5)]
    plain, optimizer = AdamW(copy.deepcopy(weights)), AdamW(weights)
    sampled, read, sizes = {id(weights[1]), id(weights[3])}, [], []
    update = adamw.update_8bit

    def observe(parameter: int, sample: Callable[[], MomentSample]) -> Callable[[], None] | None:
        if parameter not in sampled:
            return None
        made = sample()
        return lambda: read.append(made.statistics())

    def seen(shards: Shards8bit, *rest: object) -> torch.Tensor:
        sizes.append(len(shards.values))
        return update(shards, *rest)

    monkeypatch.setattr(adamw, "update_8bit", seen)
    for each in (plain, optimizer):
        for weight in each.param_groups[0]["params"]:
            weight.grad = torch.linspace(-1, 1, 300, device=device)
    plain.step()
    monkeypatch.setattr(adamw, "observers", [observe, lambda *_: None])
    optimizer.step()
    assert sizes == [5, 2, 2, 1]
    assert [[count for count, _ in moments] for moments in read] == 2 * [2 * [256]]
    for one, other in zip(plain.param_groups[0]["params"], weights, strict=True):
        assert torch.equal(one, other)
        assert plain.amaxes[one] == optimizer.amaxes[other] == one.abs().max()
        assert all(map(torch.equal, plain.state[one].moments, optimizer.state[other].moments))


def test_a_step_is_one_launch_for_all_parameters_alike(monkeypatch) -> None:
    pytest.importorskip("triton")
    from fp8booster.kernels import tables_triton

    launches: list[object] = []
    monkeypatch.setattr(tables_triton, "launch", lambda kernel, *arguments, **options: launches.append(kernel))
    calls = []
    for count in (10, 30):
        dtypes = count * [torch.bfloat16] + count * [torch.float32]
        weights = [nn.Parameter(torch.ones(32, dtype=dtype)) for dtype in dtypes]
        optimizer = AdamW(weights)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        with idle_gpu():
            optimizer.step()
            launches.clear()
            calls.append(python_calls(optimizer.step))
        assert len(launches) == 2
    # what the host does for each tensor, 20 times two of them, hardly grows
    assert (calls[1] - calls[0]) / 40 < 12


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
    assert len(optimizer.param_groups) == 2
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


SWITCH, NUMBER, PAIR, WHOLE, TEXT = ("no", 1), (True, "0.1", None), (0.9, (0.9, "x"), (0.9,)), (True, 2.0, "2"), (3,)
WRONG = {
    AdamW: {
        **dict.fromkeys(("lr", "eps", "weight_decay"), NUMBER),
        "betas": PAIR,
        "update_in_backward": SWITCH,
        "micro_batches": WHOLE,
        "gradient_accumulation": TEXT,
    },
    HybridAdam: {
        **dict.fromkeys(("lr", "eps", "weight_decay", "nvme_offload_fraction"), NUMBER),
        "betas": PAIR,
        **dict.fromkeys(("bias_correction", "adamw_mode", "amsgrad", "maximize", "simd_log"), SWITCH),
        "nvme_offload_dir": TEXT,
        "initial_scale": (True, "0.1"),
    },
}
"""By optimizer and argument, values of other types, of which Python would take many."""


@pytest.mark.parametrize("kind", WRONG)
def test_no_argument_takes_a_value_of_another_type(kind: type[torch.optim.Optimizer]) -> None:
    assert WRONG[kind].keys() == set(list(inspect.signature(kind).parameters)[1:])
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=torch.float32))]
    for name, values in WRONG[kind].items():
        for value in values:
            with pytest.raises(TypeError, match=f"^{name} is .*; it must be "):
                kind(parameters, **{name: value})


def test_sums_of_gradients_are_chosen_where_some_wait() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(4, dtype=torch.float32))]
    for options in ({}, {"update_in_backward": True}):
        with pytest.raises(ValueError, match="gradient_accumulation='8-bit' is about gradients that wait for further"):
            AdamW(parameters, gradient_accumulation="8-bit", **options)
    AdamW(parameters, gradient_accumulation="8-bit", update_in_backward=True, micro_batches=2)


@pytest.mark.gpu
def test_a_step_that_is_captured_is_refused() -> None:
    weight = nn.Parameter(torch.ones(300, device="cuda"))
    optimizer = AdamW([weight])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    with (
        pytest.raises(RuntimeError, match="call the optimizer's step outside"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        optimizer.step()
    optimizer.step()
    assert weight.isfinite().all()
