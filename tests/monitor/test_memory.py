"""Memory by part at the peak of each phase."""

from __future__ import annotations

import gc

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fp8booster.monitor.memory import (
    ACTIVATIONS,
    BACKWARD,
    FORWARD,
    FREE_IN_POOLS,
    GRADIENTS,
    TEMPORARY,
    UPDATE,
    MemoryTracker,
    Pool,
)

MIB = 2**20
VALUES = MIB // 4
"""Of FP32 in a MiB."""


class Square(torch.autograd.Function):
    """Makes and frees 2 MiB in forward, saves one, and holds 3 for a moment in backward."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight + 1)
        (weight.repeat(2) * 1).sum()
        return weight.sum()

    @staticmethod
    def backward(ctx, gradient):
        (saved,) = ctx.saved_tensors
        saved.repeat(3).sum()
        return saved * gradient


def step(tracker: MemoryTracker) -> dict[str, dict[str, int]]:
    """A step; MiB by phase and part."""
    weight = torch.zeros(VALUES, requires_grad=True)
    tracker.name("weights", [weight])
    for _ in range(2):
        weight.grad = None
        gc.collect()
        tracker.begin_step()
        Square.apply(weight).backward()
        tracker.begin_update()
        with torch.no_grad():
            weight.sub_(weight.grad * 0.1)
    return {
        phase: {part: size // MIB for part, size in parts.items() if size >= MIB}
        for phase, parts in tracker.peaks().items()
    }


def test_parts_are_what_a_step_holds():
    with MemoryTracker() as tracker:
        found = step(tracker)
    assert found == {
        FORWARD: {"weights": 1, ACTIVATIONS: 1, TEMPORARY: 4},
        BACKWARD: {"weights": 1, ACTIVATIONS: 1, TEMPORARY: 3},
        UPDATE: {"weights": 1, GRADIENTS: 1, TEMPORARY: 1},
    }


def test_tensors_without_values_count_as_those_with():
    with FakeTensorMode(), MemoryTracker() as tracker:
        without = step(tracker)
    with MemoryTracker() as tracker:
        assert without == step(tracker)


def test_only_what_is_left_of_one_operator_counts():
    with MemoryTracker() as tracker:
        tracker.begin_step()
        with tracker.as_one():
            kept = torch.zeros(4 * VALUES)[:1].clone()
        assert tracker.bytes == kept.nbytes
        assert tracker.peaks()[FORWARD].total() == kept.nbytes


def test_what_was_freed_does_not_count_and_first_names_stay():
    with MemoryTracker() as tracker:
        tracker.begin_step()
        first, second = torch.zeros(VALUES), torch.zeros(VALUES)
        tracker.name("mine", [first, first.view(-1, 2)])
        tracker.name("yours", [first])
        tracker.name_rest("rest")
        assert tracker.peaks()[FORWARD] == {"mine": MIB, "rest": MIB}
        del first
        assert tracker.bytes == second.nbytes


def test_a_resized_storage_counts_with_its_new_size():
    with MemoryTracker() as tracker:
        tensor = torch.zeros(VALUES)
        tensor.untyped_storage().resize_(0)
        tracker.resized(tensor.untyped_storage())
        assert tracker.bytes == 0
        tracker.name("mine", [tensor])
        tensor.untyped_storage().resize_(2 * MIB)
        tracker.begin_step()
        tracker.resized(tensor.untyped_storage())
        torch.zeros(1)
        assert tracker.bytes == 2 * MIB
        assert tracker.peaks()[FORWARD]["mine"] == 2 * MIB


def test_gradients_wait_for_those_of_the_next_micro_batch():
    with MemoryTracker() as tracker:
        weight = torch.zeros(VALUES, requires_grad=True)
        tracker.name("weights", [weight])
        tracker.begin_step()
        (weight * 1).sum().backward()
        held = torch.zeros(2 * VALUES)
        assert tracker.peaks()[FORWARD][GRADIENTS] == MIB
        del held


def test_what_follows_backward_may_count_as_that():
    with MemoryTracker() as tracker:
        tracker.begin_step()
        with tracker.backward():
            first = torch.zeros(3 * VALUES)
        assert tracker.peaks()[BACKWARD].total() == first.nbytes
        assert tracker.peaks()[FORWARD].total() == 0
        second = torch.zeros(VALUES)
        assert tracker.peaks()[FORWARD].total() == first.nbytes + second.nbytes


def test_a_pool_stays_as_large_as_it_was():
    with MemoryTracker() as tracker:
        pool = Pool(tracker, "kept")
        with tracker.inside(pool):
            kept = torch.zeros(VALUES)
            torch.zeros(3 * VALUES)
            torch.zeros(2 * VALUES)
        assert (list(pool.held().values()), pool.free) == ([MIB], 3 * MIB)
        tracker.begin_step()
        assert tracker.peaks()[FORWARD] == {"kept": MIB, FREE_IN_POOLS: 3 * MIB}
        del kept
        tracker.begin_step()
        assert tracker.peaks()[FORWARD] == {FREE_IN_POOLS: 4 * MIB}
        del pool
        gc.collect()
        tracker.begin_step()
        assert tracker.bytes == tracker.peaks()[FORWARD].total() == 0
        assert tracker.made == 6 * MIB


def test_what_lies_in_memory_that_is_counted_is_not_counted_again():
    with MemoryTracker() as tracker:
        tensor = torch.zeros(VALUES)
        tracker.lies_elsewhere(tensor)
        view = tensor.view(2, -1)
        assert tracker.bytes == 0
        del tensor, view
        assert tracker.bytes == 0
