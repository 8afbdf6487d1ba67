"""The data of a run: text from files, folders or saved datasets, a tokenizer, and the token file that they give.

Without `--data` the text is the sources of Python's standard library. Without a tokenizer in the model's folder a
byte-level BPE is trained on the run's own text.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from filelock import FileLock

from fp8booster.files import new_folder
from fp8booster.reading import first_line, read_record

from .model_folder import is_folder
from .options import TrainOptions

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedTokenizerBase

_TABLES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
"""File names whose text the `datasets` library reads, and its name for the format."""

_TEXT_SUFFIXES = (".txt", ".text", ".md", ".rst", ".py")
"""Files that a folder is searched for, beside tables; a single file may have any name."""

_NOT_SOURCES = {"test", "tests", "site-packages", "dist-packages", "__pycache__"}
_DATASET_MARKS = ("state.json", "dataset_dict.json")
_READ = 1 << 20  # bytes
_ROWS = 256  # rows read at once from a table
_BATCH_BYTES = 4 << 20  # text encoded at once
_TRAINING_BYTES = 256 << 20  # text that a tokenizer is trained on at most
_FORMAT = 1  # raised when the token file's content changes

END = "<|endoftext|>"
"""Ends every document under a trained tokenizer."""

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_TOKENIZER_PARTS = ("merges.txt", "vocab.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model")


@dataclass(frozen=True)
class TokenFile:
    """Text as token ids, and the tokenizer that made them."""

    folder: Path
    name: str
    """For people: where the text comes from."""
    identity: str
    """Digest of text and tokenizer."""
    vocabulary: int
    """Tokens that the tokenizer knows."""
    count: int
    """Tokens in the file."""

    def open(self) -> np.ndarray:
        """Map the ids  [count] from disk."""
        return np.memmap(self.ids, dtype=_dtype(self.vocabulary), mode="r", shape=(self.count,))

    @property
    def ids(self) -> Path:
        return self.folder / "tokens.bin"

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer, in Hugging Face's format."""
        return self.folder / "tokenizer"


def prepare_tokens(options: TrainOptions, tell: Callable[[str], None], tokenizer: str | None = None) -> TokenFile:
    """Return the token file for the options' text and tokenizer, made now if the cache has none.

    Safe to call from many processes at once: one makes the file, the others wait for it.

    Args:
        tell: gets a line on what is done.
        tokenizer: a folder of one; None: the model's, or one that is trained on the text.
    """
    cache = Path(options.cache)
    tell("reading the text")
    corpus = open_corpus(options.data, options.text_column, cache)
    if tokenizer is None and is_folder(options.model) and folder_has_tokenizer(options.model):
        tokenizer = options.model
    origin = folder_identity(tokenizer) if tokenizer is not None else f"byte-level BPE {options.vocabulary}"
    identity = hashlib.sha256(f"{_FORMAT} {corpus.identity} {origin}".encode()).hexdigest()[:24]
    folder = cache / identity
    cache.mkdir(parents=True, exist_ok=True)
    # ranks of a launcher, and other runs, may want the same file now
    with FileLock(cache / f"{identity}.lock"):
        if not folder.exists():
            for left in cache.glob(f".{identity}.*.partial"):  # after a kill: while the lock is held, nobody writes it
                shutil.rmtree(left)
            # a kill must not leave a short file that the next run trusts
            with new_folder(folder) as partial:
                _write_tokens(partial, corpus, identity, options, tokenizer, tell)
    made = open_tokens(folder, f"remove the folder {folder}, which is made anew then")
    return replace(made, name=corpus.name)  # another file may have had the same text


def open_tokens(folder: Path, remedy: str) -> TokenFile:
    """Return the token file in a folder, whatever its name.

    Raises ValueError for one that is not whole, with the remedy.
    """
    keys = {"vocabulary": int, "count": int, "text": str, "identity": str}
    facts = read_record(folder / "tokens.json", keys, remedy)
    file = TokenFile(folder, facts["text"], facts["identity"], facts["vocabulary"], facts["count"])
    expected = file.count * np.dtype(_dtype(file.vocabulary)).itemsize
    found = file.ids.stat().st_size if file.ids.exists() else 0
    if found != expected or not file.tokenizer.is_dir():
        raise ValueError(f"{file.ids} has {found} bytes of {expected}, or its tokenizer is gone; {remedy}.")
    return file


def _write_tokens(
    folder: Path, corpus: Corpus, identity: str, options: TrainOptions, given: str | None, tell: Callable[[str], None]
) -> None:
    if given is not None:
        tokenizer = load_tokenizer(given)
        # a copy, so that the file and its tokenizer stay together when the model moves
        _keep(tokenizer, folder / "tokenizer")
    else:
        tell(f"training a tokenizer of {options.vocabulary} tokens on {corpus.name}")
        texts = next(_grouped(corpus.documents(), _TRAINING_BYTES), [])
        train_tokenizer(texts, options.vocabulary, folder / "tokenizer")
        tokenizer = load_tokenizer(str(folder / "tokenizer"))

    vocabulary = 1 + max(tokenizer.get_vocab().values())  # not its length: numbers may be left out
    count = done = 0
    with (folder / "tokens.bin").open("wb") as stream:
        for texts in _grouped(corpus.documents(), _BATCH_BYTES):
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            # an end behind each document, for a sequence of training may hold several
            ids = np.concatenate([np.array([*document, tokenizer.eos_token_id]) for document in encoded])
            stream.write(ids.astype(_dtype(vocabulary)).tobytes())
            count += len(ids)
            done += sum(map(len, texts))
            tell(f"encoding {corpus.name}: {done / 1e6:.3g} of about {corpus.size / 1e6:.3g} MB")
    (folder / "tokens.json").write_text(
        json.dumps({"vocabulary": vocabulary, "count": count, "text": corpus.name, "identity": identity}) + "\n"
    )


def _dtype(vocabulary: int) -> type[np.unsignedinteger]:
    # half of the disk and of what a step reads, for all but the largest vocabularies
    return np.uint16 if vocabulary <= 1 << 16 else np.uint32


def _grouped(documents: Iterable[str], size: int) -> Iterator[list[str]]:
    group: list[str] = []
    held = 0
    for document in documents:
        group.append(document)
        held += len(document)
        if held >= size:
            yield group
            group, held = [], 0
    if group:
        yield group


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
    """Return the corpus that `--data` names; None: the `.py` files of the standard library, its tests left out.

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
    # another column of the same file is another text
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
    # the suffix decides how the bytes are read
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


def _import_datasets(purpose: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise ValueError(f"For {purpose} install the datasets library: pip install 'fp8booster[data]'.") from None
    datasets.disable_progress_bars()
    return datasets


def folder_has_tokenizer(folder: str) -> bool:
    """Tell whether a model's folder brings its own tokenizer."""
    return any((Path(folder) / name).is_file() for name in _TOKENIZER_FILES)


def folder_identity(folder: str) -> str:
    """Return the digest of the tokenizer's files in a model's folder.

    With `tokenizer.json` those that it stands for are not read.
    """
    digest = hashlib.sha256()
    parts = () if (Path(folder) / _TOKENIZER_FILES[0]).is_file() else _TOKENIZER_PARTS
    for name in (*_TOKENIZER_FILES, "tokenizer_config.json", "special_tokens_map.json", *parts):
        file = Path(folder) / name
        if file.is_file():
            digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer kept in a folder.

    Raises ValueError when transformers cannot read it, or it has no end-of-text token to part documents with.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types for a file that they cannot parse
        raise ValueError(
            f"The tokenizer in {folder} cannot be read ({first_line(error)}); save it again there (save_pretrained), "
            "without code of its own."
        ) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer in {folder} has no eos_token; set one and save the tokenizer again.")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE of at most `vocabulary` tokens on the documents and keep it in `folder`.

    Byte level: every text can be encoded, with no unknown token (Radford et al., 2019, section 2.2).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_input_names=["input_ids", "attention_mask"],  # decoders refuse the token types of the default
    )
    _keep(fast, folder)


def _keep(tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save a tokenizer as transformers 4 and 5 read it: versions share the cache."""
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    record = json.loads(file.read_text(encoding="utf-8"))
    if record.get("tokenizer_class") == "TokenizersBackend":  # what 5 calls the class, and reads by both names
        file.write_text(json.dumps(record | {"tokenizer_class": "PreTrainedTokenizerFast"}, indent=2), encoding="utf-8")
