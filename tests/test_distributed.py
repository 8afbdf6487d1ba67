from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, run_ranks


def _sum_of_ranks(offset: float) -> torch.Tensor:
    total = torch.tensor([dist.get_rank() + offset])
    dist.all_reduce(total)
    return total


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only rank one")
    time.sleep(60)


def _die() -> None:
    os._exit(3)


def _read_environment() -> tuple[str, bool]:
    return os.environ["COLOUR"], dist.is_initialized()


def test_values_come_back_in_rank_order() -> None:
    values = run_ranks(_sum_of_ranks, 3, 0.5)
    assert [value.item() for value in values] == [4.5, 4.5, 4.5]


def test_failing_rank_is_named_and_the_others_are_killed() -> None:
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*KeyError: 'only rank one'"):
        run_ranks(_raise_on_rank_one, 2)
    assert time.monotonic() - start < 50


def test_dead_and_late_ranks_are_reported() -> None:
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(_die, 1)
    with pytest.raises(RankError, match="did not finish within 4 s"):
        run_ranks(time.sleep, 1, 30, timeout=4)


def test_environment_and_no_process_group() -> None:
    assert run_ranks(_read_environment, 1, environment={"COLOUR": "red"}, initialize=False) == [
        ("red", False)
    ]
