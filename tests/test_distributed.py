from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, on_ranks, ranks, run_ranks, shared_folder


def _sum_of_ranks(offset: float) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only rank one")
    time.sleep(600)


def _die() -> None:
    os._exit(3)


def _read_environment() -> tuple[str, bool]:
    return os.environ["COLOUR"], dist.is_initialized()


def test_values_come_back_in_rank_order() -> None:
    values = run_ranks(_sum_of_ranks, 3, 0.5)
    assert [value.item() for value in values] == [4.5, 4.5, 4.5]


def test_failing_rank_is_named_and_the_others_are_killed() -> None:
    before = set(multiprocessing.active_children())
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*KeyError: 'only rank one'"):
        run_ranks(_raise_on_rank_one, 2)
    assert set(multiprocessing.active_children()) <= before


def test_dead_and_late_ranks_are_reported() -> None:
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(_die, 1)
    with pytest.raises(RankError, match="did not finish within 4 s"):
        run_ranks(time.sleep, 1, 30, timeout=4)


def test_environment_and_no_process_group() -> None:
    assert run_ranks(_read_environment, 1, environment={"COLOUR": "red"}, initialize=False) == [("red", False)]


def _fail_of_the_other() -> None:
    if dist.get_rank() == 1:
        time.sleep(1)
        raise KeyError("the cause")
    dist.recv(torch.ones(1), 1)


def _hang() -> None:
    time.sleep(600)


def test_the_first_failure_is_shown_and_where_late_ranks_are() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*the cause"):
        run_ranks(_fail_of_the_other, 2)
    with pytest.raises(RankError, match=r"did not finish within 10 s(.|\n)*rank 0 was in(.|\n)*_hang"):
        run_ranks(_hang, 2, timeout=10)


@ranks(2, 3)
@pytest.mark.parametrize("number", [3, 4])
def test_each_rank_runs_a_test_with_its_arguments(number: int, tmp_path: Path) -> None:
    world_size = dist.get_world_size()
    assert number in (3, 4)
    assert torch.initial_seed() == 0
    rank = dist.get_rank()
    for folder in (tmp_path, shared_folder(f"{number}")):
        (folder / str(rank)).touch()
    dist.barrier()
    for folder in (tmp_path, shared_folder(f"{number}")):
        assert sorted(int(file.name) for file in folder.iterdir()) == list(range(world_size))


@ranks(2)
def _raise_when_told(raising: list[int]) -> None:
    if dist.get_rank() in raising:
        raise KeyError("told to")
    dist.all_reduce(torch.ones(1))


def _process() -> int:
    return os.getpid()


def test_ranks_are_kept_until_a_test_fails() -> None:
    first = on_ranks(2, _process)
    _raise_when_told(raising=[])
    assert on_ranks(2, _process) == first
    for raising in ([1], [0, 1]):
        with pytest.raises(pytest.fail.Exception, match=r"rank \d of 2 failed(.|\n)*in _raise_when_told(.|\n)*told to"):
            _raise_when_told(raising=raising)
        assert not set(on_ranks(2, _process)) & set(first)


def test_ranks_that_hang_are_killed_and_shown() -> None:
    hanging = on_ranks(2, _process)
    with pytest.raises(pytest.fail.Exception, match=r"not finish within 5 s\nrank 0 was in(.|\n)*in _hang"):
        on_ranks(2, _hang, seconds=5.0)
    assert not set(hanging) & {child.pid for child in multiprocessing.active_children()}
    on_ranks(2, _process)
