"""Tensors of a folder in Hugging Face's format, read and written one by one: a file of them is in memory at most."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from fp8booster.listing import first_of
from fp8booster.reading import faults_named, first_line, read_index, require_file
from fp8booster.serving.formats import SCALES
from fp8booster.training.adapters import ADAPTER_FILE

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COPY_AGAIN = "copy the model again"

_PLACES = (_FILE, _INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Files that hold a model's weights, or name those that do, in the order in which transformers looks for them."""

_OTHERS = ("*.safetensors", "pytorch_model*", "tf_model*", "flax_model*", "consolidated*", "*.gguf")
"""Files of weights that none of `_PLACES` is, or names."""

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What safetensors calls types."""


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


class Shards:
    """The tensors of a folder, by name: of safetensors, or of torch's files without code.

    Raises:
        ValueError: the folder holds no weights, or not all that its index names, or others, or a file that is damaged,
            no regular file or outside of the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        """By the name of each tensor that has another in its file, that one."""
        place = weights_of(folder)
        if place is None:
            raise ValueError(f"{folder} holds no {_FILE} and no {_INDEX}; save the model there as safetensors.")
        if place.suffix == ".json":
            self._files: dict[str, str] = dict(read_index(place, _COPY_AGAIN)["weight_map"])
            self._require_indexed(place)
        else:
            self._files = dict.fromkeys(self._handle(place.name).keys(), place.name)

    def _require_indexed(self, index: Path) -> None:
        """Raise ValueError unless the files that the index names hold its tensors, and no more."""
        there = {file: set(self._handle(file).keys()) for file in set(self._files.values())}
        for name, file in self._files.items():
            if name not in there[file]:
                raise ValueError(f"{self.folder / file} lacks {name}, which {index} names; {_COPY_AGAIN}.")
        unnamed = sorted(set().union(*there.values()) - self._files.keys())
        if unnamed:
            raise ValueError(f"{index} lacks {first_of(unnamed, shown=3)}, which its files hold; {_COPY_AGAIN}.")

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors, and their scales, by other names, by those they have; where one is taken it stays with that."""
        for name, other in names.items():
            for end in ("", *SCALES):
                if name + end in self and other + end not in self:
                    self._files[other + end] = self._files.pop(name + end)
                    self._keys[other + end] = self._keys.pop(name + end, name + end)

    def drop(self, name: str) -> None:
        """Leave a tensor out."""
        del self._files[name]

    @property
    def names(self) -> list[str]:
        return list(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def scales(self) -> dict[str, str]:
        """By the name of each tensor that has a scale, the scale's."""
        found = {name: next((name + end for end in SCALES if name + end in self), None) for name in self.names}
        return {name: scale for name, scale in found.items() if scale is not None}

    def shape(self, name: str) -> tuple[int, ...]:
        with self._named(name):
            return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        with self._named(name):
            stored = self._slice(name).get_dtype()
        if stored not in _TYPES:
            raise ValueError(f"{name} in {self.folder} is of the type {stored}, which PyTorch has not; {_COPY_AGAIN}.")
        return _TYPES[stored]

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, read from the disk."""
        with self._named(name):
            return self._handle(self._files[name]).get_tensor(self._keys.get(name, name))

    def _slice(self, name: str) -> Any:
        return self._handle(self._files[name]).get_slice(self._keys.get(name, name))

    def _handle(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            path = self.folder / file
            require_file(path, _COPY_AGAIN)
            with faults_named(path, _COPY_AGAIN):
                kind = _OfTorch if path.suffix == ".bin" else safe_open
                self._open[file] = kind(path, framework="pt")
        return self._open[file]

    def _named(self, name: str) -> Any:
        return faults_named(self.folder / self._files[name], _COPY_AGAIN)


class _OfTorch:
    """A file that torch's `save` wrote, as `safe_open` gives one of safetensors; tensors are read when used."""

    def __init__(self, path: Path, framework: str) -> None:
        mapped = zipfile.is_zipfile(path)  # files of old versions are read at once
        self._tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if not isinstance(self._tensors, dict) or not all(map(_is_plain, self._tensors.items())):
            raise ValueError(f"{path} holds more than tensors by name; save the model again (save_pretrained).")

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name].detach()

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self._tensors[name])


class _Slice:
    """Shape and type of a tensor, as safetensors tells them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> Iterable[int]:
        return self._tensor.shape

    def get_dtype(self) -> str:
        return next((name for name, dtype in _TYPES.items() if dtype is self._tensor.dtype), str(self._tensor.dtype))


def _is_plain(item: tuple[Any, Any]) -> bool:
    name, value = item
    return isinstance(name, str) and isinstance(value, torch.Tensor) and value.layout is torch.strided


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
        self._held[name] = tensor.detach().cpu().contiguous()
        self._held_bytes += tensor.nbytes
        self.total += tensor.nbytes

    def close(self) -> None:
        """Write what is left, and name the files by their number."""
        if self._held:
            self._flush()
        count = len(self._shards)
        weight_map = {}
        for number, names in enumerate(self._shards):
            file = _FILE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).rename(self._folder / file)
            weight_map.update(dict.fromkeys(names, file))
        if count > 1:
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

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
        folder: as `BoostedModel.save` leaves it; empty where there are none, or where ranks divide layers.

    Raises:
        ValueError: the file of a rank is missing, or damaged.
    """

    def __init__(self, folder: Path | None) -> None:
        from safetensors import safe_open

        files = [] if folder is None else sorted(folder.glob("rank-*-of-*.safetensors"))
        expected = int(files[0].stem.rpartition("-")[2]) if files else 0
        if len(files) != expected:
            raise ValueError(f"{folder} holds {len(files)} of {expected} files of master weights; copy the checkpoint.")
        self._files = []
        for file in files:
            require_file(file, "copy the checkpoint again")
            with faults_named(file):
                self._files.append(safe_open(file, framework="pt"))
        if any((file.metadata() or {}).get("sharding", "ZeRO") != "ZeRO" for file in self._files):
            self._files = []
        self._names = set(self._files[0].keys()) if self._files else set()

    @property
    def ranks(self) -> int:
        """That wrote them; 0: there are none."""
        return len(self._files)

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def tensor(self, name: str, shape: torch.Size) -> torch.Tensor:
        """One parameter, FP32, of its shape."""
        whole = torch.cat([file.get_tensor(name).flatten() for file in self._files])
        return whole[: shape.numel()].view(shape)
