from __future__ import annotations

from pathlib import Path

import pytest

from fp8booster.cli.train.files import write_whole


def test_a_file_is_written_and_written_again(tmp_path) -> None:
    for text in ("one\n", "two\n"):
        write_whole(tmp_path / "a.json", text)
        assert (tmp_path / "a.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def test_a_kill_while_it_is_written_leaves_the_one_before(tmp_path, monkeypatch) -> None:
    file = tmp_path / "a.json"
    write_whole(file, "before")
    write_text = Path.write_text

    def cut_short(path: Path, text: str) -> None:
        write_text(path, text[:2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", cut_short)
    with pytest.raises(KeyboardInterrupt):
        write_whole(file, "after")
    monkeypatch.undo()
    assert file.read_text() == "before"
    write_whole(file, "after")
    assert file.read_text() == "after"
