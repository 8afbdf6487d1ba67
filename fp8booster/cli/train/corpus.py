"""Where text comes from: files, folders, saved datasets, or the sources of Python's standard library."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from datasets import Dataset

_TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File names whose text the `datasets` library reads, and its name for the format."""

_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""What a folder is searched for, beside tables; a single file may have any name."""

_NOT_SOURCES = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
_DATASET_MARKS = ("state.json", "dataset_dict.json")
_READ = 1 << 20  # bytes
_ROWS = 256  # rows read at once from a table


@dataclass(frozen=True)
class Corpus:
    """Documents, in a fixed order."""

    name: str
    """For people: where the text comes from."""
    identity: str
    """Digest of the content: equal for equal documents in the same order."""
    size: int
    """Bytes on disk."""
    documents: Callable[[], Iterator[str]]
    """Reads all documents anew."""


def open_corpus(data: str | None, text_column: str, cache: Path) -> Corpus:
    """The corpus that `--data` names; None: the `.py` files of the standard library, its tests left out.

    Raises FileNotFoundError, or ValueError for files without text, each with a sentence that says what to do.
    """
    if data is None:
        return _files_corpus("the sources of Python's standard library", _standard_library(), text_column, cache)
    path = Path(data)
    if not path.exists():
        raise FileNotFoundError(f"--data {data} does not exist; give a file, a folder or a saved dataset.")
    if path.is_dir():
        if any((path / mark).is_file() for mark in _DATASET_MARKS):
            return _saved_corpus(path, text_column)
        files = [f for f in sorted(path.rglob("*")) if f.is_file() and f.suffix in (*_TABLES, *_TEXT_SUFFIXES)]
        if not files:
            raise ValueError(
                f"The folder {data} holds no {', '.join((*_TEXT_SUFFIXES, *_TABLES))} file and is no saved dataset; "
                "point --data at the text."
            )
    elif path.is_file():
        files = [path]
    else:
        raise ValueError(
            f"--data {data} is a pipe or a device, and text is read more than once; write it to a file and give that."
        )
    return _files_corpus(data, files, text_column, cache)


def _standard_library() -> list[Path]:
    files = []
    for folder, folders, names in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(name for name in folders if name not in _NOT_SOURCES)
        files += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return files


def _files_corpus(name: str, files: list[Path], text_column: str, cache: Path) -> Corpus:
    digest = hashlib.sha256(text_column.encode())
    for file in files:
        digest.update(_file_digest(file))
    size = sum(file.stat().st_size for file in files)
    if size == 0:
        raise ValueError(f"{name} is empty; point --data at a file with text.")

    def documents() -> Iterator[str]:
        for file in files:
            if file.suffix in _TABLES:
                yield from _rows(_read_table(file, cache), str(file), text_column)
            elif file.stat().st_size > 0:
                yield _read_text(file)

    return Corpus(name, digest.hexdigest(), size, documents)


def _file_digest(file: Path) -> bytes:
    digest = hashlib.sha256(file.suffix.encode())
    try:
        with file.open("rb") as stream:
            while block := stream.read(_READ):
                digest.update(block)
    except OSError as error:
        raise OSError(f"{file} cannot be read ({error.strerror}); check its permissions.") from None
    return digest.digest()


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{file} is not UTF-8 text (byte {error.start}); convert it, or give JSON lines or Parquet."
        ) from None


def _read_table(file: Path, cache: Path) -> Dataset:
    datasets = _import_datasets(f"reading {file}")
    try:
        return datasets.load_dataset(
            _TABLES[file.suffix], data_files=str(file), split="train", cache_dir=str(cache / "datasets")
        )
    except Exception as error:  # the library raises many types for a file it cannot parse
        cause = error.__cause__ or error
        raise ValueError(f"{file} cannot be read as {_TABLES[file.suffix]} ({cause}); check the file.") from None


def _saved_corpus(path: Path, text_column: str) -> Corpus:
    datasets = _import_datasets(f"reading the saved dataset {path}")
    dataset = datasets.load_from_disk(str(path))
    if isinstance(dataset, datasets.DatasetDict):
        if "train" not in dataset:
            raise ValueError(
                f"The saved dataset {path} has the splits {', '.join(dataset)} and no 'train'; "
                f"point --data at one of them, as {path / next(iter(dataset))}."
            )
        dataset = dataset["train"]
    identity = hashlib.sha256(f"{dataset._fingerprint} {text_column}".encode()).hexdigest()
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return Corpus(str(path), identity, size, lambda: _rows(dataset, str(path), text_column))


def _rows(table: Dataset, name: str, text_column: str) -> Iterator[str]:
    if text_column not in table.column_names:
        raise ValueError(
            f"{name} has no column {text_column!r}; name the column with the text with --text-column: "
            f"{', '.join(table.column_names)}."
        )
    for rows in table.iter(batch_size=_ROWS):
        for text in rows[text_column]:
            if not isinstance(text, str):
                raise ValueError(
                    f"The column {text_column!r} of {name} holds {type(text).__name__}, not text; "
                    "name another with --text-column."
                )
            yield text


def _import_datasets(purpose: str):
    try:
        import datasets
    except ImportError:
        raise ValueError(f"For {purpose} install the datasets library: pip install 'fp8booster[data]'.") from None
    datasets.disable_progress_bars()
    return datasets
