"""States with 8-bit moments read as torch's, come back bit for bit, and are ordinary dicts in copies and files."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8booster.kernels.group_codes import HALF_ONE, LARGEST_SQUARE
from fp8booster.kernels.moments import BLOCK
from fp8booster.optim import AdamW
from fp8booster.optim.states_8bit import State, States, as_tensor


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
