"""What one and four gloo ranks write, two read and train on with."""

from __future__ import annotations

import pytest

from tests.distributed import Outcomes, check_ranks, judge
from tests.plugins import registry
from tests.plugins.other_ranks import MODES

MODULE = "tests.plugins.other_ranks"


def run(folder: str, part: str) -> None:
    """The checks of one part."""
    checks = [name for name in registry.names(MODULE) if name.startswith(part)]
    registry.run_named(checks, folder)


@pytest.fixture(scope="module", params=[1, 4])
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[list[Outcomes]]:
    """What the writing ranks and the reading ones found."""
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    return [check_ranks(run, request.param, folder, "written"), check_ranks(run, 2, folder, "read")]


@pytest.mark.parametrize("mode", MODES)
def test_two_ranks_train_on_with_what_others_wrote(outcomes: list[list[Outcomes]], mode: str) -> None:
    for part, found in zip(("written", "read"), outcomes, strict=True):
        judge(found, f"{part}[{mode}]")
