"""Exports a model, or a checkpoint of one, with the weights of its linear layers in FP8.

One tensor after the other: a file's worth of them is in memory at once. The bytes are those that training multiplied
by, where the format has the scales that training had: the same cast of the same value.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.files import put_in_place, sync_folder
from fp8booster.formats import E4M3
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.reading import read_record
from fp8booster.scaling import amax_of
from fp8booster.serving.formats import CHECKPOINT_FORMATS, CheckpointFormat
from fp8booster.serving.layout import Layout, layout_of, layout_of_config
from fp8booster.serving.shards import Masters, Shards, ShardWriter
from fp8booster.tensor import stored_scale

_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of files that go along with a model: of its tokenizer, generation_config.json."""


@dataclass(frozen=True)
class Exported:
    """What was written."""

    folder: Path
    layers: int
    """In FP8."""
    kept: tuple[str, ...]
    """Linear layers that stay in 16 bits, by their paths."""
    bytes: int
    from_masters: int
    """Weights that were cast from FP32 masters; the others from the values of the model."""


def export(
    model: nn.Module | str | Path,
    folder: str | Path,
    *,
    format: str = "fine-grained",
    config: FP8Config | None = None,
    masters: str | Path | None = None,
    shard_bytes: int = 5 * 2**30,
) -> Exported:
    """Write a model to a new folder, its linear layers' weights in FP8, as engines load it.

    Those layers are in FP8 that are in training: by default not heads, embeddings, norms and routers, which are written
    in 16 bits. Tokenizer and generation_config.json go along.

    Args:
        model: a causal language model of transformers, whole in this process, converted or not, or the folder of one in
            Hugging Face's format.
        folder: appears when it is whole; it must not be there.
        format: one of `CHECKPOINT_FORMATS`: "fine-grained", "compressed-tensors", "compressed-tensors-tensorwise" or
            "tensorwise".
        config: which layers, and how their scales are rounded; None is that of a converted model's layers, or
            `FP8Config()`.
        masters: for a folder, that of the FP32 master weights which ranks saved under ZeRO, where it gathers weights in
            FP8: what it cast. None: the values in the folder are cast.
        shard_bytes: of a file, at most.

    Raises:
        ValueError: the format is not known, the folder is there, the model cannot be exported or read.
        OSError: the disk did not take it. Nothing is left then.
    """
    if format not in CHECKPOINT_FORMATS:
        raise ValueError(f"there is no format {format!r}; use one of {', '.join(CHECKPOINT_FORMATS)}")
    folder = Path(folder)
    if folder.exists():
        raise ValueError(f"{folder} is there already; give a folder that is not")
    chosen = CHECKPOINT_FORMATS[format]
    if isinstance(model, nn.Module):
        if masters is not None:
            raise ValueError("masters go with the folder of a model; leave them out for a model in memory")
        source: _Source = _Live(model, config)
    else:
        source = _Folder(Path(model), config, None if masters is None else Path(masters))
    if source.fp8_config.weight_format is not E4M3:
        raise ValueError(f"the weights train in {source.fp8_config.weight_format}, and engines load float8_e4m3fn")
    part = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        writer = ShardWriter(part, shard_bytes)
        _write_tensors(source, chosen, writer)
        writer.close()
        source.copy_files(part)
        record = {key: value for key, value in source.record().items() if key not in ("torch_dtype", "dtype")}
        record |= {"torch_dtype": "bfloat16", "quantization_config": chosen.settings(source.layout.kept)}
        (part / "config.json").write_text(json.dumps(record, indent=2) + "\n")
        sync_folder(part)
        put_in_place(part, folder)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    return Exported(folder, len(source.layout.groups), source.layout.kept, writer.total, source.from_masters)


def _write_tensors(source: _Source, chosen: CheckpointFormat, writer: ShardWriter) -> None:
    power_of_two = chosen.power_of_two(source.fp8_config)
    amaxes: dict[tuple[str, ...], torch.Tensor] = {}
    layout = source.layout
    for name in source.names:
        if name not in layout.groups:
            tensor = source.tensor(name)
            # buffers, as a router's bias for the choice of experts, have the type that the model gives them
            half = tensor.dtype is torch.float32 and name in layout.parameters
            writer.add(name, tensor.bfloat16() if half else tensor)
            continue
        made = source.made(name, chosen, power_of_two)
        if made is None:
            group, amax = source.scale_group(name), None
            if chosen.granularity == "tensorwise":
                if group not in amaxes:
                    amaxes[group] = torch.stack([amax_of(source.weight(each)) for each in group]).max()
                amax = amaxes[group]
            made = chosen.cast(source.weight(name), power_of_two=power_of_two, amax=amax)
        data, scale = made
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(f"{name} holds values that are not finite; export an earlier checkpoint")
        writer.add(name, data)
        writer.add(name.removesuffix("weight") + chosen.scale_name, scale)


class _Source:
    """Where tensors come from."""

    fp8_config: FP8Config
    layout: Layout

    @property
    def from_masters(self) -> int:
        """Weights that are cast from masters."""
        return 0

    @property
    def names(self) -> Iterable[str]:
        """Of tensors, a tied one once."""
        raise NotImplementedError

    def tensor(self, name: str) -> torch.Tensor:
        """The value of a tensor in the state dict."""
        raise NotImplementedError

    def weight(self, name: str) -> torch.Tensor:
        """The value that training casts."""
        return self.tensor(name)

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What training has made of a weight, if it is at hand in this format: values and scale."""
        return None

    def scale_group(self, name: str) -> tuple[str, ...]:
        """The weights that share a scale."""
        return self.layout.groups[name]

    def record(self) -> dict[str, Any]:
        """Of config.json."""
        raise NotImplementedError

    def copy_files(self, folder: Path) -> None:
        """Write what goes along with the model."""
        raise NotImplementedError


class _Live(_Source):
    """A model in memory."""

    def __init__(self, model: nn.Module, config: FP8Config | None) -> None:
        if not hasattr(model, "save_pretrained"):
            raise TypeError(f"{type(model).__name__} is no model of transformers; unwrap it, or export its checkpoint")
        self._model: Any = model
        layers = {name: module for name, module in model.named_modules() if isinstance(module, FP8Layer)}
        if any(layer.fp8_weight.lacks_values for layer in layers.values()):
            raise ValueError(
                "the model's weights have no values in 16 bits (FP8Config.weights_in_16_bits); save it with "
                "booster.save_model, and export that folder"
            )
        self._layers = {f"{name}.weight": layer for name, layer in layers.items()}
        if not layers or config is not None:
            self.fp8_config = config or FP8Config()
            self.layout = layout_of_config(model.config, self.fp8_config)
        else:
            self.fp8_config = next(iter(layers.values())).fp8_config
            self.layout = layout_of(model)
        self._tensors = model.state_dict()
        _require_shapes(self.layout, {name: value.shape for name, value in self._tensors.items()}, "the model")

    @property
    def names(self) -> Iterable[str]:
        return [name for name in self._tensors if self.layout.first_name.get(name, name) == name]

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        layer = self._layers.get(name)
        if layer is None or not layer.fp8_weight.is_provided([layer.weight]):
            return None
        config = layer.fp8_config
        if (config.granularity, config.power_of_two) != (chosen.granularity, power_of_two):
            return None
        quantized = layer.fp8_weight.forward([layer.weight], config, transpose=False)
        rows, columns = layer.weight.shape
        return quantized.data[:rows, :columns], stored_scale(quantized.inverse_scale, rows, columns)

    def record(self) -> dict[str, Any]:
        return json.loads(self._model.config.to_json_string(use_diff=False))

    def copy_files(self, folder: Path) -> None:
        if (generation := getattr(self._model, "generation_config", None)) is not None:
            generation.save_pretrained(folder)


class _Folder(_Source):
    """A folder in Hugging Face's format."""

    def __init__(self, folder: Path, config: FP8Config | None, masters: Path | None) -> None:
        from transformers import AutoConfig

        self._folder = folder
        self._record = read_record(folder / "config.json", {"model_type": str}, "give the folder of a model")
        if "quantization_config" in self._record:
            raise ValueError(f"{folder} is quantized already; give the model that it was made from")
        self.fp8_config = config or FP8Config()
        self._shards, self._masters = Shards(folder), Masters(masters)
        of_model = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        self.layout = layout_of_config(of_model, self.fp8_config)
        _require_shapes(self.layout, {name: self._shards.shape(name) for name in self._shards.names}, str(folder))

    @property
    def names(self) -> Iterable[str]:
        there: dict[str, str] = {}  # a tied weight may be under any of its names
        for name in self._shards.names:
            there.setdefault(self.layout.first_name.get(name, name), name)
        return there.values()

    def tensor(self, name: str) -> torch.Tensor:
        return self._shards.tensor(name)

    def weight(self, name: str) -> torch.Tensor:
        if not self._is_cast_from_master(name):
            return self.tensor(name)
        return self._masters.tensor(name, self.layout.shapes[name])

    def scale_group(self, name: str) -> tuple[str, ...]:
        group = self.layout.groups[name]
        # as `GatheredWeights`: weights of which ranks have uneven shards do not lie together
        sizes = [self.layout.shapes[each].numel() for each in group]
        whole = all(self._is_cast_from_master(each) for each in group) and not any(
            size % self._masters.ranks for size in sizes
        )
        return group if whole or not any(self._is_cast_from_master(each) for each in group) else (name,)

    def _is_cast_from_master(self, name: str) -> bool:
        """Whether ZeRO gathers the weight in FP8; others are cast from the 16-bit values that it gathers."""
        return name in self._masters and name not in self.layout.cast_by_layers

    @property
    def from_masters(self) -> int:
        return sum(map(self._is_cast_from_master, self.layout.groups))

    def record(self) -> dict[str, Any]:
        return self._record

    def copy_files(self, folder: Path) -> None:
        for path in self._folder.iterdir():
            written_here = path.name == "config.json" or path.name.endswith(".index.json")
            if path.is_file() and path.suffix in _BESIDE and not written_here:
                shutil.copy(path, folder / path.name)


def _require_shapes(layout: Layout, found: Mapping[str, Sequence[int]], place: str) -> None:
    """Raise ValueError unless these are the tensors of the model; of a tied one any name will do."""
    there = {layout.first_name.get(name, name) for name in found}
    for name in sorted({*found, *layout.shapes}):
        if name not in found and layout.first_name.get(name, name) in there:
            continue
        expected = list(layout.shapes[name]) if name in layout.shapes else "none"
        has = list(found[name]) if name in found else "none"
        if has != expected:
            raise ValueError(
                f"{name} is {has} in {place}, and {expected} in the model that its config describes; give a whole "
                "model, as booster.save_model writes it, with its config.json."
            )
