"""The norm that clips is that of the gradients as they are when the step begins, however they came to be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from tests.colossal.zero.runs import Layers, features, step, wire
from tests.distributed import ranks
from tests.plugins.training import STAGES, Boosted, boost


def backward(run: Boosted, rows: int = 32) -> None:
    run.booster.backward(run.model(features(rows=rows)), run.optimizer)


def gradients(run: Boosted) -> list[torch.Tensor]:
    """This rank's part of each."""
    (store,) = run.optimizer.pg_to_grad_store.values()
    return store.get_working_grads_by_group_id(0)


def changed(change: Callable[[torch.Tensor], object]) -> Callable[[Boosted], None]:
    """A backward, and a change of some of the gradients by hand."""

    def make(run: Boosted) -> None:
        backward(run)
        for gradient in gradients(run)[::2]:
            change(gradient)

    return make


def over_micro_batches(run: Boosted) -> None:
    for rows in (32, 16, 48):
        backward(run, rows)


def without_sync(run: Boosted) -> None:
    with run.booster.no_sync(run.model, run.optimizer):
        backward(run)
    backward(run, 16)


def without_a_layer(run: Boosted) -> None:
    """In the second of two micro-batches."""
    backward(run)
    run.model.unwrap().dropped = {1}
    backward(run)


def after_a_backward_that_was_dropped(run: Boosted) -> None:
    backward(run, 64)
    run.optimizer.zero_grad()
    backward(run)


def after_a_step(run: Boosted) -> None:
    step(run, features())
    backward(run, 16)


HOW = {
    "one backward": backward,
    "several micro-batches": over_micro_batches,
    "no_sync": without_sync,
    "a layer without a second gradient": without_a_layer,
    "after a dropped backward": after_a_backward_that_was_dropped,
    "after a step": after_a_step,
    "multiplied by hand": changed(lambda gradient: gradient.mul_(3)),
    "zeroed by hand": changed(torch.Tensor.zero_),
}


@ranks(2)
@pytest.mark.parametrize("how", HOW)
def test_the_norm_is_that_of_the_gradients_at_the_step(how: str) -> None:
    for stage in STAGES[:1] if how == "no_sync" else STAGES:  # Colossal-AI's stage 2 has none
        run = boost(wire(stage=stage), Layers(64, 64, 64))
        HOW[how](run)
        squares = sum(gradient.double().square().sum() for gradient in gradients(run))
        dist.all_reduce(squares)
        run.optimizer.step()
        assert run.optimizer.get_grad_norm() == pytest.approx(squares.sqrt().item(), rel=1e-4)
