from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from fp8booster.files import former_of, put_in_place, sync_folder, write_whole


@pytest.fixture
def events(monkeypatch) -> list[tuple[str, str]]:
    """What is synced and renamed, in order, by name."""
    found: list[tuple[str, str]] = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def noted_fsync(descriptor: int) -> None:
        found.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))
        fsync(descriptor)

    def noted(name, move):
        def call(path: Path, target: Path) -> Path:
            found.append((name, path.name))
            return move(path, target)

        return call

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", noted("move", rename))
    monkeypatch.setattr(Path, "replace", noted("move", replace))
    return found


def test_a_file_is_written_and_written_again(tmp_path) -> None:
    for text in ("one\n", "two\n"):
        write_whole(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_file_is_on_the_disk_before_it_takes_its_place(tmp_path, events) -> None:
    write_whole(tmp_path / "a.json", "text")
    assert events == [("sync", "a.json.partial"), ("move", "a.json.partial"), ("sync", tmp_path.name)]


def test_a_kill_while_it_is_written_leaves_the_one_before(tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.json"
    write_whole(file, "before")

    def killed(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "after")
    monkeypatch.undo()
    assert file.read_text() == "before"
    write_whole(file, "after")
    assert file.read_text() == "after"


def test_a_folder_is_synced_with_all_that_it_holds(tmp_path, events) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").write_text("text")
    sync_folder(tmp_path / "a")
    assert sorted(events) == [("sync", "a"), ("sync", "b"), ("sync", "c")]


def test_a_disk_that_takes_no_more_is_told_and_one_that_syncs_no_folders_is_not(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")

    def refuse(number: int):
        def fsync(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        sync_folder(tmp_path)
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    with pytest.raises(OSError, match="Invalid argument"):
        sync_folder(tmp_path)
    (tmp_path / "file").unlink()
    sync_folder(tmp_path)


def test_a_folder_replaces_another(tmp_path, events) -> None:
    final, partial = tmp_path / "final", tmp_path / "partial"
    for folder in (final, partial):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    put_in_place(partial, final)
    assert (final / "name").read_text() == "partial"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert events == [("move", "final"), ("move", "partial"), ("sync", tmp_path.name)]
    assert former_of(final).name == ".final.former"
