from __future__ import annotations

import time

import pytest

from fp8booster.cli.train.events import COMMAND_VARIABLE
from fp8booster.cli.train.worker import end_with_the_command
from tests.distributed import RankError, run_ranks


def start_late() -> None:
    end_with_the_command()
    time.sleep(600)


def test_a_rank_whose_command_has_gone_before_it_looked_ends() -> None:
    absent = {COMMAND_VARIABLE: "0"}
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(start_late, 1, initialize=False, environment=absent)
