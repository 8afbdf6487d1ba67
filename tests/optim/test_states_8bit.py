"""States with 8-bit moments read as torch's, come back bit for bit, and are ordinary dicts in copies and files."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8booster.kernels.adamw_8bit import BLOCK
from fp8booster.kernels.group_codes import HALF_ONE, LARGEST_SQUARE
from fp8booster.optim import AdamW
from fp8booster.optim.states_8bit import LOW, State, States, as_tensor


def trained(count: int = 1000, dtype: torch.dtype = torch.float32) -> tuple[nn.Parameter, AdamW]:
    """A parameter that has taken steps, and its optimizer."""
    generator = torch.Generator().manual_seed(0)
    parameter = nn.Parameter(torch.randn(count, generator=generator).to(dtype))
    optimizer = AdamW([parameter], lr=1e-2)
    for _ in range(5):
        spread = torch.exp(2 * torch.randn(count, generator=generator))
        parameter.grad = (spread * torch.randn(count, generator=generator)).to(dtype)
        optimizer.step()
    return parameter, optimizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_read_comes_back_bit_for_bit(dtype) -> None:
    parameter, optimizer = trained(dtype=dtype)
    state = optimizer.state[parameter]
    plain = copy.deepcopy(state)
    assert type(plain) is dict
    assert list(plain) == ["step", "exp_avg", "exp_avg_sq", *(["master_low"] if dtype is torch.bfloat16 else [])]
    assert plain["exp_avg"].dtype is plain["exp_avg_sq"].dtype is torch.float32
    again = State(plain)
    assert all(torch.equal(torch.as_tensor(again[name]), torch.as_tensor(plain[name])) for name in plain)
    assert again.nbytes == state.nbytes < 4.2 * len(parameter)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_deep_copy_and_a_step_leave_each_other_alone(dtype) -> None:
    """Engines write into copies, and steps write into codes."""
    parameter, optimizer = trained(dtype=dtype)
    state = optimizer.state[parameter]
    copied, again = copy.deepcopy(state), copy.deepcopy(state)
    parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    for name, value in again.items():
        assert torch.equal(torch.as_tensor(copied[name]), torch.as_tensor(value)), name
        assert not torch.equal(torch.as_tensor(copied[name]), torch.as_tensor(state[name])), name
    before = {name: torch.as_tensor(value).clone() for name, value in state.items()}
    for name in copied:
        if name != "step":
            copied[name].fill_(1)
    assert all(torch.equal(torch.as_tensor(state[name]), value) for name, value in before.items())


def test_what_is_set_has_its_own_shape_and_what_bf16_lacks_stays_in_16_bits() -> None:
    state = State.zeros(nn.Parameter(torch.zeros(600, dtype=torch.bfloat16)))
    assert state["step"] == 0
    values = torch.linspace(-1, 1, 600)
    state["exp_avg"], state["exp_avg_sq"] = values.view(20, 30), values.square().bfloat16().view(30, 20)
    state["step"] = torch.tensor(7.0)
    assert state["step"] == 7
    assert state["exp_avg"].shape == (20, 30)
    assert state["exp_avg_sq"].shape == (30, 20)
    torch.testing.assert_close(state["exp_avg"].flatten(), values, rtol=0.05, atol=1e-3)
    torch.testing.assert_close(state["exp_avg_sq"].flatten(), values.square(), rtol=0.1, atol=1e-3)
    # as where an engine has cast it, rounded beyond its range
    state[LOW] = torch.tensor([[2.0**15, -(2.0**15) - 128], [5.0, -5.0]])
    assert torch.equal(state[LOW], torch.tensor([[2**15 - 1, -(2**15)], [5, -5]], dtype=torch.int16))
    assert len(state) == 4
    state.fit(nn.Parameter(torch.zeros(6, 100)))
    assert state["exp_avg"].shape == state["exp_avg_sq"].shape == (6, 100)


def test_codes_are_taken_for_codes_and_values_for_values() -> None:
    parameter, optimizer = trained(dtype=torch.bfloat16)
    state = optimizer.state[parameter]
    of_codes, of_values = State(state.codes), State(dict(state))
    for again in (of_codes, of_values):
        assert again.codes.keys() == state.codes.keys()
        for name, value in state.codes.items():
            assert torch.equal(torch.as_tensor(again.codes[name]), torch.as_tensor(value)), name
        assert again[LOW].shape == parameter.shape


def test_all_tensors_of_a_state_move() -> None:
    state = State.zeros(nn.Parameter(torch.zeros(300, dtype=torch.bfloat16)))
    meta = torch.device("meta")
    state.codes["exp_avg"] = state.codes["exp_avg"].to(meta)  # one alone
    state.move(meta)
    assert {value.device for value in state.codes.values() if isinstance(value, torch.Tensor)} == {meta}
    assert state.codes["step"] == 0


def test_a_step_takes_its_state_to_the_parameters_device() -> None:
    parameter = nn.Parameter(torch.empty(300, device="meta"))
    optimizer = AdamW([parameter])
    optimizer.state[parameter] = State.zeros(nn.Parameter(torch.zeros(300)))
    state = optimizer._state_of(parameter, parameter)
    assert {value.device.type for value in state.codes.values() if isinstance(value, torch.Tensor)} == {"meta"}


def test_a_state_that_is_asked_for_is_kept_and_those_given_are_taken() -> None:
    parameter, optimizer = trained()
    states = States()
    empty = states[parameter]
    assert parameter in states
    assert states[parameter] is empty
    taken = States(optimizer.state, as_tensor)
    assert isinstance(taken[parameter]["step"], torch.Tensor)
    assert taken[parameter]["step"].dtype is torch.float32
    assert taken[parameter]["step"] == 5
    other = States(show_step=int)
    other[parameter] = taken[parameter]  # each shows as the mapping that has it
    assert type(other[parameter]["step"]) is int


def test_files_hold_ordinary_dicts(tmp_path) -> None:
    parameter, optimizer = trained()
    optimizer.train_for_engine({parameter: (0, 0)})
    torch.save(optimizer.state_dict(), tmp_path / "states")
    found = torch.load(tmp_path / "states", weights_only=True)
    assert found["state"][0]["step"] == 5.0
    of_torch = torch.optim.AdamW([nn.Parameter(parameter.detach().clone())])
    of_torch.load_state_dict(found)
    assert torch.equal(next(iter(of_torch.state.values()))["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_steps_are_shown_as_an_engine_takes_them() -> None:
    parameter, optimizer = trained()
    assert type(optimizer.state[parameter]["step"]) is int
    for integer in (True, False):
        optimizer.train_for_engine({parameter: (0, 0)}, integer_steps=integer)
        assert isinstance(optimizer.state[parameter]["step"], int) is integer
        optimizer.load_state_dict(optimizer.state_dict())
        assert isinstance(optimizer.state[parameter]["step"], int) is integer
        assert optimizer.state[parameter]["step"] == 5


@pytest.mark.parametrize("cut", [100, 256, 333])
def test_moments_that_are_cut_elsewhere_err_by_a_code_more(cut) -> None:
    """As on another number of ranks."""
    parameter, optimizer = trained()
    state = optimizer.state[parameter]
    parts = [State({name: part[name] for name in part}) for part in _parts(state, cut)]
    first = torch.cat([part["exp_avg"] for part in parts])
    amaxes = torch.cat([_of_blocks(part["exp_avg"]) for part in parts])
    codes = [_root(LARGEST_SQUARE * each / amaxes) for each in (first, state["exp_avg"])]
    assert (codes[0] - codes[1]).abs().max() <= 0.5001
    second, was = torch.cat([part["exp_avg_sq"] for part in parts]), state["exp_avg_sq"]
    octaves = (was.max() / was[was > 0].min()).log2().item() + 1
    assert ((second - was).abs() <= (0.5 * octaves / 254 * 1.01) * was).all()


def _parts(state: State, cut: int) -> list[dict]:
    return [
        {"step": 5, **{name: state[name][where] for name in ("exp_avg", "exp_avg_sq")}}
        for where in (slice(None, cut), slice(cut, None))
    ]


def _root(values: torch.Tensor) -> torch.Tensor:
    """With straight lines between powers of 4, as codes are rounded from (`kernels.group_codes`)."""
    return (values.abs().view(torch.int32) // 2 + HALF_ONE).view(torch.float32).copysign(values)


def _of_blocks(values: torch.Tensor) -> torch.Tensor:
    """Of each value, the amax of its block."""
    return torch.cat([block.abs().max().expand_as(block) for block in values.split(BLOCK)])


def test_states_that_are_stored_are_encoded_and_whole_ones_wait() -> None:
    parameter = nn.Parameter(torch.zeros(10))
    states = States(show_step=as_tensor)
    moments = {"exp_avg": torch.ones(10), "exp_avg_sq": torch.ones(10)}
    states.update({parameter: {"step": torch.tensor(3.0), **moments}})
    assert states[parameter].codes["exp_avg"].dtype is torch.int8
    states[parameter] = {"step": 3, "exp_avg": torch.ones(20), "exp_avg_sq": torch.ones(20)}
    assert type(states[parameter]) is dict


def test_states_of_others_are_refused() -> None:
    parameter, optimizer = trained()
    with pytest.raises(ValueError, match="no 'max_exp_avg_sq'; load a state of an AdamW without amsgrad"):
        optimizer.state[parameter]["max_exp_avg_sq"] = torch.ones(1000)
    with pytest.raises(TypeError, match="delete the state"):
        del optimizer.state[parameter]["step"]
    optimizer.state[parameter] = {"step": 1, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    with pytest.raises(ValueError, match="a state has 3 values and its parameter 1000"):
        optimizer.step()
    optimizer.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match="neither amsgrad nor maximize"):
        optimizer.step()
    parameter, optimizer = trained()
    del optimizer.state[parameter].codes["exp_avg_sq"]
    with pytest.raises(ValueError, match="the state has no exp_avg_sq"):
        optimizer.step()
