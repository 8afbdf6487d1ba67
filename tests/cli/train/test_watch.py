from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fp8booster.cli.train.watch import SHORTEST, Doing, Watch, describe, locate
from fp8booster.monitor.traffic import Traffic, count_traffic
from tests.distributed import RankError, run_ranks


def doing(pulse: int, waits: bool = True, collective: str = "all_reduce of 3 float32 values") -> Doing:
    place = "all_reduce (distributed_c10d.py:1)" if waits else "read (data.py:7)"
    return Doing(pulse=pulse, task="step 2", waits=waits, place=place, collective=collective)


def test_a_rank_that_no_longer_publishes_is_named() -> None:
    found = describe({0: doing(1), 1: doing(1), 2: None}, {0: doing(4), 1: doing(1), 2: None})
    assert found.startswith("ranks 1, 2 do not answer (stopped, or the machine is gone), rank 0 waits in all_reduce")
    assert found.endswith("having begun all_reduce of 3 float32 values")


def test_a_rank_that_is_in_no_collective_is_named() -> None:
    found = describe({0: doing(1), 1: doing(1)}, {0: doing(4), 1: doing(4, waits=False)})
    assert found.startswith("rank 1 is in read (data.py:7), in no collective, rank 0 waits in all_reduce")


def test_collectives_that_do_not_fit_are_named() -> None:
    after = {0: doing(4), 1: doing(4, collective="broadcast of 1 int64 values")}
    found = describe({0: doing(1), 1: doing(1)}, after)
    assert "all ranks wait, in collectives that do not fit together" in found
    assert "rank 1 waits in all_reduce (distributed_c10d.py:1), having begun broadcast of 1 int64" in found


def test_a_threads_place_is_a_function_with_file_and_line() -> None:
    place, waits = locate(sys._getframe())
    assert place.startswith("test_a_threads_place_is_a_function_with_file_and_line (test_watch.py:")
    assert not waits
    assert locate(None) == ("no known place", False)


def hang(folder: str) -> None:
    """Rank 1 does not come to a collective; each rank leaves what it is told in a file, and ends."""
    rank = dist.get_rank()
    with count_traffic() as traffic:
        watch = Watch(traffic, 1.5, Path(folder, str(rank)).write_text)
        watch.expect("step 1")
        if rank == 1:
            idle()
        dist.all_reduce(torch.ones(5))


def idle() -> None:
    time.sleep(60)


def test_a_rank_that_sleeps_is_named_with_its_place_and_what_the_others_wait_in(tmp_path) -> None:
    with pytest.raises(RankError, match="died without a Python traceback"):
        run_ranks(hang, 3, str(tmp_path), timeout=60)
    (said,) = {file.read_text() for file in tmp_path.iterdir()}
    assert said.startswith("Step 1 has not ended for 2 s: rank 1 is in idle (test_watch.py:")
    assert "), in no collective, rank 0 waits in all_reduce (distributed_c10d.py:" in said
    assert "having begun all_reduce of 5 float32 values, rank 2 waits in" in said
    assert "look at the logs and machines of these ranks and --resume the run" in said


def test_steps_that_end_in_time_end_nothing() -> None:
    run_ranks(in_time, 2, timeout=60)


def in_time() -> None:
    def tell(sentence: str) -> None:
        raise AssertionError(sentence)

    watch = Watch(Traffic(), 0.5, tell)
    for step in range(1, 5):
        watch.expect(f"step {step}")
        time.sleep(0.3)
        watch.step_ended()
    watch.expect("saving step 4", long=True)
    time.sleep(1.5)  # a save may take longer than a step
    watch.stop()
    time.sleep(1.0)


def test_the_limit_grows_with_the_longest_step() -> None:
    run_ranks(limits, 1, timeout=60)


def limits() -> None:
    watch = Watch(Traffic(), None, print)
    assert watch._step_limit() == SHORTEST
    watch.expect("step 1", long=True)
    assert watch._limit == 0.9 * 1800
    watch._began -= 100
    watch.step_ended()
    watch.expect("step 2")
    assert 1000 < watch._limit < 1010
