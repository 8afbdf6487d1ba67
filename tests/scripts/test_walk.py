"""The hot paths stay short: files of the package that they enter, and moves between them, as scripts/walk.py counts."""

from __future__ import annotations

import pytest

from scripts import walk
from tests.distributed import ranks

FILES_AND_MOVES = {
    walk.FORWARD: (10, 17),
    walk.BACKWARD: (7, 10),
    walk.MERGED: (17, 30),
    walk.PUBLISH: (12, 30),
    walk.REDUCTION: (17, 45),
    walk.CONFIGURE: (48, 187),
}
"""Limits: what a lone layer takes, and a little more than the other paths do. Whoever shortens one lowers its limit."""


def assert_within_limits(walks: dict[str, walk.Walk]) -> None:
    for title, each in walks.items():
        files, moves = FILES_AND_MOVES[title]
        assert each.calls, f"{title} was not walked"
        stays = "\n".join(f"{file}: {', '.join(names)}" for file, names in each.stays())
        assert each.files <= files, f"{title} enters {each.files} files, of at most {files}:\n{stays}"
        assert each.moves <= moves, f"{title} moves {each.moves} times, of at most {moves}:\n{stays}"


@pytest.mark.parametrize("paths", [walk.walk_lone_layer, walk.walk_merged_layers])
def test_layers_enter_few_files(paths) -> None:
    assert_within_limits(paths())


@ranks(2)
def test_zero_enters_few_files() -> None:
    assert_within_limits(walk.walk_zero())


def test_a_move_is_a_call_in_another_file() -> None:
    each = walk.Walk()
    each.calls = [walk.Call(file, "f") for file in ("a.py", "a.py", "b.py", "a.py", "c.py")]
    assert (each.files, each.moves) == (3, 4)
    assert each.stays()[0] == ("a.py", ["f", "f"])
