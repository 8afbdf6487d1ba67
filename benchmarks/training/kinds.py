"""Text to evaluate on: of other kinds than a campaign trains on, which any machine with Python has, or that itself."""

from __future__ import annotations

import gettext
import hashlib
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

import numpy as np

from benchmarks.training.runs import HELD_OUT
from fp8booster.cli.train.data import TokenFile, prepare_tokens
from fp8booster.cli.train.options import TrainOptions
from fp8booster.files import cache_folder, write_whole

CODE, PROSE, HEADERS, SEEN = "code", "prose", "headers", "seen"
RESERVED = (CODE, PROSE, HEADERS, SEEN, HELD_OUT)
"""Names that no text of a user's has."""

_LANGUAGE = re.compile(r"[a-z]{2,3}(_\w+)?(@\w+)?")
"""As gettext names folders: de, pt_BR, sr@latin."""

_CHOICES = f"{CODE}, {PROSE}, {HEADERS}, {SEEN}, the code of a language, as de, or NAME=PATH for a text of your own"

_SUFFIXES = (".h", ".hpp", ".cuh")
_LONGEST = 8 << 20  # characters of a kind: more than is held out of any text, and read in seconds
_SHORTEST = 40  # characters of a message that is a sentence more than a label


def kind_of_text(given: str, trained_on: str, tokens: TokenFile, text_column: str) -> tuple[str, TokenFile]:
    """A name, and the text as tokens, by the tokenizer of the text that is trained on.

    Args:
        given: "code", Python's standard library; "prose", what installed packages say of themselves; "headers",
            theirs of C, C++ and CUDA; the code of a language, as "de", messages of programs translated to it;
            NAME=PATH, as `fp8booster train --data`; or "seen", what the first steps train on.
        trained_on: the campaign's --data.
        tokens: what that became.
        text_column: of tables.

    Raises:
        ValueError: the machine has no such text, its name is of another, or runs train on it.
    """
    name, named, path = given.partition("=")
    if given == SEEN:
        return SEEN, tokens
    data = _named_text(name, path) if named else _text_of_machine(given)
    options = TrainOptions(model="7b", data=data, text_column=text_column, cache=str(cache_folder()))
    try:
        found = prepare_tokens(options, lambda text: None, str(tokens.tokenizer))
    except (ValueError, OSError) as error:
        # it speaks of the option of `fp8booster train`
        raise ValueError(f"--kind {given}: {str(error).replace('--data ', '')}") from None
    # whatever it was called, and whoever made the tokens
    if found.count == tokens.count and np.array_equal(found.open(), tokens.open()):
        raise ValueError(
            f"--kind {given} is the text that --data {trained_on} trains on; give another, or --kind {SEEN}"
        )
    return name, found


def _named_text(name: str, path: str) -> str:
    """The path of NAME=PATH. Raises ValueError for a name or a path that cannot be."""
    if not name or not path:
        raise ValueError(f"--kind is '{name}={path}'; write it as NAME=PATH")
    if name in RESERVED:
        raise ValueError(f"--kind is '{name}={path}', and {name!r} names another text; give it a name of its own")
    return path


def _text_of_machine(kind: str) -> str | None:
    """A file with a text that this machine has; None is Python's standard library."""
    if kind == CODE:
        return None
    if kind in _READERS:
        return str(_written(_READERS[kind], kind))
    if not _LANGUAGE.fullmatch(kind):
        raise ValueError(f"--kind is {kind!r}, which is no text of this machine; use {_CHOICES}")
    return str(_written(lambda: _messages(kind), kind))


def _written(read: Callable[[], Iterable[str]], kind: str) -> Path:
    """A file with all documents, in an order that depends on the content of each alone."""
    documents = sorted(set(read()), key=lambda text: hashlib.sha256(text.encode()).digest())
    if not documents:
        lacks = {PROSE: "descriptions of packages", HEADERS: "headers in packages"}.get(
            kind, "messages of programs in a language of this code"
        )
        raise ValueError(f"--kind is {kind!r}, and this machine has no {lacks}; use {_CHOICES}")
    text = "\n\n".join(documents)[:_LONGEST]
    path = cache_folder() / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:24]}.txt"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    return path


def _descriptions() -> Iterator[str]:
    """The long descriptions of installed packages; `gather_text` has none, as they are in files of metadata."""
    for each in distributions():
        described = each.metadata.get_payload() or each.metadata["Description"]
        if described:
            yield str(described)


def _headers() -> Iterator[str]:
    """The headers of installed packages; `gather_text` has none."""
    for file in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*")):
        if file.suffix in _SUFFIXES:
            try:
                yield file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def _messages(language: str) -> Iterator[str]:
    """Messages of installed programs, translated; a catalogue each."""
    roots = {"/usr/share/locale", f"{sys.prefix}/share/locale", sysconfig.get_paths()["purelib"]}
    for root in sorted(roots):
        for file in sorted(Path(root).rglob(f"{language}/LC_MESSAGES/*.mo")):
            try:
                with file.open("rb") as stream:
                    catalogue = gettext.GNUTranslations(stream)._catalog
            except (OSError, UnicodeDecodeError):
                continue  # in an encoding of its own, or damaged
            sentences = [text for text in catalogue.values() if isinstance(text, str) and len(text) >= _SHORTEST]
            if sentences:
                yield "\n".join(sentences)


_READERS: dict[str, Callable[[], Iterable[str]]] = {PROSE: _descriptions, HEADERS: _headers}
