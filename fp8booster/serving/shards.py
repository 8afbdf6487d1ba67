"""Tensors of a folder in Hugging Face's format, read and written one by one: one file of them is in memory at most."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Collection, Mapping
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from fp8booster.checkpoints import SHARDING, ZERO_ALONE, rank_files
from fp8booster.reading import COPY_AGAIN, faults_named, first_line, first_of, read_index, require_file
from fp8booster.serving.formats import SCALES
from fp8booster.training.adapters import ADAPTER_FILE

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COPY_AGAIN = "copy the model again"

_PLACES = (_FILE, _INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that hold a model's weights, or name those that do, in the order in which transformers looks for them."""

_OTHERS = ("*.safetensors", "pytorch_model*", "tf_model*", "flax_model*", "consolidated*", "*.gguf")
"""Names of files of weights that are none of `_PLACES`."""


def weights_of(folder: Path) -> Path | None:
    """Return the file that holds the weights of a folder in Hugging Face's format, or the index of those that do.

    None for a folder that holds no weights: a config alone.

    Raises:
        ValueError: it is no regular file, or there are weights under other names, which nobody would read.
    """
    for place in _PLACES:
        path = folder / place
        if path.exists() or path.is_symlink():
            require_file(path, _COPY_AGAIN)
            return path
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in names if name != ADAPTER_FILE and any(fnmatch(name, each) for each in _OTHERS)]
    if others:
        raise ValueError(
            f"{folder} holds {first_of(others, shown=2)}, and no {_FILE} or {_INDEX}; copy the model again, or save it "
            "there as safetensors (save_pretrained)."
        )
    return None


_Opened = tuple[Collection[str], Callable[[str], torch.Tensor]]
"""The names of a file's tensors, and a function that reads one of them."""


class Shards:
    """The tensors of a folder, by name: of safetensors, or of torch's files without code.

    Raises:
        ValueError: the folder holds no weights, or not all that its index names, or others, or a file that is damaged,
            no regular file or outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, _Opened] = {}
        place = weights_of(folder)
        if place is None:
            raise ValueError(f"{folder} holds no {_FILE} and no {_INDEX}; save the model there as safetensors.")
        self._places: dict[str, tuple[str, str]] = {}
        """By the name of each tensor, its file and its name there."""
        self._parts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        """By the names of tensors that are parts of one in a file, what takes them from it."""
        self._last: tuple[tuple[str, str], torch.Tensor] | None = None
        """The last whole that was divided: its parts, of which there may be hundreds, are asked for one by one."""
        if place.suffix != ".json":
            self._places = {name: (place.name, name) for name in self._opened(place.name)[0]}
            return
        files = read_index(place, _COPY_AGAIN)["weight_map"]
        there = {file: set(self._opened(file)[0]) for file in set(files.values())}
        for name, file in files.items():
            if name not in there[file]:
                raise ValueError(f"{folder / file} lacks {name}, which {place} names; {_COPY_AGAIN}.")
            self._places[name] = file, name
        # transformers would read what the index names and drop the others silently
        unnamed = sorted(set().union(*there.values()) - files.keys())
        if unnamed:
            raise ValueError(f"{place} lacks {first_of(unnamed, shown=3)}, which its files hold; {_COPY_AGAIN}.")

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors, and their scales, from keys to values; a name that another tensor has is not taken."""
        for name, other in names.items():
            for end in ("", *SCALES):
                if name + end in self and other + end not in self:
                    self._places[other + end] = self._places.pop(name + end)

    def divide(self, names: Mapping[str, Collection[str]], part: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Let parts take the place of tensors.

        Args:
            names: of the parts, by the names of the tensors.
            part: gives the part of a name, of the whole.
        """
        for name, parts in names.items():
            if name in self:
                self._places |= dict.fromkeys(parts, self._places.pop(name))
                self._parts |= {each: partial(part, each) for each in parts}

    def drop(self, name: str) -> None:
        """Leave a tensor out."""
        del self._places[name]

    @property
    def names(self) -> list[str]:
        return list(self._places)

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def scales(self) -> dict[str, str]:
        """Return the names of scales, by the names of the tensors that have one."""
        found = {name: next((name + end for end in SCALES if name + end in self), None) for name in self.names}
        return {name: scale for name, scale in found.items() if scale is not None}

    def tensor(self, name: str) -> torch.Tensor:
        """Return one tensor; its values are read from the disk when they are used."""
        place, part = self._places[name], self._parts.get(name)
        if part is None:
            return self._read(*place)
        if self._last is None or self._last[0] != place:
            self._last = place, self._read(*place)
        return part(self._last[1])

    def _read(self, file: str, key: str) -> torch.Tensor:
        # values are read here for the first time, so damage shows here
        with faults_named(self.folder / file, _COPY_AGAIN):
            return self._opened(file)[1](key)

    def shape(self, name: str) -> torch.Size:
        return self.tensor(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.tensor(name).dtype

    def _opened(self, file: str) -> _Opened:
        if file not in self._open:
            path = self.folder / file
            require_file(path, _COPY_AGAIN)
            # files stay open: to open one for each tensor would read its header as often
            with faults_named(path, _COPY_AGAIN):
                self._open[file] = _open_torch(path) if path.suffix == ".bin" else _open_safetensors(path)
        return self._open[file]


def _open_safetensors(path: Path) -> _Opened:
    file = safe_open(path, framework="pt")
    return file.keys(), file.get_tensor


def _open_torch(path: Path) -> _Opened:
    mapped = zipfile.is_zipfile(path)  # files of old versions are read at once
    # without code: a pickle of strangers may run anything
    tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided
        for name, value in tensors.items()
    ):
        raise ValueError(f"{path} holds more than tensors by name; save the model again (save_pretrained).")
    return tensors.keys(), lambda name: tensors[name].detach()


class ShardWriter:
    """Writes tensors to files of a folder, and at the end their index.

    Args:
        folder: empty.
        shard_bytes: of a file, at most; one tensor that is larger has a file of its own.
    """

    def __init__(self, folder: Path, shard_bytes: int) -> None:
        self._folder, self._limit = folder, shard_bytes
        self._held: dict[str, torch.Tensor] = {}
        self._held_bytes = 0
        self._shards: list[list[str]] = []
        self.total = 0
        """Bytes of all tensors so far."""

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a tensor. Raises OSError where the disk does not take those before it."""
        if self._held and self._held_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._held[name] = tensor.detach().cpu().contiguous()  # safetensors refuses views that are not
        self._held_bytes += tensor.nbytes
        self.total += tensor.nbytes

    def close(self) -> None:
        """Write the last file and the index."""
        if self._held:
            self._flush()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards):  # names of files have the number of all
            file = _FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            # only now is the number of files known, which their names hold
            self._part(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            # last, when all that it names is there
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        try:
            save_file(self._held, self._part(len(self._shards)), metadata={"format": "pt"})
        except SafetensorError as error:  # of a full disk too
            raise OSError(f"The model was not written ({first_line(error)}); make room, and export it again.") from None
        self._shards.append(list(self._held))
        self._held, self._held_bytes = {}, 0

    def _part(self, number: int) -> Path:
        return self._folder / f"part-{number:05d}"


class Masters:
    """FP32 master weights that ranks wrote under ZeRO alone: a flat shard of each parameter in the file of each rank.

    Args:
        folder: as `BoostedModel.save` leaves it; None where there is none. Where ranks divide layers nothing is read.

    Raises:
        ValueError: the file of a rank is missing, or damaged.
    """

    def __init__(self, folder: Path | None) -> None:
        files, expected = ([], 0) if folder is None else rank_files(folder)
        # a folder copied in part would give weights that are too short
        if len(files) != expected:
            raise ValueError(f"{folder} holds {len(files)} of {expected} files of master weights; copy the checkpoint.")
        self._files = []
        for file in files:
            require_file(file, COPY_AGAIN)
            with faults_named(file):
                self._files.append(safe_open(file, framework="pt"))
        if any((file.metadata() or {}).get(SHARDING, ZERO_ALONE) != ZERO_ALONE for file in self._files):
            self._files = []
        self._names = set(self._files[0].keys()) if self._files else set()

    @property
    def ranks(self) -> int:
        """Return the number of ranks that wrote them; 0: there are none."""
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return one parameter, FP32, of its shape."""
        whole = torch.cat([file.get_tensor(name).flatten() for file in self._files])
        return whole[: shape.numel()].view(shape)  # ZeRO pads the last shard
