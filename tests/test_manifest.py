"""The list of a checkpoint's files finds what is not as it was saved."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from fp8booster.checkpoints import new_checkpoint
from fp8booster.manifest import NAME, what_is_broken, write_manifest

SIZE = 3 << 20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """That of step 4, beside one of step 2 with files of equal names and sizes."""
    for step in (2, 4):
        with new_checkpoint(tmp_path, step) as folder:
            (folder / "model").mkdir()
            (folder / "model" / "weights").write_bytes(bytes([step]) * SIZE)
            (folder / "state.json").write_text(f'{{"step": {step}}}')
    return tmp_path / "step-00000004"


def test_what_was_saved_is_whole(checkpoint: Path) -> None:
    assert what_is_broken(checkpoint) is None
    (checkpoint / "notes.txt").write_text("more does no harm")
    assert what_is_broken(checkpoint) is None


def test_a_list_that_is_written_anew_is_not_in_itself(checkpoint: Path) -> None:
    (checkpoint / "more").write_text("a file of another length of list")
    write_manifest(checkpoint)
    assert what_is_broken(checkpoint) is None
    assert NAME not in json.loads((checkpoint / NAME).read_text())


def test_a_cut_file_is_named_with_its_sizes(checkpoint: Path) -> None:
    os.truncate(checkpoint / "model" / "weights", SIZE // 2)
    assert what_is_broken(checkpoint) == f"{checkpoint} is broken: model/weights has {SIZE // 2} of {SIZE} bytes"


def test_a_missing_file_is_named(checkpoint: Path) -> None:
    (checkpoint / "state.json").unlink()
    assert what_is_broken(checkpoint) == f"{checkpoint} is broken: state.json is missing"


def test_a_file_of_another_step_is_named(checkpoint: Path) -> None:
    other = checkpoint.with_name("step-00000002")
    (checkpoint / "model" / "weights").write_bytes((other / "model" / "weights").read_bytes())
    assert "model/weights is of another step, or changed" in what_is_broken(checkpoint)


@pytest.mark.parametrize("place", [0, SIZE - 1])
def test_a_changed_end_is_found(checkpoint: Path, place: int) -> None:
    with (checkpoint / "model" / "weights").open("r+b") as stream:
        stream.seek(place)
        stream.write(b"\xff")
    assert "model/weights is of another step, or changed" in what_is_broken(checkpoint)


@pytest.mark.parametrize("text", ["", "null", "[]", '{"state.json": 3}', "\x00"])
def test_a_list_that_cannot_be_read_is_named(checkpoint: Path, text: str) -> None:
    (checkpoint / NAME).write_text(text)
    assert NAME in what_is_broken(checkpoint)


def test_a_checkpoint_of_an_earlier_version_has_no_list(checkpoint: Path) -> None:
    assert json.loads((checkpoint / NAME).read_text()).keys() == {"model/weights", "state.json"}
    (checkpoint / NAME).unlink()
    assert what_is_broken(checkpoint) is None
