"""Parts of the ZeRO optimizer's step by themselves: what is divided, what fills buckets, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster.colossal.zero import optimizer as module
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer, _taken_out, _Update


def optimizer(**attributes: Any) -> FP8ZeroOptimizer:
    """Without what boosting makes."""
    made = object.__new__(FP8ZeroOptimizer)
    vars(made).update({"grad_handles": [], **attributes})
    return made


@pytest.mark.parametrize("limit", [0.0, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("loss_scale", [None, 1.0, 16.0])
def test_gradients_are_divided_by_the_loss_scale_and_what_the_norm_is_over_any_limit(
    limit: float, loss_scale: float | None
) -> None:
    scale = loss_scale or 1.0
    norm = torch.tensor(2.0 * scale)
    mixin = None if loss_scale is None else SimpleNamespace(get_grad_div_scale=lambda: loss_scale)
    made = optimizer(_norm=lambda: norm, mixed_precision_mixin=mixin, _clip_grad_norm=limit)
    divisor = made._divisor()
    assert made._current_grad_norm is norm
    expected = scale * (2.0 / limit if 0 < limit < 2 else 1.0)
    if limit == 0 and scale == 1:
        assert divisor is None
    else:
        assert divisor.dtype is torch.float32
        assert float(divisor) == pytest.approx(expected, rel=1e-5)


def test_a_closure_is_refused_before_anything_is_done() -> None:
    with pytest.raises(ValueError, match="takes no closure: its gradients are reduced before"):
        optimizer().step(lambda: None)


def test_a_step_within_no_sync_does_nothing() -> None:
    made = optimizer(require_grad_sync=False)
    assert made.step() is None


class Bucket:
    """As Colossal-AI's, of parameters and their padding."""

    def __init__(self, *entries: tuple[nn.Parameter, int], ranks: int = 2) -> None:
        self.world_size = ranks
        self.reset_all()
        for parameter, padding in entries:
            self.add_param_grad(0, parameter, padding)

    def reset_all(self) -> None:
        self._param_list, self._padding_size = [], []

    def add_param_grad(self, group_id: int, parameter: nn.Parameter, padding: int) -> None:
        self._param_list.append(parameter)
        self._padding_size.append(padding)

    def num_elements_in_bucket(self) -> int:
        return sum(each.numel() for each in self._param_list) + sum(self._padding_size)


def parameter(count: int) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(count))
    made.grad = torch.arange(1.0, count + 1)
    return made


def test_a_bucket_is_reduced_before_it_would_overflow_and_holds_one_that_is_larger() -> None:
    sizes = (40, 60, 10, 300, 10, 90)
    parameters = [parameter(size) for size in sizes]
    bucket, other, reduced = Bucket(), Bucket((parameter(99), 0)), []

    def reduce(of: Bucket) -> None:
        reduced.append([each.numel() for each in of._param_list])
        of.reset_all()

    made = optimizer(
        pid_to_bucket_store={id(each): bucket for each in parameters},
        pg_to_bucket_store={"one": bucket, "other": other},
        _reduce_bucket_size=100,
        _reduce_bucket=reduce,
        get_param_padding_size=lambda each: 0,
    )
    for each in parameters:
        made._add_to_bucket(each, 0)
    assert reduced == [[40, 60], [10], [300]]
    assert [each.numel() for each in bucket._param_list] == [10, 90]
    assert len(other._param_list) == 1


def test_gradients_are_taken_out_once_padded_and_those_that_share_blocks_last() -> None:
    ranks, block = 2, 8
    within, whole, padded, twice = parameter(20), parameter(32), parameter(30), parameter(16)
    bucket = Bucket((within, 0), (whole, 0), (padded, 2), (twice, 0), (twice, 0), ranks=ranks)
    parameters, gradients = _taken_out(bucket, block)
    assert [id(each) for each in parameters] == [id(each) for each in (whole, padded, twice, within)]
    assert [each.numel() for each in gradients] == [32, 32, 16, 20]
    assert gradients[1].tolist() == [*range(1, 31), 0, 0]
    assert gradients[3].tolist() == [*range(1, 21)]
    assert bucket._param_list == []
    assert all(each.grad is None for each in parameters)


def update(number: int, group_id: int, gathered: object = None) -> _Update:
    working = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    master = torch.full((2,), float(number))
    return _Update(working, master, group_id, gathered, torch.full((2,), 8.0 * number, dtype=torch.bfloat16))


def test_updates_keep_their_group_and_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    updates = [update(1, 0), update(2, 1), update(3, 0), update(4, 1)]
    seen = []

    def step_group(inner: Any, group: Any, masters: Any, gradients: Any, divisor: Any) -> list[torch.Tensor]:
        seen.append((group["name"], [int(each[0]) for each in masters], divisor))
        assert [float(each[0]) for each in gradients] == [8.0 * float(each[0]) for each in masters]
        return [each[0] * 10 for each in masters]

    monkeypatch.setattr(module.one_pass, "step_group", step_group)
    made = optimizer(optim=SimpleNamespace(param_groups=[{"name": "a"}, {"name": "b"}]))
    divisor = torch.tensor(2.0)
    assert [float(each) for each in made._in_one_pass(updates, divisor)] == [10.0, 20.0, 30.0, 40.0]
    assert seen == [("a", [1, 3], divisor), ("b", [2, 4], divisor)]


@pytest.mark.parametrize("divisor", [None, torch.tensor(4.0)])
def test_an_optimizer_that_steps_by_itself_gets_gradients_of_the_masters_dtype(divisor: torch.Tensor | None) -> None:
    updates = [update(1, 0), update(2, 0)]
    optimizer()._attach(updates, divisor)
    for each in updates:
        assert each.master.grad.dtype is torch.float32
        assert torch.equal(each.master.grad, each.gradient.float() / (divisor or 1))


@pytest.mark.parametrize("order", [(None, 1, None, 2), (1, None, 2, None), (None, None), (1, 2)], ids=str)
def test_what_is_sent_in_16_bits_is_updated_first_and_each_amax_is_its_own(order: tuple, monkeypatch) -> None:
    updates = [update(number, 0, gathered) for number, gathered in enumerate(order)]
    done = []

    def in_one_pass(of: list[_Update], divisor: object) -> list[float]:
        done.append([int(each.master[0]) for each in of])
        return [float(each.master[0]) for each in of]

    monkeypatch.setattr(module.one_pass, "why_not", lambda inner: None)
    made = optimizer(
        optim=None,
        _in_one_pass=in_one_pass,
        _gather=lambda of: done.append("gather") or ["work"],
        _step_of_nothing=lambda: done.append("step"),
    )
    works, amaxes = made._step_optimizer(updates, None)
    assert works == ["work"]
    assert amaxes == [float(number) for number in range(len(order))]
    plain = [number for number, gathered in enumerate(order) if gathered is None]
    assert done == [plain, "gather", [number for number in range(len(order)) if number not in plain], "step"]


def test_a_second_backward_before_the_step_is_refused_where_backward_updates() -> None:
    working, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    made = optimizer(
        _updated_amaxes={working: torch.ones(())},
        _update_of=lambda each: _Update(each, torch.zeros(2), 0, None),
        _in_one_pass=lambda updates, divisor: [torch.full((), 5.0) for _ in updates],
    )
    with pytest.raises(RuntimeError, match="a second backward has come before step"):
        made._update({working: torch.ones(2)})
    made._update({other: torch.ones(2)})
    assert {id(each): float(amax) for each, amax in made._updated_amaxes.items()} == {id(working): 1.0, id(other): 5.0}
