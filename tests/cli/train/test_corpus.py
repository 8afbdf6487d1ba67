from __future__ import annotations

import json
import os
import sysconfig
from pathlib import Path

import pytest

from fp8booster.cli.train.corpus import open_corpus

TEXTS = ["first document", "zweites Dokument: äöü"]


@pytest.fixture
def cache(tmp_path) -> Path:
    return tmp_path / "cache"


def read(data: Path | None, cache: Path, column: str = "text") -> list[str]:
    return list(open_corpus(None if data is None else str(data), column, cache).documents())


def test_a_text_file_is_one_document_whatever_its_name(tmp_path, cache):
    file = tmp_path / "book"
    file.write_text(TEXTS[1], encoding="utf-8")
    assert read(file, cache) == [TEXTS[1]]


def test_json_lines_parquet_and_saved_datasets(tmp_path, cache):
    datasets = pytest.importorskip("datasets")
    lines = tmp_path / "rows.jsonl"
    lines.write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    table = datasets.Dataset.from_dict({"body": TEXTS})
    table.to_parquet(tmp_path / "rows.parquet")
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict(train=table).save_to_disk(tmp_path / "splits")
    for name in ("rows.jsonl", "rows.parquet", "saved", "splits"):
        assert read(tmp_path / name, cache, "body") == TEXTS
    with pytest.raises(ValueError, match=r"no column 'text'; .*--text-column: body"):
        read(tmp_path / "rows.parquet", cache)
    lines.write_text('{"body": "no end')
    with pytest.raises(ValueError, match="cannot be read as json"):
        read(lines, cache, "body")


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path, cache):
    (tmp_path / "b.md").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "d.py").write_text("third")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    assert read(tmp_path, cache) == ["first", "second", "third"]


def test_without_data_the_standard_library_is_read_and_its_tests_are_not(cache):
    corpus = open_corpus(None, "text", cache)
    argparse = Path(sysconfig.get_paths()["stdlib"], "argparse.py").read_text(encoding="utf-8")
    assert argparse in corpus.documents()
    assert corpus.size > 5e6
    assert corpus.identity == open_corpus(None, "text", cache).identity


def test_the_identity_follows_the_content(tmp_path, cache):
    file = tmp_path / "a.txt"
    identities = []
    for text in ("one", "two", "one"):
        file.write_text(text)
        identities.append(open_corpus(str(file), "text", cache).identity)
    assert identities[0] == identities[2] != identities[1]


def test_what_cannot_be_read_is_told(tmp_path, cache):
    with pytest.raises(FileNotFoundError, match="does not exist; give a file"):
        read(tmp_path / "missing.txt", cache)
    empty = tmp_path / "empty.txt"
    empty.touch()
    with pytest.raises(ValueError, match="is empty; point --data at a file with text"):
        read(empty, cache)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"abc\xff\xfe")
    with pytest.raises(ValueError, match=r"binary.txt is not UTF-8 text \(byte 3\)"):
        read(binary, cache)
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ValueError, match=r"holds no \.txt"):
        read(folder, cache)


def test_a_pipe_is_told_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(ValueError, match=f"--data {path} is a pipe or a device, and text is read more"):
            open_corpus(str(path), "text", tmp_path)
