from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from fp8booster.checkpoints import (
    FILES,
    checkpoints_in,
    is_finite,
    last_finite,
    named_step,
    new_checkpoint,
    newest_checkpoint,
    what_is_broken,
    write_manifest,
)

SIZE = 3 << 20


def save(root: Path, step: int, keep: int = 0, text: str = "whole", finite: bool = True) -> None:
    with new_checkpoint(root, step, keep=keep, finite=finite) as folder:
        (folder / "weights").write_text(text)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_the_last_checkpoints_stay(tmp_path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000003"
    save(tmp_path, 4)
    assert [named_step(path) for path in checkpoints_in(tmp_path)] == [2, 3, 4]


def test_the_last_finite_one_stays_until_there_is_another(tmp_path) -> None:
    for step in (1, 2):
        save(tmp_path, step, keep=1)
    for step in (3, 4):
        save(tmp_path, step, keep=1, finite=False)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000004"
    assert [is_finite(path) for path in checkpoints_in(tmp_path)] == [True, False]
    assert last_finite(checkpoints_in(tmp_path)) == tmp_path / "step-00000002"
    assert what_is_broken(tmp_path / "step-00000004") is None
    save(tmp_path, 5, keep=1)
    assert names(tmp_path) == ["step-00000005"]
    save(tmp_path, 5, keep=1, finite=False)
    assert last_finite(checkpoints_in(tmp_path)) is None
    save(tmp_path, 6, keep=1, finite=False)
    assert names(tmp_path) == ["step-00000006"]


def test_steps_are_numbers_not_names(tmp_path) -> None:
    save(tmp_path, 99_999_999)
    save(tmp_path, 100_000_000)
    assert named_step(newest_checkpoint(tmp_path)) == 100_000_000


def test_a_checkpoint_of_a_later_step_does_not_cost_the_one_just_written(tmp_path) -> None:
    save(tmp_path, 9, keep=1)
    save(tmp_path, 3, keep=1)
    assert names(tmp_path) == ["step-00000003", "step-00000009"]


def test_stray_folders_are_no_checkpoints(tmp_path) -> None:
    save(tmp_path, 1)
    for name in ("step-abc", "step-9", "step-00000007-copy", ".step-00000008.fp8booster-partial", ".step-00000008"):
        shutil.copytree(tmp_path / "step-00000001", tmp_path / name)
    (tmp_path / "step-00000009").write_text("a file")
    assert checkpoints_in(tmp_path) == [tmp_path / "step-00000001"]
    assert newest_checkpoint(tmp_path / "absent") is None
    assert named_step(tmp_path / "step-abc") is None


def test_what_is_not_finished_is_none_and_is_removed_by_the_next(tmp_path) -> None:
    save(tmp_path, 1)
    with pytest.raises(TypeError), new_checkpoint(tmp_path, 2) as folder:
        (folder / "weights").write_text(None)
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000001"
    save(tmp_path, 3)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_folders_of_other_names_are_never_removed(tmp_path) -> None:
    own = [".step-notes", ".step-00000001.partial", ".step-00000001.former", ".step-00000001.old", "step-00000007-copy"]
    for name in own:
        (tmp_path / name).mkdir()
        (tmp_path / name / "own").write_text("kept")
    for step in (1, 1, 2):
        save(tmp_path, step, keep=1)
    assert names(tmp_path) == sorted([*own, "step-00000002"])
    assert all((tmp_path / name / "own").read_text() == "kept" for name in own)
    assert checkpoints_in(tmp_path) == [tmp_path / "step-00000002"]


def test_a_kill_between_the_two_renames_keeps_what_was_there(tmp_path, monkeypatch) -> None:
    save(tmp_path, 1, text="before")
    rename = Path.rename

    def killed(path: Path, target: Path) -> Path:
        if path.name.endswith("-partial"):
            raise KeyboardInterrupt
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, text="after")
    monkeypatch.undo()
    assert (newest_checkpoint(tmp_path) / "weights").read_text() == "before"
    save(tmp_path, 2, keep=2)
    assert [named_step(path) for path in checkpoints_in(tmp_path)] == [1, 2]
    save(tmp_path, 3, keep=2)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_a_kill_while_an_old_one_is_removed_leaves_no_half(tmp_path, monkeypatch) -> None:
    save(tmp_path, 1)

    def killed(path: Path, **_) -> None:
        if path.exists():
            (path / "weights").unlink()
            raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2, keep=1)
    monkeypatch.undo()
    assert checkpoints_in(tmp_path) == [tmp_path / "step-00000002"]


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
    assert FILES not in json.loads((checkpoint / FILES).read_text())


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
    (checkpoint / FILES).write_text(text)
    assert FILES in what_is_broken(checkpoint)


def test_a_checkpoint_of_an_earlier_version_has_no_list(checkpoint: Path) -> None:
    assert json.loads((checkpoint / FILES).read_text()).keys() == {"model/weights", "state.json"}
    (checkpoint / FILES).unlink()
    assert what_is_broken(checkpoint) is None
