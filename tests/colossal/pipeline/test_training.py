"""Training in pipelines of two stages: schedules with FP8 on the wire, and weight gradients that wait."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.monitor.traffic import count_traffic
from tests.colossal.models import token_batch
from tests.colossal.pipeline.runs import HIDDEN, MICRO_BATCHES, SCHEDULES, batch, pipeline
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_census import Census, products
from tests.plugins.training import assert_close, assert_equal

STEPS = 8
AT_MOST = 0.52
"""Wire bytes over those of 16 bits."""


@cache
def plain_losses() -> list[float]:
    """Of 1F1B, all in BF16; the other schedules compute the same."""
    return pipeline("1f1b").train(STEPS)


@ranks(2)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_messages_in_fp8_halve_the_bytes_and_keep_the_losses(schedule: str) -> None:
    expected, run = plain_losses(), pipeline(schedule, sends_fp8=True)
    found = run.train(1)  # with the metadata of all messages to come
    comm.reset_statistics()
    with count_traffic() as traffic:
        found += run.train(STEPS - 1)
    sent = sum(count.sent for (name, _), count in traffic.counts.items() if name == "isend")
    row = comm.statistics()["send"]
    assert row.calls >= MICRO_BATCHES * (STEPS - 1)
    assert row.uncompressed == {}
    assert row.wire_bytes == sent <= AT_MOST * row.raw_bytes
    assert row.raw_bytes == row.calls * batch()[0].numel() * HIDDEN * torch.bfloat16.itemsize
    # each value is off by 1/16 at most, at random; a loss in BF16 by 1/256
    assert_close(expected, found, within=0.015)
    assert expected != found
    assert expected[-1] < 0.9 * expected[0], expected


@ranks(2)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_zero_bubble_gives_the_gradients_of_1f1b(in_fp8: bool) -> None:
    expected = pipeline("1f1b", products=in_fp8).gradients()
    assert_equal(expected, pipeline("zero-bubble", products=in_fp8).gradients())


@ranks(2)
def test_zero_bubble_trains_like_1f1b_with_fp8_products() -> None:
    expected = pipeline("1f1b", products=True).train(4)
    assert pipeline("zero-bubble", products=True).train(4) == expected


@ranks(2)
def test_zero_bubble_tells_the_loss_with_late_gathers() -> None:
    expected, found = (pipeline("zero-bubble", zero_stage=1, overlap_allgather=late).train(2) for late in (False, True))
    assert expected == found


@ranks(2)
def test_zero_bubble_runs_every_product_of_its_layers_in_fp8() -> None:
    run = pipeline("zero-bubble", products=True, sends_fp8=True)
    with Census() as counted:
        run.step(batch())
    network = run.model.unwrap()
    held = [place for first, end in run.plugin.stage_manager.stage_indices for place in range(first, end)]
    layers = [m for place in held for m in network.model.layers[place].modules() if hasattr(m, "in_features")]
    assert len(layers) == 14
    rows = batch().shape[1]
    once = sum(products(layers, rows).values(), Counter())
    assert counted.fp8 == Counter({sizes: MICRO_BATCHES * count for sizes, count in once.items()})
    head = [network.lm_head] if dist.get_rank() == 0 else []  # where the V ends
    assert sum(counted.other.values()) == 3 * MICRO_BATCHES * len(head)


@ranks(2)
@pytest.mark.parametrize("in_fp8", [False, True])
def test_zero_bubble_checkpoints_without_losing_a_gradient(in_fp8: bool) -> None:
    expected = pipeline("zero-bubble", products=in_fp8).gradients()
    run = pipeline("zero-bubble", products=in_fp8)
    run.model.unwrap().gradient_checkpointing_enable({"use_reentrant": False})
    assert_equal(expected, run.gradients())


@ranks(2)
def test_zero_bubble_trains_in_fp16() -> None:
    options = {"precision": "fp16", "initial_scale": 2.0**10}
    expected = pipeline("1f1b", **options).train(4)
    found = pipeline("zero-bubble", **options).train(4)
    assert_close(expected, found, within=1e-3)  # the scale is applied to the loss, or to its gradient
    assert found[2] < found[0]


@ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved, overlapped", "zero-bubble"])
def test_evaluation_gives_the_loss_of_training(schedule: str) -> None:
    run = pipeline(schedule, sends_fp8=True)
    expected = run.forward_backward(batch()).item()
    run.optimizer.zero_grad()
    other = batch()[: MICRO_BATCHES // 2]
    with torch.no_grad():
        found = run.forward_backward(batch()).item()
        if schedule == "zero-bubble":
            with pytest.raises(ValueError, match="evaluate with batches of 4, not 2"):
                run.forward_backward(other)
        else:
            assert math.isfinite(run.forward_backward(other).item())
    assert math.isclose(found, expected, rel_tol=1e-6)
    assert run.forward_backward(batch()).item() == expected  # training goes on


@ranks(2)
@pytest.mark.parametrize("case", [*product(("1f1b", "interleaved, overlapped", "zero-bubble"), (False, True))], ids=str)
def test_batches_may_be_of_any_length_and_size(case: tuple[str, bool]) -> None:
    schedule, in_fp8 = case
    losses = []
    for cached in (False, True):
        run = pipeline(schedule, sends_fp8=in_fp8)
        run.plugin.scheduler.enable_metadata_cache = cached  # the plugin's option does not reach zero-bubble
        found = []
        for length, rows, trains in ((32, 4, True), (48, 4, False), (32, 4, True), (48, 4, True), (48, 8, True)):
            with torch.set_grad_enabled(trains):
                tokens = token_batch(seed=length, batch=rows, length=length)
                found.append(run.step(tokens) if trains else run.forward_backward(tokens).item())
        losses.append(found)
    assert losses[0] == losses[1], losses
    assert all(map(math.isfinite, losses[0]))


@ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved, overlapped"])
def test_metadata_may_be_sent_with_every_message(schedule: str) -> None:
    cached = pipeline(schedule, sends_fp8=True).train(2)
    assert pipeline(schedule, sends_fp8=True, enable_metadata_cache=False).train(2) == cached


@ranks(2)
def test_tied_embeddings_stay_equal_on_both_ends() -> None:
    run = pipeline("1f1b", sends_fp8=True, network={"tie_word_embeddings": True})
    run.train(3)
    network = run.model.unwrap()
    own = network.model.embed_tokens.weight if dist.get_rank() == 0 else network.lm_head.weight
    other = own.detach().clone()
    dist.broadcast(other, 0)
    assert torch.equal(own, other)
