"""Parts of the ZeRO optimizer's step by themselves: what is divided, what fills buckets, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster.colossal.zero import noted_norms
from fp8booster.colossal.zero import optimizer as module
from fp8booster.colossal.zero.noted_norms import NormQueue
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer, Update, _taken_out


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


def update(number: int, group_id: int, gathered: object = None) -> Update:
    working = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    master = torch.full((2,), float(number))
    return Update(working, master, group_id, gathered, torch.full((2,), 8.0 * number, dtype=torch.bfloat16))


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
    amaxes = made._in_one_pass(updates, divisor)
    assert [float(amaxes[each.working]) for each in updates] == [10.0, 20.0, 30.0, 40.0]
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

    def in_one_pass(of: list[Update], divisor: object) -> dict[nn.Parameter, float]:
        done.append([int(each.master[0]) for each in of])
        return {each.working: float(each.master[0]) for each in of}

    monkeypatch.setattr(module.one_pass, "why_not", lambda inner: None)
    made = optimizer(
        optim=None,
        _in_one_pass=in_one_pass,
        _gather=lambda of: done.append("gather") or ["work"],
        _step_of_nothing=lambda: done.append("step"),
    )
    works, amaxes = made._step_optimizer(updates, None)
    assert works == ["work"]
    assert [amaxes[each.working] for each in updates] == [float(number) for number in range(len(order))]
    plain = [number for number, gathered in enumerate(order) if gathered is None]
    assert done == [plain, "gather", [number for number in range(len(order)) if number not in plain], "step"]


def test_a_second_backward_before_the_step_is_refused_where_backward_updates() -> None:
    working, other = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2))
    made = optimizer(
        _updated_amaxes={working: torch.ones(())},
        _parameters={other: Update(other, torch.zeros(2), 0, None)},
        _in_one_pass=lambda updates, divisor: {each.working: torch.full((), 5.0) for each in updates},
    )
    with pytest.raises(RuntimeError, match="a second backward has come before step"):
        made._update({working: torch.ones(2)})
    made._update({other: torch.ones(2)})
    assert {id(each): float(amax) for each, amax in made._updated_amaxes.items()} == {id(working): 1.0, id(other): 5.0}


def test_every_bucket_that_holds_something_is_reduced_and_no_norm_is_left_to_find() -> None:
    full, empty, last = Bucket((parameter(4), 0)), Bucket(), Bucket((parameter(2), 0))
    reduced, norms = [], {bucket: NormQueue() for bucket in (full, empty, last)}
    for queue in norms.values():
        queue.add([torch.ones(1)])
    made = optimizer(
        pg_to_bucket_store={"one": full, "two": empty, "three": last},
        _reduce_bucket=reduced.append,
        _norms=norms,
        reduces_beside_backward=False,
    )
    made._run_reduction()
    assert reduced == [full, last]
    assert not any(queue.waiting for queue in norms.values())


def test_norms_are_found_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[list[torch.Tensor]] = []
    monkeypatch.setattr(noted_norms, "NORM_BYTES", 100)
    monkeypatch.setattr(noted_norms, "note_norms", lambda sums: noted.append(list(sums)))
    sums = [torch.full((10,), float(number)) for number in range(4)]  # of 40 bytes
    one, other = NormQueue(), NormQueue()
    one.add(sums[:1])
    other.add(sums[3:])
    one.add(sums[1:2])
    assert noted == []
    one.add(sums[2:3])
    assert [[int(each[0]) for each in of_call] for of_call in noted] == [[0, 1, 2]]
    assert one.waiting == []
    assert len(other.waiting) == 1


def test_the_norm_is_over_all_groups_and_the_ranks_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for a reduction multiplies by as many as there are ranks."""
    ranks = {"pair": 2, "four": 4, "three": 3}
    monkeypatch.setattr(module.dist, "all_reduce", lambda squares, group: squares.mul_(ranks[group]))

    def store(*groups: list[float]) -> SimpleNamespace:
        of_groups = [[torch.tensor([value, 0.0]) for value in values] for values in groups]
        return SimpleNamespace(get_working_grads_by_group_id=lambda group_id: of_groups[group_id])

    made = optimizer(
        _working_param_groups={0: [], 1: []},
        pg_to_grad_store={
            "pair": store([1.0, 2.0], [3.0]),
            ("four", "three"): store([], [5.0]),
            "three": store([], []),
        },
    )
    norm = made._norm()
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx((2 * (1 + 4 + 9) + 12 * 25) ** 0.5, rel=1e-6)


def test_what_has_a_gradient_is_updated_with_its_own() -> None:
    updates = [update(number, group_id, gathered)._replace(gradient=None) for number, group_id, gathered in UPDATES]
    gradients = {id(updates[0].working): torch.ones(1), id(updates[2].working): torch.full((1,), 2.0)}

    def gradient(group_id: int, number: int) -> torch.Tensor | None:
        assert [each.group_id for each in updates if id(each.working) == number] == [group_id]
        return gradients.get(number)

    made = optimizer(
        pid_to_grad_store={id(each.working): SimpleNamespace(gradient=gradient) for each in updates},
        _parameters={each.working: each for each in updates},
    )
    found = made._with_gradients()
    assert [each._replace(gradient=None) for each in found] == [updates[0], updates[2]]
    assert [float(each.gradient) for each in found] == [1.0, 2.0]


UPDATES = ((0, 0, None), (1, 0, None), (2, 0, "in FP8"), (10, 1, None))


@pytest.mark.parametrize("some", [False, True])
def test_an_optimizer_that_steps_by_itself_is_given_what_has_a_gradient_and_then_all(some: bool, monkeypatch) -> None:
    updates = [update(number, group_id, gathered) for number, group_id, gathered in UPDATES]
    given = []
    inner = SimpleNamespace(param_groups=[{"params": "all"}, {"params": "all"}])
    inner.step = lambda: given.append([[int(each[0]) for each in group["params"]] for group in inner.param_groups])
    monkeypatch.setattr(module.one_pass, "why_not", lambda inner: "a reason")
    masters = {0: [update.master for update in updates[:3]], 1: [updates[3].master]}
    made = optimizer(
        optim=inner,
        _logger=SimpleNamespace(info=lambda *_, **__: None),
        _gather=lambda of: [int(each.master[0]) for each in of],
        _master_param_groups_of_current_rank=masters,
    )
    works, amaxes = made._step_optimizer(updates[2:] if some else [updates[0], updates[2]], None)
    assert given == [[[2], [10]] if some else [[0, 2], []]]
    assert works == ([10] if some else [0])
    assert amaxes == {}
    assert [group["params"] for group in inner.param_groups] == list(masters.values())
    assert all(update.master.grad is None for update in updates)


def test_what_is_sent_is_published_with_its_amax_and_the_rest_is_waited_for() -> None:
    updates = [update(1, 0, "a"), update(2, 0), update(3, 0, "c")]
    published, waited = {}, []
    made = optimizer(gathered_weights=SimpleNamespace(publish=published.update))
    versions = [each.working._version for each in updates]
    works = [SimpleNamespace(wait=lambda number=number: waited.append(number)) for number in range(2)]
    made._publish(updates, works, {updates[0].working: torch.tensor(7.0), updates[1].working: torch.tensor(8.0)})
    assert [(weight, float(shard.values[0]), shard.amax) for weight, shard in published.items()] == [
        ("a", 1.0, torch.tensor(7.0)),
        ("c", 3.0, None),
    ]
    assert waited == [0, 1]
    changed = [each.working._version > version for each, version in zip(updates, versions, strict=True)]
    assert changed == [False, True, False]  # those in FP8 by whoever fills them


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("late", [False, True])
def test_masters_are_gathered_in_the_working_dtype_by_group(late: bool, wait: bool, monkeypatch) -> None:
    updates = [update(number, 0) for number in range(4)]
    groups = ["one", "other", ("first", "second"), "one"]
    padded = {each.working: torch.zeros(4, dtype=torch.bfloat16) for each in updates}
    begun, waited, handles, counted = [], [], [], []

    def gather_nd(whole: torch.Tensor, shard: torch.Tensor, group: object, async_op: bool = False) -> str:
        begun.append((group, int(shard[0]), shard.dtype, async_op))
        return f"handle of {int(shard[0])}"

    def gather(messages: list, group: object) -> list[SimpleNamespace]:
        begun.append((group, [int(shard[0]) for _, shard in messages]))
        assert all(any(whole is each for each in padded.values()) for whole, _ in messages)
        return [SimpleNamespace(wait=lambda: waited.append(group))]

    monkeypatch.setattr(module, "all_gather_into_flat_tensor_nd", gather_nd)
    monkeypatch.setattr(module, "set_all_gather_handle", lambda working, handle: handles.append(handle))
    monkeypatch.setattr(module, "gather_many", gather)
    made = optimizer(
        _dtype=torch.bfloat16,
        _overlap_allgather=late,
        param_to_pg={each.working: group for each, group in zip(updates, groups, strict=True)},
        _working_param_to_padded_working_param=padded,
        gathered_weights=SimpleNamespace(count_in_16_bits=lambda weights, shards: counted.append((weights, shards))),
    )
    works = made._gather(updates, wait=wait)
    assert begun[0 if not late or wait else 2][:2] == (("first", "second"), 2)
    if late and not wait:
        assert handles == ["handle of 0", "handle of 1", "handle of 3"]
        assert [(number, dtype, later) for _, number, dtype, later in begun] == [
            (number, torch.bfloat16, number != 2) for number in range(4)
        ]
        assert works == []
    else:
        assert handles == []
        assert begun[1:] == [("one", [0, 3]), ("other", [1])]
        assert len(works) == 2
    assert waited == (["one", "other"] if wait else [])
    ((weights, shards),) = counted
    assert [each is other.working for each, other in zip(weights, updates, strict=True)] == [True] * 4
    assert {each.dtype for each in shards} == {torch.bfloat16}


def test_groups_and_weights_are_those_that_are_sent_in_fp8() -> None:
    updates = [update(number, 0, gathered) for number, gathered in enumerate((None, "a", "b", "c"))]
    groups = dict(zip((each.working for each in updates), ("in 16 bits", "one", "other", "one"), strict=True))
    made = optimizer(
        _parameters={each.working: each for each in updates}, gathered_weights=["a", "b", "c"], param_to_pg=groups
    )
    assert made.groups_that_gather() == ["one", "other"]
    assert made.count_weights() == (3, 4)


def test_a_buckets_parts_are_added_to_the_sums_of_their_parameters_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = parameter(4), parameter(8)
    bucket, added, queue = Bucket((one, 0), (other, 0)), [], NormQueue()
    store = SimpleNamespace(
        kind="32-bit", add=lambda part, group_id, number: added.append((part.tolist(), group_id, number)) or part
    )
    own = torch.arange(6.0).split([2, 4])  # of both, on one of two ranks
    made = optimizer(
        gradient_encoding=SimpleNamespace(block_size=None),
        updates_in_backward=False,
        reduces_beside_backward=False,
        _reduced=lambda of, gradients: own,
        pid_to_grad_store={id(one): store, id(other): store},
        _parameters={one: Update(one, None, 1, None), other: Update(other, None, 2, None)},
        _norms={bucket: queue},
    )
    made._reduce_bucket(bucket)
    assert added == [([0.0, 1.0], 1, id(one)), ([2.0, 3.0, 4.0, 5.0], 2, id(other))]
    assert len(queue.waiting) == 2
    store.kind = "8-bit"  # whose norms are those of what the step decodes
    bucket.add_param_grad(1, one, 0)
    one.grad = torch.ones(4)
    made._reduced = lambda of, gradients: [torch.ones(2)]
    made._reduce_bucket(bucket)
    assert len(queue.waiting) == 2


@pytest.mark.parametrize("adds_up", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_rank_keeps_gradients_where_they_lie_unless_they_add_up(
    adds_up: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce(part: torch.Tensor, gradients: list[torch.Tensor], *_: Any, **__: Any) -> None:
        part.copy_(torch.cat(gradients))

    monkeypatch.setattr(module.comm, "reduce_scatter_coalesced", reduce)
    gradients = [torch.arange(4.0).to(dtype), torch.arange(8.0).to(dtype)]
    bucket = Bucket(ranks=1)
    bucket.torch_pg, bucket.sizes = object(), [1]
    made = optimizer(
        gradient_encoding=None,
        automatic_scaling=None,
        _communication_dtype=None,
        _master_weights=True,
        pg_to_grad_store={None: SimpleNamespace(adds_up=adds_up)},
    )
    parts = made._reduced(bucket, gradients)
    assert all(map(torch.equal, parts, gradients))
    lie_there = [part.data_ptr() == each.data_ptr() for part, each in zip(parts, gradients, strict=True)]
    assert lie_there == [not adds_up] * 2


def test_updates_of_backward_are_published_with_their_amaxes() -> None:
    updates = [update(1, 0), update(2, 0, "b"), update(3, 0)]
    amaxes = {updates[1].working: torch.tensor(5.0), updates[0].working: torch.tensor(4.0)}
    published = []
    made = optimizer(
        require_grad_sync=True,
        mixed_precision_mixin=None,
        updates_in_backward=True,
        automatic_scaling=None,
        _updated_amaxes=amaxes,
        _parameters={each.working: each for each in updates},
        _step_of_nothing=lambda: None,
        _gather=lambda of: [f"gather of {int(each.master[0])}" for each in of],
        _publish=lambda *what: published.append(what),
    )
    made.step()
    ((taken, works, of_taken),) = published
    assert [int(each.master[0]) for each in taken] == [1, 2]
    assert works == ["gather of 1"]
    assert of_taken is amaxes
    assert made._updated_amaxes == {}


def test_when_all_is_updated_the_optimizer_steps_with_nothing_and_has_its_masters_again() -> None:
    stepped = []
    inner = SimpleNamespace(param_groups=[{"params": [1]}, {"params": [2]}])
    inner.step = lambda: stepped.append([group["params"] for group in inner.param_groups])
    made = optimizer(optim=inner, _master_param_groups_of_current_rank={0: ["a"], 1: ["b", "c"]})
    made._step_of_nothing()
    assert stepped == [[[], []]]
    assert [group["params"] for group in inner.param_groups] == [["a"], ["b", "c"]]
