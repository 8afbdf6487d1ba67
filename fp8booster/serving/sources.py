"""Where the tensors of an export come from: a model in memory, or a folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3, FORMATS
from fp8booster.nn.adapters import is_adapted
from fp8booster.nn.linear.frozen import INPUT_AMAX, SCALE, FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.reading import COPY_AGAIN, read_record, require_file
from fp8booster.serving.formats import CheckpointFormat, block_of, decode, granularity_of, require_stored
from fp8booster.serving.layout import Layout, layout_of, layout_of_config
from fp8booster.serving.loading import weights_among, whole_shards
from fp8booster.serving.read import forget_quantization
from fp8booster.serving.shards import Masters
from fp8booster.tensor import stored_scale
from fp8booster.training.adapters import ADAPTER_CONFIG
from fp8booster.training.models import causal_lm

_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of files that go along with a model: of its tokenizer, generation_config.json."""

_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers 5 saves a tokenizer's chat templates but its first, chat_template.jinja."""

_OF_WEIGHTS = ("config.json", ADAPTER_CONFIG)

_OF_THIS_PROCESS = ("_name_or_path", "_attn_implementation_autoset")
"""Fields that save_pretrained leaves out: where the model was read, and by which transformers 4 would choose no fast
attention, for it is chosen already."""


class Source(ABC):
    """Where tensors come from."""

    fp8_config: FP8Config
    layout: Layout
    dtype: torch.dtype = torch.bfloat16
    """Of what is written in 16 bits: FP16 for a model that has that and no BF16."""
    merged: int = 0
    """Weights that adapters are merged into."""

    @property
    def from_masters(self) -> int:
        """Weights that are cast from masters."""
        return 0

    @property
    @abstractmethod
    def names(self) -> Iterable[str]:
        """Of tensors, a tied one once."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """The value of a tensor in files, in FP32 where it is still to be rounded."""

    def weight(self, name: str) -> torch.Tensor:
        """The value that training casts."""
        return self.tensor(name)

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """What there is of a weight in FP8, if it is at hand in this format: values and scale.

        Raises:
            ValueError: it is at hand in another format, and nowhere else: to cast it again would round it twice.
        """
        return None

    def scale_group(self, name: str) -> tuple[str, ...]:
        """The weights that share a scale."""
        return self.layout.groups[name]

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Of config.json."""

    @abstractmethod
    def copy_files(self, folder: Path) -> None:
        """Write what goes along with the model."""


class Live(Source):
    """A model in memory.

    Args:
        model: whole in this process, converted or not.
        config: None is that of a converted model's layers, or `FP8Config()`.
        in_fp8: whether layers are to be written in FP8.
    """

    def __init__(self, model: nn.Module, config: FP8Config | None, *, in_fp8: bool = True) -> None:
        if not hasattr(model, "save_pretrained"):
            raise TypeError(f"{type(model).__name__} is no model of transformers; unwrap it, or export its checkpoint")
        if any(map(is_adapted, model.modules())):
            raise ValueError("the model has adapters beside its weights; merge them first: model.merge_and_unload()")
        self._model: Any = model
        layers = {name: module for name, module in model.named_modules() if isinstance(module, FP8Layer)}
        frozen = {name for name, layer in layers.items() if isinstance(layer, FrozenLayer)}
        if any(layer.fp8_weight.lacks_values for name, layer in layers.items() if name not in frozen):
            raise ValueError(
                "the model's weights have no values in 16 bits (FP8Config.weights_in_16_bits); save it with "
                "booster.save_model, and export that folder"
            )
        self._layers = {f"{name}.weight": layer for name, layer in layers.items()}
        if not in_fp8 or (layers and (config is None or frozen)):
            self.fp8_config = config or next((layer.fp8_config for layer in layers.values()), FP8Config())
            self.layout = layout_of(model, in_fp8=in_fp8)
        else:
            self.fp8_config = config or FP8Config()
            self.layout = layout_of_config(model.config, self.fp8_config)
        of_casts = {f"{name}.{end}" for name in frozen for end in (SCALE, INPUT_AMAX)}
        self._tensors = {name: value for name, value in model.state_dict().items() if name not in of_casts}
        if {torch.float16, torch.bfloat16} & {value.dtype for value in self._tensors.values()} == {torch.float16}:
            self.dtype = torch.float16
        names = self.layout.names
        shapes = {name: shape for name, shape in self.layout.shapes.items() if names.origin[name] not in of_casts}
        self.layout = dataclasses.replace(self.layout, shapes=shapes)
        found = [part for name, value in self._tensors.items() for part in names.parts(name, value).items()]
        _require_shapes(self.layout, {name: value.shape for name, value in found}, "the model")

    @property
    def names(self) -> Iterable[str]:
        stored = [part for name in self._tensors for part in self.layout.names.of[name]]
        return [name for name in stored if self.layout.first_name.get(name, name) == name]

    def tensor(self, name: str) -> torch.Tensor:
        origin = self.layout.names.origin[name]
        layer = self._layers.get(origin)
        if isinstance(layer, FrozenLayer):
            values = layer.quantized.dequantize(*layer.fp8_shape)
            return values.t() if layer.weight_is_transposed else values
        return self.layout.names.part(name, self._tensors[origin])

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        layer = self._layers.get(self.layout.names.origin[name])
        if layer is None or not layer.fp8_weight.is_provided([layer.held_weight]):
            return None
        config = layer.fp8_config
        if isinstance(layer, FrozenLayer):
            _require_granularity(name, config.granularity, chosen)
        elif (config.granularity, config.power_of_two) != (chosen.granularity, power_of_two):
            return None
        quantized = layer.fp8_weight.forward([layer.held_weight], config, transpose=False)
        rows, columns = layer.held_weight.shape
        return quantized.data[:rows, :columns], stored_scale(quantized.inverse_scale, rows, columns)

    def record(self) -> dict[str, Any]:
        config = json.loads(self._model.config.to_json_string(use_diff=False))
        for own in _OF_THIS_PROCESS:
            config.pop(own, None)
        return {**config, "architectures": [type(self._model).__name__]}  # as save_pretrained; made anew it has none

    def copy_files(self, folder: Path) -> None:
        if (generation := getattr(self._model, "generation_config", None)) is not None:
            generation.save_pretrained(folder)


class Folder(Source):
    """A folder in Hugging Face's format, in 16 bits or in FP8.

    Args:
        folder: of a model. Layers that are in FP8 there are so in what is written.
        config: for one in 16 bits; None is `FP8Config()`.
        masters: as in `export`.
        in_fp8: whether layers are to be written in FP8.
    """

    def __init__(
        self, folder: Path, config: FP8Config | None, masters: Path | None = None, *, in_fp8: bool = True
    ) -> None:
        from transformers import AutoConfig

        self._folder, file = folder, folder / "config.json"
        self._record = read_record(file, {"model_type": str}, "give the folder of a model")
        settings = self._record.pop("quantization_config", None)
        self._block = None if settings is None else block_of(settings, str(file))
        self.fp8_config = config or FP8Config()
        self.model_config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        """transformers', of the model in 16 bits."""
        forget_quantization(self.model_config)
        self._shards = whole_shards(folder, self.model_config, in_fp8=settings is not None)
        self._masters = Masters(masters)
        cast_anew = in_fp8 and settings is None
        self.layout = layout_of_config(self.model_config, self.fp8_config if cast_anew else None)
        self._shards.rename(self.layout.names.renamed)
        for name in weights_among(self._shards, self._shards.scales() if settings is not None else {}):
            if name not in self.layout.shapes:  # which transformers ignores, as what it makes from others
                self._shards.drop(name)
        self._scale_of = {} if settings is None else self._shards.scales()
        if in_fp8 and self._scale_of:
            kept = tuple(name for name in self.layout.kept if f"{name}.weight" not in self._scale_of)
            self.layout = dataclasses.replace(self.layout, groups={name: (name,) for name in self._scale_of}, kept=kept)
        _require_shapes(self.layout, {name: self._shards.shape(name) for name in self._stored}, str(folder))
        if {torch.float16, torch.bfloat16} & {self._shards.dtype(name) for name in self._stored} == {torch.float16}:
            self.dtype = torch.float16

    @property
    def _stored(self) -> list[str]:
        """All tensors but scales."""
        return weights_among(self._shards, self._scale_of)

    @property
    def names(self) -> Iterable[str]:
        there: dict[str, str] = {}  # a tied weight may be under any of its names
        for name in self._stored:
            there.setdefault(self.layout.first_name.get(name, name), name)
        return there.values()

    def tensor(self, name: str) -> torch.Tensor:
        tensor, scale = self._shards.tensor(name), self._scale_of.get(name)
        if scale is not None:
            return decode(tensor, self._shards.tensor(scale), self._block, name)
        if tensor.dtype in FORMATS:
            raise ValueError(f"{name} in {self._folder} is in FP8 and has no scale; copy the model again.")
        return tensor

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        place = self._scale_of.get(name)
        if place is None:
            return None
        data, scale = self._shards.tensor(name), self._shards.tensor(place)
        require_stored(data, scale, name)
        scale = scale.float()
        granularity = granularity_of(tuple(data.shape), tuple(scale.shape), self._block)
        if data.dtype is not E4M3:
            granularity = None
        _require_granularity(name, granularity, chosen)
        shape = {"tensorwise": (), "rowwise": (data.shape[0], 1)}.get(chosen.granularity, scale.shape)
        return data, scale.reshape(shape)

    def weight(self, name: str) -> torch.Tensor:
        if not self.is_cast_from_master(name):
            return self.tensor(name)
        names = self.layout.names
        origin = names.origin[name]
        return names.part(name, self._masters.tensor(origin, names.shapes[origin]))

    def scale_group(self, name: str) -> tuple[str, ...]:
        group = self.layout.groups[name]
        # as `GatheredWeights`: weights of which ranks have uneven shards do not lie together
        sizes = [self.layout.shapes[each].numel() for each in group]
        whole = all(self.is_cast_from_master(each) for each in group) and not any(
            size % self._masters.ranks for size in sizes
        )
        return group if whole or not any(self.is_cast_from_master(each) for each in group) else (name,)

    def is_cast_from_master(self, name: str) -> bool:
        """Whether ZeRO gathers the weight in FP8; others are cast from the 16-bit values that it gathers."""
        return self.layout.names.origin[name] in self._masters and name not in self.layout.cast_by_layers

    @property
    def from_masters(self) -> int:
        return sum(map(self.is_cast_from_master, self.layout.groups))

    def record(self) -> dict[str, Any]:
        if self._record.get("architectures"):
            return self._record
        return {**self._record, "architectures": [causal_lm(self.model_config).__name__]}

    def copy_files(self, folder: Path) -> None:
        copy_beside(self._folder, folder)


def copy_beside(source: Path, folder: Path) -> None:
    """Copy what of a model's folder says nothing of its weights: the tokenizer, generation_config.json."""
    for path in source.iterdir():
        of_weights = path.name in _OF_WEIGHTS or path.name.endswith(".index.json")
        if not path.is_dir() and path.suffix in _BESIDE and not of_weights:
            require_file(path, COPY_AGAIN)
            shutil.copy(path, folder / path.name)
        elif path.is_dir() and path.name == _TEMPLATES:
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)


def _require_granularity(name: str, there: str | None, chosen: CheckpointFormat) -> None:
    """Raise ValueError unless a weight's FP8 values have scales of the format."""
    if there != chosen.granularity:
        raise ValueError(
            f"{name} is kept in FP8 alone, with {there or 'other'} scales, and the format has {chosen.granularity} "
            "ones; use the format that it is in, or bf16, since to cast it again would round it twice."
        )


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
