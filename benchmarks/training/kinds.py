"""Text to evaluate on: of other kinds than a campaign trains on, which any machine with Python has, or that itself."""

from __future__ import annotations

import gettext
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from importlib.metadata import distributions
from pathlib import Path

from fp8booster.cli.train.data import TokenFile, prepare_tokens
from fp8booster.cli.train.options import TrainOptions
from fp8booster.files import cache_folder, write_whole

CODE, PROSE, HEADERS, SEEN = "code", "prose", "headers", "seen"
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
        ValueError: the machine has no such text, or runs train on it.
    """
    name, named, path = given.partition("=")
    if given == SEEN:
        return SEEN, tokens
    if given == CODE and trained_on == "python":
        raise ValueError(
            "--kind code is the text that --data python trains on; give another --data, or --kind NAME=PATH"
        )
    if named:
        data: str | None = path
    elif given == CODE:
        data = None
    else:
        read = {PROSE: _descriptions, HEADERS: _headers}.get(given, lambda: _messages(given))
        data = str(_written(read, given))
    options = TrainOptions(model="7b", data=data, text_column=text_column, cache=str(cache_folder()))
    return name, prepare_tokens(options, lambda text: None, str(tokens.tokenizer))


def _written(read: Callable[[], Iterable[str]], kind: str) -> Path:
    """A file with all documents, in an order that depends on the content of each alone."""
    documents = sorted(set(read()), key=lambda text: hashlib.sha256(text.encode()).digest())
    if not documents:
        lacks = {PROSE: "descriptions of packages", HEADERS: "headers in packages"}.get(
            kind, "messages of programs in a language of this code"
        )
        raise ValueError(
            f"--kind is {kind!r}, and this machine has no {lacks}; use {CODE}, {PROSE}, {HEADERS}, {SEEN}, the code of "
            "another language, as de, or NAME=PATH"
        )
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
