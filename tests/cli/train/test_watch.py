from __future__ import annotations

import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fp8booster.cli.train import watch as watch_module
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
        watch = Watch(traffic, 5.0, Path(folder, str(rank)).write_text)
        watch.expect("step 1")
        if rank == 1:
            idle()
        dist.all_reduce(torch.ones(5))


def idle() -> None:
    time.sleep(600)


def test_a_rank_that_sleeps_is_named_with_its_place_and_what_the_others_wait_in(tmp_path) -> None:
    with pytest.raises(RankError, match="died without a Python traceback"):
        run_ranks(hang, 3, str(tmp_path))
    # all are killed once one has ended, perhaps before they wrote
    (said,) = {sentence for file in tmp_path.iterdir() if (sentence := file.read_text())}
    assert said.startswith("Step 1 has not ended for 5 s: rank 1 is in idle (test_watch.py:")
    assert "), in no collective, rank 0 waits in all_reduce (distributed_c10d.py:" in said
    assert "having begun all_reduce of 5 float32 values, rank 2 waits in" in said
    assert "look at the logs and machines of these ranks and --resume the run" in said


class Clock:
    """Stands for `time`, of which a watch asks `monotonic` alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def forward(self, seconds: float, watch: Watch) -> None:
        """Time goes by, and the watch would have told of who is late."""
        self.now += seconds
        looks = watch._pulse
        while watch._pulse < looks + 6:  # the look that it is in, one that finds lateness, three at all ranks, one more
            assert watch._thread.is_alive()
            time.sleep(0.01)


def test_steps_that_end_in_time_end_nothing() -> None:
    run_ranks(in_time, 2)


def in_time() -> None:
    clock = Clock()
    with patch.object(watch_module, "time", clock):
        watch = Watch(Traffic(), 0.5, print)  # a step that is late would end this rank
        for step in range(1, 5):
            watch.expect(f"step {step}")
            clock.forward(0.3, watch)
            watch.step_ended()
        watch.expect("saving step 4", long=True)
        for _ in range(3):  # a save may take longer than a step
            clock.forward(0.5, watch)
        watch.stop()
        clock.now += 1e6
        watch._thread.join()


def test_the_limit_grows_with_the_longest_step() -> None:
    run_ranks(limits, 1)


def limits() -> None:
    clock = Clock()
    with patch.object(watch_module, "time", clock):
        watch = Watch(Traffic(), None, print)
        assert watch._step_limit() == SHORTEST
        watch.expect("step 1", long=True)
        assert watch._limit == 0.9 * 1800
        clock.now += 100
        watch.step_ended()
        watch.expect("step 2")
    assert watch._limit == 1000
