from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest

from fp8booster.cli.train import data as data_module
from fp8booster.cli.train.data import folder_identity, load_tokenizer, open_corpus, open_tokens, prepare_tokens
from fp8booster.cli.train.model_folder import load_config
from fp8booster.cli.train.options import TrainOptions

TEXT = "def area(radius):\n    return 3.14 * radius ** 2  # π r²\n" * 40


@pytest.fixture
def options(tmp_path) -> TrainOptions:
    (tmp_path / "data").mkdir()
    for name in ("a.py", "b.py"):
        (tmp_path / "data" / name).write_text(f"# {name}\n{TEXT}", encoding="utf-8")
    return TrainOptions(data=str(tmp_path / "data"), cache=str(tmp_path / "cache"), vocabulary=300)


def prepare(options: TrainOptions) -> tuple:
    said: list[str] = []
    return prepare_tokens(options, said.append), said


def test_tokens_decode_to_the_documents_each_with_an_end(options):
    tokens, _ = prepare(options)
    tokenizer = load_tokenizer(str(tokens.tokenizer))
    ids = tokens.open()
    assert len(ids) == tokens.count
    assert tokens.vocabulary == len(tokenizer) <= 300
    assert tokenizer.decode(ids) == f"# a.py\n{TEXT}<|endoftext|># b.py\n{TEXT}<|endoftext|>"


def test_transformers_4_reads_a_tokenizer_that_5_has_kept(options, monkeypatch):
    import transformers

    as_5_calls_it = type("TokenizersBackend", (transformers.PreTrainedTokenizerFast,), {})
    monkeypatch.setattr(transformers, "PreTrainedTokenizerFast", as_5_calls_it)
    tokens, _ = prepare(options)
    config = json.loads((tokens.tokenizer / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert config["tokenizer_class"] == "PreTrainedTokenizerFast"


def test_a_small_text_is_told_of_in_its_size(options):
    _, said = prepare(options)
    assert said[-1].startswith("encoding ")
    assert " 0.00" in said[-1].partition(": ")[2]


def test_the_file_is_made_once_for_equal_text_and_vocabulary(options):
    tokens, said = prepare(options)
    assert any("training a tokenizer" in text for text in said)
    again, said = prepare(options)
    assert again == tokens
    assert not any("training a tokenizer" in text for text in said)
    other, _ = prepare(dataclasses.replace(options, vocabulary=320))
    assert other.identity != tokens.identity
    Path(options.data, "a.py").write_text(TEXT, encoding="utf-8")
    changed, _ = prepare(options)
    assert changed.identity != tokens.identity


def test_the_name_is_that_of_the_text_that_was_given(options, tmp_path):
    first, _ = prepare(options)
    Path(options.data).rename(tmp_path / "moved")
    other, said = prepare(dataclasses.replace(options, data=str(tmp_path / "moved")))
    assert other.folder == first.folder
    assert not any("encoding" in text for text in said)
    assert (first.name, other.name) == (options.data, str(tmp_path / "moved"))


def test_a_model_folder_brings_its_tokenizer(options, tmp_path):
    tokens, _ = prepare(options)
    folder = tmp_path / "model"
    load_tokenizer(str(tokens.tokenizer)).save_pretrained(folder)
    load_config("tiny", tokens.vocabulary, 64).save_pretrained(folder)
    own, said = prepare(dataclasses.replace(options, model=str(folder)))
    assert not any("training a tokenizer" in text for text in said)
    assert own.open().tolist() == tokens.open().tolist()


def test_a_tokenizer_that_leaves_numbers_out_has_room_for_its_last_one(options, tmp_path):
    tokens, _ = prepare(options)
    folder, last = tmp_path / "model", 70000
    load_tokenizer(str(tokens.tokenizer)).save_pretrained(folder)
    file = folder / "tokenizer.json"
    made = json.loads(file.read_text())
    for each in (*made["added_tokens"], made["model"]["vocab"]):
        each.update({"id": last} if "id" in each else {"<|endoftext|>": last})
    file.write_text(json.dumps(made))
    load_config("tiny", last + 1, 64).save_pretrained(folder)
    own, _ = prepare(dataclasses.replace(options, model=str(folder)))
    assert own.vocabulary == last + 1
    assert own.open().max() == last


def test_a_file_is_the_same_in_a_folder_of_another_name_and_no_other_in_one_of_the_same(options, tmp_path):
    tokens, _ = prepare(options)
    other, _ = prepare(dataclasses.replace(options, vocabulary=options.vocabulary - 1))
    found = []
    for each, parent in ((tokens, "a"), (other, "b")):
        copied = shutil.copytree(each.folder, tmp_path / parent / "tokens")
        found.append(open_tokens(copied, "copy it again").identity)
    assert found == [tokens.identity, other.identity]
    assert tokens.identity != other.identity


def test_an_unfinished_file_is_made_anew(options):
    tokens, _ = prepare(options)
    partial = tokens.folder.with_name(f".{tokens.identity}.1.partial")
    tokens.folder.rename(partial)
    (partial / "tokens.bin").write_bytes(b"cut short")
    again, _ = prepare(options)
    assert len(again.open()) == tokens.count
    assert not partial.exists()


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("tokens.json", b"{", r"tokens\.json is not JSON, or not all of it"),
        ("tokens.json", b'{"count": 3}', r"tokens\.json has no 'vocabulary'"),
        ("tokens.bin", b"cut short", r"tokens\.bin has 9 bytes of \d+"),
        ("tokens.bin", None, r"tokens\.bin has 0 bytes of \d+"),
    ],
)
def test_a_kept_file_that_is_wrong_is_named_with_the_remedy(options, file, content, says):
    tokens, _ = prepare(options)
    if content is None:
        (tokens.folder / file).unlink()
    else:
        (tokens.folder / file).write_bytes(content)
    with pytest.raises(ValueError, match=rf"{says}.*; remove the folder {tokens.folder}, which is made anew"):
        prepare(options)


@pytest.mark.parametrize("text", ["null", "{", "[1]", '{"model": {"type": "BPE"}}'])
def test_a_tokenizer_that_cannot_be_read_is_told(options, tmp_path, text):
    tokens, _ = prepare(options)
    folder = tmp_path / "model"
    load_tokenizer(str(tokens.tokenizer)).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(ValueError, match=r"The tokenizer in .*model cannot be read .*; save it again") as caught:
        load_tokenizer(str(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("vocabulary", [256, 2**16, 2**16 + 1, 2**17, 2**31])
def test_every_token_fits_its_file(vocabulary: int) -> None:
    dtype = np.dtype(data_module._dtype(vocabulary))
    assert np.iinfo(dtype).max >= vocabulary - 1
    assert dtype.itemsize == (2 if vocabulary <= 2**16 else 4)


def test_a_tokenizer_is_told_by_all_files_that_it_is_read_from(tmp_path):
    (tmp_path / "vocab.json").write_text("{}")
    found = [folder_identity(str(tmp_path))]
    for text in ("a b", "a c"):
        (tmp_path / "merges.txt").write_text(text)
        found.append(folder_identity(str(tmp_path)))
    assert len(set(found)) == 3
    # tokenizer.json holds the merges too
    (tmp_path / "tokenizer.json").write_text("{}")
    with_it = folder_identity(str(tmp_path))
    (tmp_path / "merges.txt").unlink()
    assert folder_identity(str(tmp_path)) == with_it


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
