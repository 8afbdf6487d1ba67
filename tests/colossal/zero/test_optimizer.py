"""Parts of the ZeRO optimizer's step by themselves: what is divided, what fills buckets, what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from colossalai.zero.low_level.bookkeeping import BucketStore
from torch import nn

from fp8booster.colossal.zero import buckets
from fp8booster.colossal.zero import optimizer as module
from fp8booster.colossal.zero.buckets import GradientBucket, Trained
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer


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


class Stores:
    """Stands for a store of gradients: keeps what is added."""

    kind = "32-bit"

    def __init__(self) -> None:
        self.added: list[tuple[list[float], tuple[int, int]]] = []

    def add(self, parts: list[torch.Tensor], places: list[tuple[int, int]]) -> list[torch.Tensor]:
        self.added += [(part.tolist(), place) for part, place in zip(parts, places, strict=True)]
        return list(parts)


def bucket_of(*trained: Trained, ranks: int = 2) -> GradientBucket:
    """A bucket without a process group."""
    made = object.__new__(BucketStore)
    made._world_size = ranks
    GradientBucket.convert_in_place(made)
    made.trained, made.values = list(trained), sum(each.values for each in trained)
    return made


def trained(working: nn.Parameter, group_id: int = 0, **further: Any) -> Trained:
    """A parameter whose master is of no account."""
    return Trained(working, torch.zeros(2), group_id, **{"gathered": None, **further})


def parameter(count: int) -> nn.Parameter:
    made = nn.Parameter(torch.zeros(count))
    made.grad = torch.arange(1.0, count + 1)
    return made


def test_a_bucket_is_reduced_before_it_would_overflow_and_holds_one_that_is_larger() -> None:
    sizes = (40, 60, 10, 300, 10, 90)
    parameters = [parameter(size) for size in sizes]
    bucket, other, reduced = bucket_of(), bucket_of(trained(parameter(99))), []

    def reduce(of: GradientBucket) -> None:
        reduced.append([each.working.numel() for each in of.trained])
        of.reset_all()

    made = optimizer(
        pid_to_bucket_store={id(each): bucket for each in parameters},
        pg_to_bucket_store={"one": bucket, "other": other},
        _reduce_bucket_size=100,
        _reduce_bucket=reduce,
        _trained={id(each): trained(each) for each in parameters},
    )
    for each in parameters:
        made._add_to_bucket(each, 0)
    assert reduced == [[40, 60], [10], [300]]
    assert [each.working.numel() for each in bucket.trained] == [10, 90]
    assert bucket.num_elements_in_bucket() == 100
    assert len(other.trained) == 1


def test_gradients_are_taken_out_once_padded_and_those_that_share_blocks_last() -> None:
    within, whole = trained(parameter(20), shares_blocks=True), trained(parameter(32))
    padded, twice = trained(parameter(30), padding=2), trained(parameter(16))
    bucket = bucket_of(within, whole, padded, twice, twice)
    assert bucket.values == 20 + 32 + 32 + 2 * 16
    taken, gradients = bucket.take_out()
    assert taken == [whole, padded, twice, within]
    assert [each.numel() for each in gradients] == [32, 32, 16, 20]
    assert gradients[1].tolist() == [*range(1, 31), 0, 0]
    assert gradients[3].tolist() == [*range(1, 21)]
    assert (bucket.trained, bucket.values) == ([], 0)
    assert all(each.working.grad is None for each in taken)


@pytest.mark.parametrize(("ranks", "block", "shares"), [(2, 8, True), (2, 5, False), (4, 5, False), (2, None, False)])
def test_what_is_known_of_a_parameter_is_gathered_once(ranks: int, block: int | None, shares: bool) -> None:
    working, master, store = parameter(18), torch.zeros(10), object()
    made = optimizer(
        working_to_master_param={id(working): master},
        pid_to_bucket_store={id(working): bucket_of(ranks=ranks)},
        pid_to_grad_store={id(working): store},
        get_param_padding_size=lambda each: 2,
        gathered_weights=SimpleNamespace(of=lambda each: "in FP8"),
        gradient_encoding=SimpleNamespace(block_size=block),
    )
    known = made._known_of(working, 3, "a.weight")
    assert known.name == "a.weight"
    assert (known.working is working, known.master is master, known.store is store) == (True, True, True)
    assert (known.group_id, known.gathered, known.padding, known.is_expert) == (3, "in FP8", 2, False)
    assert known.place == (3, id(working))
    assert known.shares_blocks is shares


def update(number: int, group_id: int, gathered: object = None) -> Trained:
    working = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    return Trained(working, torch.full((2,), float(number)), group_id, gathered)


def gradients_of(updated: list[Trained]) -> dict[Trained, torch.Tensor]:
    """Eight times the master of each."""
    return {each: (8 * each.master).bfloat16() for each in updated}


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
    amaxes = made._in_one_pass(gradients_of(updates), divisor)
    assert [float(amaxes[each]) for each in updates] == [10.0, 20.0, 30.0, 40.0]
    assert seen == [("a", [1, 3], divisor), ("b", [2, 4], divisor)]


@pytest.mark.parametrize("divisor", [None, torch.tensor(4.0)])
def test_an_optimizer_that_steps_by_itself_gets_gradients_of_the_masters_dtype(divisor: torch.Tensor | None) -> None:
    updates = [update(1, 0), update(2, 0)]
    gradients = gradients_of(updates)
    optimizer()._attach(gradients, divisor)
    for each in updates:
        assert each.master.grad.dtype is torch.float32
        assert torch.equal(each.master.grad, gradients[each].float() / (divisor or 1))


@pytest.mark.parametrize("order", [(None, 1, None, 2), (1, None, 2, None), (None, None), (1, 2)], ids=str)
def test_what_is_sent_in_16_bits_is_updated_first_and_each_amax_is_its_own(order: tuple, monkeypatch) -> None:
    updates = [update(number, 0, gathered) for number, gathered in enumerate(order)]
    done = []

    def in_one_pass(of: dict[Trained, torch.Tensor], divisor: object) -> dict[Trained, float]:
        done.append([int(each.master[0]) for each in of])
        return {each: float(gradient[0]) / 8 for each, gradient in of.items()}

    monkeypatch.setattr(module.one_pass, "why_not", lambda inner: None)
    monkeypatch.setattr(module.one_pass, "step_of_nothing", lambda inner: done.append("step"))
    made = optimizer(optim=None, _in_one_pass=in_one_pass, _gather=lambda of: done.append("gather") or ["work"])
    works, amaxes = made._step_optimizer(gradients_of(updates), None)
    assert works == ["work"]
    assert [amaxes[each] for each in updates] == [float(number) for number in range(len(order))]
    plain = [number for number, gathered in enumerate(order) if gathered is None]
    assert done == [plain, "gather", [number for number in range(len(order)) if number not in plain], "step"]


def test_a_second_backward_before_the_step_is_refused_where_backward_updates() -> None:
    one, other = update(1, 0), update(2, 0)
    made = optimizer(
        _updated_amaxes={one: torch.ones(())},
        _in_one_pass=lambda gradients, divisor: {each: torch.full((), 5.0) for each in gradients},
    )
    with pytest.raises(RuntimeError, match="a second backward has come before step"):
        made._update({one: torch.ones(2)})
    made._update({other: torch.ones(2)})
    assert {each: float(amax) for each, amax in made._updated_amaxes.items()} == {one: 1.0, other: 5.0}


def test_every_bucket_that_holds_something_is_reduced_and_no_norm_is_left_to_find() -> None:
    full, empty, last = bucket_of(trained(parameter(4))), bucket_of(), bucket_of(trained(parameter(2)))
    reduced = []
    for bucket in (full, empty, last):
        bucket.find_norms([torch.ones(1)])
    made = optimizer(
        pg_to_bucket_store={"one": full, "two": empty, "three": last},
        _reduce_bucket=reduced.append,
        reduces_beside_backward=False,
    )
    made._run_reduction()
    assert reduced == [full, last]
    assert not any(bucket.without_norms for bucket in (full, empty, last))


def test_norms_are_found_when_they_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[list[torch.Tensor]] = []
    monkeypatch.setattr(buckets, "NORM_BYTES", 100)
    monkeypatch.setattr(buckets, "note_norms", lambda sums: noted.append(list(sums)))
    sums = [torch.full((10,), float(number)) for number in range(4)]  # of 40 bytes
    one, other = bucket_of(), bucket_of()
    one.find_norms(sums[:1])
    other.find_norms(sums[3:])
    one.find_norms(sums[1:2])
    assert noted == []
    one.find_norms(sums[2:3])
    assert [[int(each[0]) for each in of_call] for of_call in noted] == [[0, 1, 2]]
    assert one.without_norms == []
    assert len(other.without_norms) == 1
    one.find_norms(sums[:1])
    assert len(noted) == 1


def test_the_norm_is_over_all_groups_and_the_ranks_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands in for a reduction multiplies by as many as there are ranks."""
    ranks = {"pair": 2, "four": 4, "three": 3}
    monkeypatch.setattr(module, "ranks_of", ranks.__getitem__)
    monkeypatch.setattr(module.dist, "all_reduce", lambda squares, group: squares.mul_(ranks[group]))

    pair, four, three = (SimpleNamespace() for _ in range(3))
    gradients = {}
    for value, store in ((1.0, pair), (5.0, four), (2.0, pair), (3.0, pair)):
        each = update(0, 0)
        each.store = store
        gradients[each] = torch.tensor([value, 0.0])
    made = optimizer(
        pg_to_grad_store={"pair": pair, ("four", "three"): four, "three": three}, _gradients=lambda: gradients
    )
    norm = made._norm()
    assert norm.dtype is torch.float32
    assert float(norm) == pytest.approx((2 * (1 + 4 + 9) + 12 * 25) ** 0.5, rel=1e-6)


def test_what_has_a_gradient_is_updated_with_its_own() -> None:
    updates = [update(number, group_id, gathered) for number, group_id, gathered in UPDATES]
    one, other, dropped, last = (each.place[1] for each in updates)
    held = {0: {other: [torch.ones(1)], dropped: []}, 1: {last: [torch.full((1,), 2.0)]}}
    store = Stores()
    store.gradients = held.__getitem__
    for each in updates:
        each.store = store
    made = optimizer(_trained={each.place[1]: each for each in updates})
    assert {each: float(gradient) for each, gradient in made._gradients().items()} == {updates[1]: 1.0, updates[3]: 2.0}
    assert one not in held[0]


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
    works, amaxes = made._step_optimizer(gradients_of(updates[2:] if some else [updates[0], updates[2]]), None)
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
    made._publish(updates, works, {updates[0]: torch.tensor(7.0), updates[1]: torch.tensor(8.0)})
    assert [(weight, float(values[0]), amax) for weight, (values, amax) in published.items()] == [
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
    for each in updates:
        each.store = SimpleNamespace(world_size=2, local_rank=1)
    padded = {each.working: torch.zeros(4, dtype=torch.bfloat16) for each in updates}
    begun, waited, handles, counted = [], [], [], []

    def gather_nd(whole: torch.Tensor, shard: torch.Tensor, group: object, async_op: bool = False) -> str:
        begun.append((group, int(shard[0]), shard.dtype, async_op))
        return f"handle of {int(shard[0])}"

    def gather(messages: list, group: object) -> list[SimpleNamespace]:
        begun.append((group, [int(shard[0]) for _, shard in messages]))
        assert all(any(whole is each for each in padded.values()) for whole, _ in messages)
        assert all(torch.equal(whole[2:], shard) and whole[:2].tolist() == [0, 0] for whole, shard in messages)
        assert all(whole.data_ptr() + 4 == shard.data_ptr() for whole, shard in messages)
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
        _trained={each.place[1]: each for each in updates}, gathered_weights=["a", "b", "c"], param_to_pg=groups
    )
    assert made.groups_that_gather() == ["one", "other"]
    assert made.count_weights() == (3, 4)


def test_a_buckets_parts_are_added_to_the_sums_of_their_parameters_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Stores()
    one, other = trained(parameter(4), 1, store=store), trained(parameter(8), 2, store=store)
    bucket = bucket_of(one, other)
    own = torch.arange(6.0).split([2, 4])  # of both, on one of two ranks
    made = optimizer(updates_in_backward=False, reduces_beside_backward=False, _reduced=lambda *_: own)
    made._reduce_bucket(bucket)
    assert store.added == [([0.0, 1.0], one.place), ([2.0, 3.0, 4.0, 5.0], other.place)]
    assert len(bucket.without_norms) == 2
    store.kind = "8-bit"  # whose norms are those of what the step decodes
    one.working.grad = torch.ones(4)
    bucket.trained.append(one)
    made._reduced = lambda *_: [torch.ones(2)]
    made._reduce_bucket(bucket)
    assert len(bucket.without_norms) == 2


@pytest.mark.parametrize("adds_up", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_one_rank_keeps_gradients_where_they_lie_unless_they_add_up(
    adds_up: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce(part: torch.Tensor, gradients: list[torch.Tensor], *_: Any, **__: Any) -> None:
        part.copy_(torch.cat(gradients))

    monkeypatch.setattr(module.comm, "reduce_scatter_coalesced", reduce)
    gradients = [torch.arange(4.0).to(dtype), torch.arange(8.0).to(dtype)]
    bucket = bucket_of(ranks=1)
    bucket.torch_pg, bucket.sizes = object(), [1]
    made = optimizer(
        gradient_encoding=None,
        automatic_scaling=None,
        _communication_dtype=None,
        _master_weights=True,
        pg_to_grad_store={None: SimpleNamespace(adds_up=adds_up)},
    )
    parts = made._reduced(bucket, gradients, ())
    assert all(map(torch.equal, parts, gradients))
    lie_there = [part.data_ptr() == each.data_ptr() for part, each in zip(parts, gradients, strict=True)]
    assert lie_there == [not adds_up] * 2


def test_updates_of_backward_are_published_with_their_amaxes(monkeypatch) -> None:
    updates = [update(1, 0), update(2, 0, "b"), update(3, 0)]
    amaxes = {updates[1]: torch.tensor(5.0), updates[0]: torch.tensor(4.0)}
    published = []
    made = optimizer(
        require_grad_sync=True,
        mixed_precision_mixin=None,
        updates_in_backward=True,
        automatic_scaling=None,
        _updated_amaxes=amaxes,
        _frozen={},
        _trained={each.place[1]: each for each in updates},
        optim=None,
        _gather=lambda of: [f"gather of {int(each.master[0])}" for each in of],
        _publish=lambda *what: published.append(what),
    )
    monkeypatch.setattr(module.one_pass, "step_of_nothing", lambda inner: None)
    made.step()
    ((taken, works, of_taken),) = published
    assert [int(each.master[0]) for each in taken] == [1, 2]
    assert works == ["gather of 1"]
    assert of_taken is amaxes
    assert made._updated_amaxes == {}
