from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from fp8booster.files import new_folder, put_in_place, sync_folder, write_whole


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
    assert events == [("sync", ".a.json.1.partial"), ("move", ".a.json.1.partial"), ("sync", tmp_path.name)]


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
    put_in_place(partial, final, former=tmp_path / "former")
    assert (final / "name").read_text() == "partial"
    assert [path.name for path in tmp_path.iterdir()] == ["final"]
    assert events == [("move", "final"), ("move", "partial"), ("sync", tmp_path.name)]


def test_a_new_folder_appears_when_it_is_whole_and_on_the_disk(tmp_path, events) -> None:
    with new_folder(tmp_path / "a" / "b") as partial:
        (partial / "c").touch()
        assert [path.name for path in (tmp_path / "a").iterdir()] == [".b.1.partial"]
    assert [path.name for path in (tmp_path / "a").rglob("*")] == ["b", "c"]
    assert events == [("sync", "c"), ("sync", ".b.1.partial"), ("move", ".b.1.partial"), ("sync", "a")]


def test_what_a_new_folder_held_is_removed_where_it_is_not_finished(tmp_path) -> None:
    with pytest.raises(TypeError), new_folder(tmp_path / "a") as partial:
        (partial / "b").write_text(None)
    assert not list(tmp_path.iterdir())
    with pytest.raises(FileExistsError), new_folder(tmp_path / "a") as partial:
        (tmp_path / "a").mkdir()
    assert [path.name for path in tmp_path.rglob("*")] == ["a"]


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_has_the_name_of_something_unfinished_is_left_alone(tmp_path, kind) -> None:
    before = {tmp_path / name for name in (".a.1.partial", ".a.2.partial", "a.partial", ".a.former")}
    for path in before:
        if kind == "folder":
            path.mkdir()
            (path / "own").write_text("kept")
        elif kind == "file":
            path.write_text("kept")
        else:
            path.symlink_to("gone")
    for write in (write_folder, write_file, fail):
        write(tmp_path / "a")
        assert {*tmp_path.iterdir()} - {tmp_path / "a"} == before
    for path in before:
        assert (
            (path / "own" if kind == "folder" else path).read_text() == "kept" if kind != "link" else path.is_symlink()
        )


def write_folder(path: Path) -> None:
    with new_folder(path) as folder:
        (folder / "new").touch()
    assert [each.name for each in path.iterdir()] == ["new"]
    shutil.rmtree(path)


def write_file(path: Path) -> None:
    write_whole(path, "new")
    assert path.read_text() == "new"
    path.unlink()


def fail(path: Path) -> None:
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    with pytest.raises(TypeError), new_folder(path):
        raise TypeError


def test_a_long_name_is_written(tmp_path) -> None:
    write_whole(tmp_path / ("ä" * 120), "text")
    assert (tmp_path / ("ä" * 120)).read_text() == "text"
