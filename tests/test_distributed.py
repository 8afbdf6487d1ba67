from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from tests.distributed import RankError, check_ranks, judge, run_each, run_ranks


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
    assert run_ranks(_read_environment, 1, environment={"COLOUR": "red"}, initialize=False) == [("red", False)]


def _no_harm() -> None:
    dist.all_reduce(torch.ones(1))


def _fail_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only rank one")
    dist.all_reduce(torch.ones(1))


def _fail_on_all() -> None:
    raise KeyError("on all ranks")


def _hang_on_rank_zero() -> None:
    if dist.get_rank() == 0:
        time.sleep(600)


def _hang() -> None:
    time.sleep(600)


def _run(*names: str) -> None:
    run_each({name.strip("_"): globals()[name] for name in names}, lambda: torch.manual_seed(0))


def test_checks_go_on_after_one_that_failed_on_all_ranks() -> None:
    found = check_ranks(_run, 2, "_no_harm", "_fail_on_all", initialize=True)
    for outcome in found:
        assert list(outcome) == ["no_harm", "fail_on_all"]
        assert outcome["no_harm"] is None
        assert "KeyError: 'on all ranks'" in outcome["fail_on_all"]


@pytest.mark.parametrize(
    ("name", "limits", "first", "then"),
    [
        ("_fail_on_rank_one", {"failed_seconds": 1.0}, "rank 1: Traceback(.|\n)*only rank one", "rank 0: hung"),
        ("_hang_on_rank_zero", {"ahead_seconds": 1.0}, "rank 0: hung for 1 s in(.|\n)*_hang_on_rank_zero", ""),
        ("_hang", {"seconds": 10.0}, "rank 0: hung for 10 s in(.|\n)*_hang", "rank 1: hung"),
    ],
)
def test_ranks_that_hang_in_a_check_are_killed_and_shown(
    name: str, limits: dict[str, float], first: str, then: str
) -> None:
    start = time.monotonic()
    found = check_ranks(_run, 2, "_no_harm", name, "_fail_on_all", initialize=True, **limits)
    assert time.monotonic() - start < 60
    judge(found, "no_harm")
    with pytest.raises(pytest.fail.Exception, match=f"^{first}(.|\n)*{then}") as raised:
        judge(found, name.strip("_"))
    assert "rank 1: " in str(raised.value) or not then
    with pytest.raises(pytest.fail.Exception, match=f"not run: {name.strip('_')} hung on rank"):
        judge(found, "fail_on_all")


def _fail_of_the_other() -> None:
    if dist.get_rank() == 1:
        time.sleep(1)
        raise KeyError("the cause")
    dist.recv(torch.ones(1), 1)


def test_the_first_failure_is_shown_and_where_late_ranks_are() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 failed(.|\n)*the cause"):
        run_ranks(_fail_of_the_other, 2)
    with pytest.raises(RankError, match=r"did not finish within 10 s(.|\n)*rank 0 was in(.|\n)*_hang"):
        run_ranks(_hang, 2, timeout=10, preloaded=True)
