"""Tensors of a folder in Hugging Face's format, read and written one by one: a file of them is in memory at most."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fp8booster.reading import faults_named, first_line, read_index
from fp8booster.serving.formats import SCALES

_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_COPY_AGAIN = "copy the model again"


class Shards:
    """The tensors of a folder, by name.

    Raises:
        ValueError: the folder holds no safetensors, or not all that its index names.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        """By the name of each tensor that has another in its file, that one."""
        if (folder / _INDEX).is_file():
            self._files: dict[str, str] = dict(read_index(folder / _INDEX, _COPY_AGAIN)["weight_map"])
        elif (folder / _FILE).is_file():
            self._files = dict.fromkeys(self._handle(_FILE).keys(), _FILE)
        else:
            raise ValueError(f"{folder} holds no {_FILE} and no {_INDEX}; save the model there as safetensors.")

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors, and their scales, by other names, by those they have; where one is taken it stays with that."""
        for name, other in names.items():
            for end in ("", *SCALES):
                if name + end in self and other + end not in self:
                    self._files[other + end] = self._files.pop(name + end)
                    self._keys[other + end] = self._keys.pop(name + end, name + end)

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

    def dtype(self, name: str) -> str:
        """What safetensors calls its type, as F16."""
        with self._named(name):
            return self._slice(name).get_dtype()

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor, read from the disk."""
        with self._named(name):
            return self._handle(self._files[name]).get_tensor(self._keys.get(name, name))

    def _slice(self, name: str) -> Any:
        return self._handle(self._files[name]).get_slice(self._keys.get(name, name))

    def _handle(self, file: str) -> Any:
        from safetensors import safe_open

        if file not in self._open:
            with faults_named(self.folder / file, _COPY_AGAIN):
                self._open[file] = safe_open(self.folder / file, framework="pt")
        return self._open[file]

    def _named(self, name: str) -> Any:
        return faults_named(self.folder / self._files[name], _COPY_AGAIN)


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
