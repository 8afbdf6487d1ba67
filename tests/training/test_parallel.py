from __future__ import annotations

import pytest

from fp8booster.cli.train.defaults import resolve
from fp8booster.cli.train.options import TrainOptions
from fp8booster.training.parallel import Parallel


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"plugin": "hybird"}, r"no plugin 'hybird'; did you mean hybrid\?"),
        ({"tp": 2}, "low_level_zero takes no --tp; gemini, hybrid and moe do"),
        ({"plugin": "hybrid", "tp": 0}, "--tp is 0; it must be at least 1"),
        ({"plugin": "gemini", "pp": 2}, "gemini takes no --pp; hybrid and moe do"),
        ({"plugin": "hybrid", "pp": 4, "micro_batches": 2}, "--pp is 4 and --micro-batches 2"),
        ({"plugin": "hybrid", "pp": 2, "micro_batches": 2, "zero": 2}, "goes with --zero 0 or 1"),
        ({"zero": 0}, "--zero is 0; --plugin low_level_zero takes 1 or 2"),
        ({"plugin": "fsdp", "zero": 1}, "--plugin fsdp takes none: leave it out"),
        ({"plugin": "moe", "ep": 2, "zero": 0}, "experts on several ranks go with --zero 1"),
        ({"plugin": "hybrid", "sp": 2}, "--sp needs --sp-mode"),
        ({"plugin": "gemini", "sp_mode": "ring"}, "gemini takes no --sp-mode; hybrid does"),
        ({"plugin": "hybrid", "sp_mode": "ulysses"}, "--sp-mode is 'ulysses'; use one of split_gather"),
        ({"plugin": "hybrid", "sp_mode": "ring"}, "shares sequences among --tp ranks; give --tp"),
        ({"plugin": "hybrid", "tp": 2, "sp": 2, "sp_mode": "ring"}, "leave --sp out"),
        ({"plugin": "hybrid", "sp_mode": "all_to_all"}, "needs --sp, the number of ranks"),
    ],
)
def test_what_does_not_go_together_is_told(values, says):
    with pytest.raises(ValueError, match=says):
        Parallel(**values).check()


def test_options_are_checked_as_they_are_made():
    with pytest.raises(ValueError, match="ddp takes no --tp; gemini, hybrid and moe do"):
        TrainOptions(plugin="ddp", tp=2)


def test_ranks_that_share_a_replica_read_the_same():
    parallel = Parallel(plugin="hybrid", tp=2, pp=2, micro_batches=2)
    assert parallel.replicas(8) == 2
    with pytest.raises(ValueError, match="6 processes cannot be divided into groups of 4"):
        parallel.replicas(6)
    options = TrainOptions(plugin="hybrid", tp=2, batch=3, sequence=8)
    assert resolve(options, launched=False).global_batch(4).sequences == 2 * 3


@pytest.mark.parametrize(
    ("values", "length", "multiple"),
    [
        ({"tp": 4, "sp_mode": "split_gather"}, 30, 4),
        ({"sp": 4, "sp_mode": "all_to_all"}, 30, 4),
        ({"sp": 2, "sp_mode": "ring_attn"}, 30, 4),
    ],
)
def test_a_sequence_must_divide_among_its_ranks(values, length, multiple):
    parallel = Parallel(plugin="hybrid", **values)
    parallel.require_sequence(length + 2)
    with pytest.raises(ValueError, match=f"it must be a multiple of {multiple}"):
        parallel.require_sequence(length)


def test_stages():
    assert Parallel().zero_stage == 2
    assert Parallel(plugin="hybrid").zero_stage == 1
    assert Parallel(plugin="hybrid", zero=0).zero_stage == 0
    assert Parallel(plugin="ddp").zero_stage is None
    assert Parallel(plugin="hybrid", tp=2, sp_mode="ring").describe() == "hybrid, stage 1, tp 2, ring"
