"""The token file of a run: made once for each pair of text and tokenizer, kept in the cache, read as a memory map."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from filelock import FileLock

from fp8booster.files import new_folder
from fp8booster.reading import read_record

from .corpus import Corpus, open_corpus
from .model_folder import is_folder
from .options import TrainOptions
from .tokenizer import folder_has_tokenizer, folder_identity, load_tokenizer, train_tokenizer

_BATCH_BYTES = 4 << 20  # text encoded at once
_TRAINING_BYTES = 256 << 20  # text that a tokenizer is trained on at most
_FORMAT = 1  # raised when what this module writes changes


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
        """The ids  [count], mapped from disk."""
        return np.memmap(self.ids, dtype=_dtype(self.vocabulary), mode="r", shape=(self.count,))

    @property
    def ids(self) -> Path:
        """The file of token ids."""
        return self.folder / "tokens.bin"

    @property
    def tokenizer(self) -> Path:
        """Folder with the tokenizer, in Hugging Face's format."""
        return self.folder / "tokenizer"


def prepare_tokens(options: TrainOptions, tell: Callable[[str], None], tokenizer: str | None = None) -> TokenFile:
    """The token file for the options' text and tokenizer, made now if the cache has none; `tell` says what is done.

    `tokenizer` is a folder of one; None: the model's, or one that is trained on the text.

    Safe to call from many processes at once: one makes the file, the others wait for it.
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
    with FileLock(cache / f"{identity}.lock"):
        if not folder.exists():
            for left in cache.glob(f".{identity}.*.partial"):  # after a kill: while the lock is held, nobody writes it
                shutil.rmtree(left)
            with new_folder(folder) as partial:
                _make(partial, corpus, options, tokenizer, tell)
    made = open_tokens(folder, f"remove the folder {folder}, which is made anew then")
    return replace(made, name=corpus.name)  # another file may have had the same text


def open_tokens(folder: Path, remedy: str) -> TokenFile:
    """The token file in a folder that has its identity as a name.

    Raises ValueError for one that is not whole, with what the user can do.
    """
    facts = read_record(folder / "tokens.json", {"vocabulary": int, "count": int, "text": str}, remedy)
    file = TokenFile(folder, facts["text"], folder.name, facts["vocabulary"], facts["count"])
    expected = file.count * np.dtype(_dtype(file.vocabulary)).itemsize
    found = file.ids.stat().st_size if file.ids.exists() else 0
    if found != expected or not file.tokenizer.is_dir():
        raise ValueError(f"{file.ids} has {found} bytes of {expected}, or its tokenizer is gone; {remedy}.")
    return file


def _make(folder: Path, corpus: Corpus, options: TrainOptions, given: str | None, tell: Callable[[str], None]) -> None:
    if given is not None:
        tokenizer = load_tokenizer(given)
        tokenizer.save_pretrained(folder / "tokenizer")
    else:
        tell(f"training a tokenizer of {options.vocabulary} tokens on {corpus.name}")
        train_tokenizer(_first_bytes(corpus.documents(), _TRAINING_BYTES), options.vocabulary, folder / "tokenizer")
        tokenizer = load_tokenizer(str(folder / "tokenizer"))

    vocabulary = 1 + max(tokenizer.get_vocab().values())  # not its length: numbers may be left out
    count = done = 0
    with (folder / "tokens.bin").open("wb") as stream:
        for texts in _grouped(corpus.documents(), _BATCH_BYTES):
            encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
            ids = np.concatenate([np.array([*document, tokenizer.eos_token_id]) for document in encoded])
            stream.write(ids.astype(_dtype(vocabulary)).tobytes())
            count += len(ids)
            done += sum(map(len, texts))
            tell(f"encoding {corpus.name}: {done / 1e6:.3g} of about {corpus.size / 1e6:.3g} MB")
    (folder / "tokens.json").write_text(
        json.dumps({"vocabulary": vocabulary, "count": count, "text": corpus.name}) + "\n"
    )


def _dtype(vocabulary: int) -> type[np.unsignedinteger]:
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


def _first_bytes(documents: Iterable[str], limit: int) -> Iterator[str]:
    held = 0
    for document in documents:
        yield document
        held += len(document)
        if held >= limit:
            return
