"""`FP8Config.gradient_accumulation`: how this rank's part of the gradients waits for the next micro-batch."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config
from fp8booster.kernels.group_codes import GroupCodes
from tests.colossal.hybrid.runs import fp8 as hybrid
from tests.colossal.hybrid.runs import norm_gradients, start
from tests.colossal.zero.runs import CLOSE, Layers, batch, features, masters, own_gradients, wire
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_native import FP16, OVERFLOWING
from tests.plugins.training import (
    STAGES,
    Boosted,
    assert_close,
    assert_equal,
    assert_trains_equally,
    boost,
    rank_batches,
    train,
)


def config(kind: str) -> FP8Config:
    return FP8Config(fused=False, gradient_accumulation=kind)


def run_of(kind: str, **arguments: object) -> Boosted:
    return boost(wire(fp8_config=config(kind), **arguments))


def backwards(run: Boosted, count: int) -> Boosted:
    for tokens in rank_batches(count):
        run.booster.backward(run.loss(tokens) / count, run.optimizer)
    return run


def held(run: Boosted) -> list[torch.Tensor | GroupCodes]:
    """What is kept of each gradient, as it is."""
    (store,) = run.optimizer.pg_to_grad_store.values()
    return [kept for of_group in store._grads_of_params.values() for (kept,) in of_group.values()]


def nbytes(kept: torch.Tensor | GroupCodes) -> int:
    return sum(each.nbytes for each in kept) if isinstance(kept, GroupCodes) else kept.nbytes


def decibels(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    squares = [
        sum(each.double().square().sum().item() for each in of)
        for of in (expected, [one.double() - other.double() for one, other in zip(found, expected, strict=True)])
    ]
    return 10 * math.log10(squares[0] / squares[1])


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_sums_take_the_bytes_and_have_the_error_of_their_kind(stage: int) -> None:
    exact = [each.clone() for each in own_gradients(backwards(run_of("32-bit", stage=stage), 4))]
    for kind, size, least in (("32-bit", 4, 200), ("16-bit", 2, 50), ("8-bit", 1 + 4 / 128, 37)):
        run = backwards(run_of(kind, stage=stage), 4)
        kept = held(run)
        assert len(kept) == len(exact)
        values = sum(each.numel() for each in exact)
        assert size * values <= sum(map(nbytes, kept)) < 1.01 * size * values
        found = own_gradients(run)
        if kind == "32-bit":
            assert all(torch.equal(one, other) for one, other in zip(found, exact, strict=True))
        else:
            assert {each.dtype for each in found} == {torch.bfloat16}  # as after one micro-batch
            assert least < decibels(found, exact) < least + 15


@ranks(2)
@pytest.mark.parametrize("kind", ["16-bit", "8-bit"])
def test_both_stages_train_alike_near_sums_in_fp32(kind: str) -> None:
    runs = [run_of(kind, stage=stage) for stage in STAGES]
    assert_trains_equally(*runs, micro_batches=4)
    assert_equal(*map(masters, runs))
    expected, losses = (train(run_of(each), steps=6, micro_batches=4) for each in ("32-bit", kind))
    assert_close(expected, losses, CLOSE)
    assert losses != expected


@ranks(2)
@pytest.mark.parametrize("kind", ["32-bit", "16-bit", "8-bit"])
def test_the_norm_that_clips_is_that_of_the_sums(kind: str) -> None:
    run = boost(wire(fp8_config=config(kind), max_norm=0.5), Layers(64, 64, 64))
    for rows in (32, 16, 48):
        run.booster.backward(run.model(features(rows=rows)), run.optimizer)
    if kind == "8-bit":
        assert all(isinstance(each, GroupCodes) for each in held(run))
    for gradient in own_gradients(run)[::2]:
        gradient.mul_(3)  # what was read is what the step takes
    squares = sum(gradient.double().square().sum() for gradient in own_gradients(run))
    dist.all_reduce(squares)
    run.optimizer.step()
    assert run.optimizer.get_grad_norm() == pytest.approx(squares.sqrt().item(), rel=1e-4)


@ranks(2)
def test_gradients_that_were_read_add_up_further() -> None:
    runs = [run_of("8-bit") for _ in range(2)]
    for tokens in rank_batches(3):
        for run in runs:
            run.booster.backward(run.loss(tokens), run.optimizer)
        own_gradients(runs[0])
    assert all(isinstance(each, GroupCodes) for each in held(runs[1]))
    assert decibels(*map(own_gradients, runs)) > 35


@ranks(2)
def test_an_overflow_in_an_earlier_micro_batch_skips_the_step() -> None:
    run = run_of("8-bit", **OVERFLOWING | {"backoff_factor": 2.0**-16})
    before = masters(run)
    backwards(run, 2)
    run.optimizer.step()
    assert not held(run)
    assert_equal(before, masters(run))
    scaled = run_of("8-bit", **FP16)
    assert {each.dtype for each in own_gradients(backwards(scaled, 2))} == {torch.float32}
    assert_close(
        train(run_of("32-bit", **FP16), micro_batches=2), train(run_of("8-bit", **FP16), micro_batches=2), CLOSE
    )


@ranks(2)
@pytest.mark.parametrize("kind", ["32-bit", "8-bit"])
def test_micro_batches_of_no_sync_are_warned_of_once(kind: str) -> None:
    from colossalai.logging import DistributedLogger

    said: list[str] = []
    run = run_of(kind, stage=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DistributedLogger, "warning", lambda _, line, ranks=None: said.append(line))
        run.step(batch(), batch(), batch(), no_sync=True)
    told = [line for line in said if "within no_sync: gradients add up whole" in line]
    assert len(told) == (kind == "8-bit")


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2 ZeRO 1", "TP2 split_gather", "TP2 ring"])
def test_hybrid_parallel_gradients_add_up_so(mode: str) -> None:
    """Those of norms are sums over the ranks of sequence parallelism, each micro-batch's once."""
    found = []
    for kind in ("32-bit", "8-bit"):
        run = start(hybrid(mode, zero_stage=1, fp8_config=config(kind)))
        found.append(norm_gradients(run, no_sync=False))
        kept = held(run)
        assert any(isinstance(each, GroupCodes) for each in kept) == (kind == "8-bit")
    for name, expected in found[0].items():
        # what tensor parallel ranks add in FP8 is rounded by up to 6 %
        assert (28 if "TP" in mode else 38) < decibels([found[1][name]], [expected]) < 60, name


@ranks(2)
def test_a_pipeline_adds_up_as_ever() -> None:
    run = start(hybrid("PP2 1f1b", zero_stage=1, fp8_config=config("8-bit")))
    assert {store.kind for store in run.optimizer.pg_to_grad_store.values()} == {"32-bit"}
