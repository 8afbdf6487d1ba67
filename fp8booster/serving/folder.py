"""The folder of a model, or of adapters on such a folder, as a source of the tensors of an export."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3
from fp8booster.nn.adapters import changes_base, is_adapted, merged_weight
from fp8booster.reading import COPY_AGAIN, faults_named, first_line, first_of, read_record, require_file
from fp8booster.serving.formats import CheckpointFormat, granularity_of, require_stored
from fp8booster.serving.layout import layout_of_config
from fp8booster.serving.shards import Masters
from fp8booster.serving.source import Source, half_of, require_granularity, require_of_one_layer, require_shapes
from fp8booster.serving.stored import StoredModel
from fp8booster.training.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from fp8booster.training.models import causal_lm, model_of_config

_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of files that are copied with a model: of its tokenizer, generation_config.json."""

_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers 5 saves a tokenizer's chat templates but its first, chat_template.jinja."""


_MORE = ("modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters")
"""Settings of peft with which it trains more than matrices of linear layers and embeddings."""


class Folder(Source):
    """A folder in Hugging Face's format, in 16 bits or in FP8.

    Args:
        folder: of a model. Layers that are in FP8 there are so in what is written.
        config: for one in 16 bits; None is `FP8Config()`.
        masters: as in `export`.
        in_fp8: layers are to be written in FP8.
    """

    def __init__(
        self, folder: Path, config: FP8Config | None, masters: Path | None = None, *, in_fp8: bool = True
    ) -> None:
        super().__init__()
        self._stored = StoredModel(folder)
        self.fp8_config = config or FP8Config()
        self._masters = Masters(masters)
        cast_anew = in_fp8 and not self._stored.in_fp8
        self.layout = layout_of_config(self._stored.config, self.fp8_config if cast_anew else None)
        names = self.layout.names
        self._stored.rename(names.renamed)
        # Colossal-AI saves tensors as the model of transformers 5 has them, experts in one, and transformers loads both
        self._stored.shards.divide({name: each for name, each in names.of.items() if len(each) > 1}, names.part)
        for name in self._stored.names:
            if name not in self.layout.shapes:  # transformers ignores it, as what it makes from others
                self._stored.shards.drop(name)
        scale_of, shards = self._stored.scale_of, self._stored.shards
        if in_fp8 and scale_of:  # the layers in FP8 are the folder's choice
            kept = tuple(name for name in self.layout.kept if f"{name}.weight" not in scale_of)
            self.layout = dataclasses.replace(self.layout, groups={name: (name,) for name in scale_of}, kept=kept)
        require_shapes(self.layout, {name: shards.shape(name) for name in self._stored.names}, str(folder))
        self.dtype = half_of(shards.dtype(name) for name in self._stored.names)
        self.from_masters = sum(map(self.is_cast_from_master, self.layout.groups))

    @property
    def names(self) -> Iterable[str]:
        there: dict[str, str] = {}  # a tied weight may be under any of its names
        for name in self._stored.names:
            there.setdefault(self.layout.first_name.get(name, name), name)
        return there.values()

    def tensor(self, name: str) -> torch.Tensor:
        return self._stored.value(name)

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        place = self._stored.scale_of.get(name)
        if place is None:
            return None
        data, scale = self._stored.shards.tensor(name), self._stored.shards.tensor(place)
        # the bytes go out as they are, so this is the last look at them
        require_stored(data, scale, name)
        scale = scale.float()
        there = granularity_of(data.shape, scale.shape, self._stored.block) if data.dtype is E4M3 else None
        require_granularity(name, there, chosen)
        # others store scales flat, or one as a vector
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
        gathered = [self.is_cast_from_master(each) for each in group]
        # as in `GatheredWeights`: weights of which ranks have uneven shards do not lie together
        even = all(gathered) and not any(self.layout.shapes[each].numel() % self._masters.ranks for each in group)
        return group if even or not any(gathered) else (name,)

    def is_cast_from_master(self, name: str) -> bool:
        """Tell whether ZeRO gathers the weight in FP8; others are cast from the 16-bit values that it gathers."""
        return self.layout.names.origin[name] in self._masters and name not in self.layout.cast_by_layers

    def record(self) -> dict[str, Any]:
        record = self._stored.record
        named = record.get("architectures")
        return {**record, "architectures": named or [causal_lm(self._stored.config).__name__]}

    def copy_files(self, folder: Path) -> None:
        _copy_beside(self._stored.folder, folder)


class Merged(Folder):
    """The folder of peft's adapters, and that of the model that they were trained on, in 16 bits or in FP8.

    A weight with adapters is their sum in FP32, to be rounded once. All others are the model's, with their FP8 values
    and scales.

    Args:
        folder: as peft's `save_pretrained` writes it. Its `adapter_config.json` names the folder of the model.
        config, in_fp8: as in `Folder`.

    Raises:
        ValueError: one of the two folders is missing or damaged, they do not fit, or peft trained more than adapters.
    """

    def __init__(self, folder: Path, config: FP8Config | None, *, in_fp8: bool = True) -> None:
        self._adapter_folder, file = folder, folder / ADAPTER_CONFIG
        record = read_record(file, {"peft_type": str}, COPY_AGAIN)
        model = record.get("base_model_name_or_path")
        if not (isinstance(model, str) and model and Path(model).is_dir()):
            raise ValueError(
                f"{file} names no folder of a model here ({model!r}); train adapters on a folder, and write where it "
                "is as base_model_name_or_path there."
            )
        if record["peft_type"] == "LN_TUNING":
            raise ValueError(
                f"{file} is of LN_TUNING, which trains copies of layers and no adapters on weights; put "
                "them into the model with peft's merge_and_unload, and export that."
            )
        # what else peft trained is in no matrix that a merge adds to
        if any(map(record.get, _MORE)) or record.get("bias", "none") != "none":
            raise ValueError(f"{file} trains more than adapters; merge it with peft's merge_and_unload.")
        # the folder of the model has the weights before that change
        if changes_base(begun := record.get("init_lora_weights")):
            raise ValueError(
                f"{file} has init_lora_weights {begun!r}, by which peft changed the model too; merge it with peft's "
                "merge_and_unload."
            )
        super().__init__(Path(model), config, in_fp8=in_fp8)
        adapted = _adapters_of(folder, model_of_config(self._stored.config))
        stored = self.layout.names.of
        layers = {f"{name}.weight": module for name, module in adapted.named_modules() if is_adapted(module)}
        self._adapters = {stored[name][0] if name in stored else name: module for name, module in layers.items()}
        self.merged = len(self._adapters)
        require_of_one_layer(self._adapters, self.layout, model)

    def tensor(self, name: str) -> torch.Tensor:
        adapters = self._adapters.get(name)
        if adapters is None:
            return super().tensor(name)
        # the sum in FP32 is rounded once, to FP8 or to 16 bits
        base = adapters.get_base_layer()  # peft merges into its weight, which has values for this call alone
        # put back afterwards, or the whole model would be in memory in the end
        without_memory = base.weight
        base.weight = nn.Parameter(super().tensor(name).float(), requires_grad=False)
        try:
            return merged_weight(adapters)
        except ValueError as error:
            raise ValueError(f"The adapters of {name} are not finite; export an earlier checkpoint.") from error
        finally:
            base.weight = without_memory

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if name in self._adapters else super().made(name, chosen, power_of_two)

    def copy_files(self, folder: Path) -> None:
        super().copy_files(folder)
        _copy_beside(self._adapter_folder, folder)  # the tokenizer that adapters were trained with


def _adapters_of(folder: Path, model: nn.Module) -> nn.Module:
    """Put the adapters of a folder into a model without memory; return the model.

    Raises:
        ValueError: peft is not installed, or the adapters are missing, damaged or another model's.
    """
    try:
        from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
    except ImportError:
        raise ValueError("merging adapters needs peft; pip install peft") from None
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(f"{folder} holds no {ADAPTER_FILE}; save the adapters there as safetensors.")
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None:  # peft puts adapters where weights are: one value takes the place of each
            value = torch.ones((), dtype=weight.dtype, device="cpu")
            layer.weight = nn.Parameter(value.expand(weight.shape), requires_grad=False)
    with faults_named(file):
        # of embeddings that it is on, peft saves the weight too, which the model's folder has
        saved = {name: value for name, value in load_file(file).items() if not name.endswith(".base_layer.weight")}
        try:
            adapted: Any = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))  # type: ignore[arg-type]
            # peft ignores names that do not fit, and tells them only in what it returns
            found: Any = set_peft_model_state_dict(adapted, saved)
        except (RuntimeError, ValueError) as error:  # sizes, and names of layers
            raise ValueError(f"{file} is of another model ({first_line(error)}); name that as base.") from None
    if found.unexpected_keys:
        raise ValueError(f"{file} is of another model: it has {first_of(found.unexpected_keys)}; name that as base.")
    absent = [name for name in found.missing_keys if "lora_" in name]
    if absent:
        raise ValueError(f"{file} lacks {absent[0]} and {len(absent) - 1} more; {COPY_AGAIN}.")
    return adapted.get_base_model()


def _copy_beside(source: Path, folder: Path) -> None:
    """Copy the files of a model's folder that are not about its weights: the tokenizer, generation_config.json."""
    for path in source.iterdir():
        of_weights = path.name in ("config.json", ADAPTER_CONFIG) or path.name.endswith(".index.json")
        if not path.is_dir() and path.suffix in _BESIDE and not of_weights:
            require_file(path, COPY_AGAIN)
            shutil.copy(path, folder / path.name)
        elif path.is_dir() and path.name == _TEMPLATES:
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True)
