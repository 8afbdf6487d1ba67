"""Reading files that a person, another version, a broken disk or a stranger may have written.

Every fault is a ValueError of one sentence: the file, what is wrong with it, and what to do.
"""

from __future__ import annotations

import functools
import json
import pickle
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from types import TracebackType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints
from zipfile import BadZipFile

from .version import __version__

Kind = type | tuple[type, ...]
Record = TypeVar("Record")

COPY_AGAIN = "copy the checkpoint again, or take another"
"""Remedy for a part of a checkpoint that is missing or damaged."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error of another package."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].strip().rstrip(".:")


def first_of(items: Sequence[str], shown: int = 8) -> str:
    """Return items joined by commas; of more than `shown` these alone and the number of the others."""
    more = len(items) - shown
    return ", ".join(items[:shown]) + (f" and {more} more" if more > 0 else "")


_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    list: "a list",
    dict: "an object",
    type(None): "null",
}
"""JSON's types in sentences."""

_BEYOND = 2**63  # more than any count or size, and than NumPy's and torch's numbers reach


def read_record(path: Path, fields: Mapping[str, Kind], remedy: str) -> dict[str, Any]:
    """Return the JSON object in a file, of which `fields` are there and of their types; others are left as they are.

    Raises:
        ValueError: the file is missing, is no JSON object, or lacks one of the fields; the sentence ends with `remedy`.
        OSError: it cannot be read.
    """
    return parse_record(read_text(path, remedy), str(path), fields, remedy)


def read_text(path: Path, remedy: str) -> str:
    """Return the text in a file.

    Raises:
        ValueError: the file is missing, no regular one, or no text; the sentence ends with `remedy`.
        OSError: it cannot be read.
    """
    require_file(path, remedy)
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is not text; {remedy}.") from None


def require_file(path: Path, remedy: str, named_by: Path | None = None) -> None:
    """Raise ValueError unless a path is a regular file, or a link to one: a pipe or a device may never end."""
    if not path.is_file():
        fault = "is no regular file" if path.exists() else "is missing"
        raise ValueError(f"{path} {fault}{f', which {named_by} names' if named_by else ''}; {remedy}.")


def parse_record(text: str, name: str, fields: Mapping[str, Kind], remedy: str) -> dict[str, Any]:
    """Parse a text as `read_record` does; errors call it `name`."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"{name} is not JSON, or not all of it; {remedy}.") from None
    if not isinstance(record, dict):
        raise ValueError(f"{name} holds {_kind_of(record)} where an object belongs; {remedy}.")
    require_fields(record, name, fields, remedy)
    return record


@functools.cache
def _fields_of(kind: type) -> dict[str, Kind]:
    hints = get_type_hints(kind).items()
    return {name: get_args(hint) if isinstance(hint, UnionType) else hint for name, hint in hints}


def parse_line(line: str, name: str, kind: type[Record], remedy: str) -> Record:
    """Parse a JSON object into a dataclass, of whose fields it has all and no others; errors call it `name`."""
    values = parse_record(line, name, _fields_of(kind), remedy)
    require_known(values, name, _fields_of(kind))
    return kind(**values)


def require_fields(record: Mapping[str, Any], name: str, fields: Mapping[str, Kind], remedy: str) -> None:
    """Raise ValueError unless `record`, of the file `name`, has the fields, of their types."""
    for field, kind in fields.items():
        if field not in record:
            raise ValueError(f"{name} has no {field!r}; {remedy}.")
        if not is_of(record[field], kind):
            wanted = " or ".join(_WORDS[each] for each in (kind if isinstance(kind, tuple) else (kind,)))
            raise ValueError(f"{field!r} in {name} is {_kind_of(record[field])} where {wanted} belongs; {remedy}.")


def require_known(record: Mapping[str, Any], name: str, known: Collection[str]) -> None:
    """Raise ValueError for a field that this version of fp8booster does not read."""
    for field in record:
        if field not in known:
            raise ValueError(
                f"{name} has {field!r}, which fp8booster {__version__} does not know; use the version of fp8booster "
                "that wrote it."
            )


def require_rows(rows: Sequence[Any], name: str, fields: Mapping[str, Kind], remedy: str) -> None:
    """Raise ValueError unless each row of a list, which errors call `name`, is an object with the fields."""
    for number, row in enumerate(rows, 1):
        place = f"row {number} of {name}"
        if not isinstance(row, dict):
            raise ValueError(f"{place} is {_kind_of(row)} where an object belongs; {remedy}.")
        require_fields(row, place, fields, remedy)


def is_of(value: Any, kind: Kind) -> bool:
    """Tell whether a JSON value is of a type; true and false are no numbers, nor is what 64 bits do not hold."""
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, bool):
        return bool in kinds
    if isinstance(value, int) and abs(value) >= _BEYOND:
        return False
    return isinstance(value, kinds) or (float in kinds and isinstance(value, int))


def _kind_of(value: Any) -> str:
    if isinstance(value, int) and abs(value) >= _BEYOND:
        return "a number of more than 64 bits"
    return _WORDS[type(value)]


def read_index(path: Path, remedy: str, written: bool = True) -> dict[str, Any]:
    """Return the index of a checkpoint in several files: its "weight_map" from names of tensors to files.

    Args:
        written: the files must be there; False where the checkpoint is still being written.

    Raises:
        ValueError: it is none, or names a file that is missing or not in its folder.
    """
    index = read_record(path, {"weight_map": dict}, remedy)
    for tensor, file in index["weight_map"].items():
        if not is_of(file, str):
            raise ValueError(f"{path} has {_kind_of(file)} in place of the file that holds {tensor!r}; {remedy}.")
    metadata = index.get("metadata")
    groups = metadata.get("param_groups") if isinstance(metadata, dict) else None
    for name in {*index["weight_map"].values(), *([] if groups is None else [str(groups)])}:
        parts = PurePosixPath(name)
        if parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
            raise ValueError(
                f"{path} names a file outside of its folder, {name!r}: do not trust this checkpoint; get it anew from "
                "who made it."
            )
        if written and "*" not in name:
            require_file(path.parent / name, remedy, named_by=path)
    return index


@contextmanager
def faults_named(file: Path | None = None, remedy: str = COPY_AGAIN) -> Iterator[None]:
    """Name a file of tensors that is read in the block, and is damaged or could run code, in a ValueError.

    Args:
        file: the file; None where another package opens files by their names, with torch or safetensors.
        remedy: what to do about damage.
    """
    from safetensors import SafetensorError

    try:
        yield
    except (*_OF_DAMAGE, pickle.UnpicklingError, SafetensorError, RuntimeError) as error:
        place = file or _file_read(error.__traceback__)
        if place is None or (isinstance(error, RuntimeError) and not _DAMAGED.search(str(error))):
            raise
        if not isinstance(error, pickle.UnpicklingError):
            raise ValueError(f"{place} is damaged or no file of tensors; {remedy}.") from None
        asked = _GLOBAL.search(str(error))
        what = f"asks for {asked[1]}, which is" if asked else "is damaged, or holds"
        raise ValueError(
            f"{place} {what} more than tensors and plain values, and was not loaded, for loading it could run code: do "
            "not trust this checkpoint; get it anew from who made it."
        ) from None


_OF_DAMAGE = (EOFError, BadZipFile, LookupError, AttributeError)
"""Errors of torch's loader for bytes that it takes for a pickle."""

_GLOBAL = re.compile(r"GLOBAL ([\w.]+)")
_DAMAGED = re.compile(r"PytorchStream|central directory|magic number|corrupt")
"""Words of torch's loader about a function that a file asks for, and about a file that is cut short."""

_READERS = {
    ("torch.serialization", "load"): "f",
    ("safetensors.torch", "load_file"): "filename",
    ("colossalai.checkpoint_io.utils", "load_state_dict"): "checkpoint_file_path",
}
"""Functions that read a file of tensors, and their argument with its name."""


def _file_read(traceback: TracebackType | None) -> str | None:
    """Return the file that was read where an error arose."""
    file = None
    while traceback is not None:
        frame = traceback.tb_frame
        name = _READERS.get((frame.f_globals.get("__name__"), frame.f_code.co_name))
        value = frame.f_locals.get(name) if name else None
        if isinstance(value, str | Path):
            file = str(value)
        traceback = traceback.tb_next
    return file
