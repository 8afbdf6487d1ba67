"""A model with adapters merged into its weights, one layer after the other, from the folders of both."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.listing import first_of
from fp8booster.nn.adapters import changes_base, is_adapted, merged_weight
from fp8booster.reading import COPY_AGAIN, faults_named, first_line, read_record
from fp8booster.serving.formats import CheckpointFormat
from fp8booster.serving.layout import skeleton
from fp8booster.serving.sources import Folder, Source, copy_beside
from fp8booster.training.adapters import ADAPTER_CONFIG, ADAPTER_FILE

_MORE = ("modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters")
"""Settings of peft by which it trains what is no matrix of a linear layer or of embeddings."""

_NO_ADAPTERS = ("LN_TUNING",)
"""Types of peft's that put a trained copy of a layer in the place of it."""

_OF_MODEL = ".base_layer.weight"
"""End of the names by which peft saves weights of the model that adapters are on."""


class Merged(Source):
    """The folder of peft's adapters, and that of the model that they were trained on, in 16 bits or in FP8.

    A weight with adapters is their sum in FP32, which who writes it rounds once. All others are the model's, their FP8
    values and scales too.

    Args:
        folder: as peft's `save_pretrained` writes it. Its `adapter_config.json` names the folder of the model.
        config, in_fp8: as in `Folder`.

    Raises:
        ValueError: one of the two folders is missing or damaged, they do not fit, or peft trained more than adapters.
    """

    def __init__(self, folder: Path, config: FP8Config | None, *, in_fp8: bool = True) -> None:
        self._folder = folder
        file = folder / ADAPTER_CONFIG
        record = read_record(file, {"peft_type": str}, COPY_AGAIN)
        model = record.get("base_model_name_or_path")
        if not (isinstance(model, str) and model and Path(model).is_dir()):
            raise ValueError(
                f"{file} names no folder of a model here ({model!r}); train adapters on a folder, and write where it "
                "is as base_model_name_or_path there."
            )
        if record["peft_type"] in _NO_ADAPTERS:
            raise ValueError(
                f"{file} is of {record['peft_type']}, which trains copies of layers and no adapters on weights; put "
                "them into the model with peft's merge_and_unload, and export that."
            )
        if any(map(record.get, _MORE)) or record.get("bias", "none") != "none":
            raise ValueError(f"{file} trains more than adapters; merge it with peft's merge_and_unload.")
        if changes_base(begun := record.get("init_lora_weights")):
            raise ValueError(
                f"{file} has init_lora_weights {begun!r}, by which peft changed the model too; merge it with peft's "
                "merge_and_unload."
            )
        self._base = Folder(Path(model), config, in_fp8=in_fp8)
        self.fp8_config, self.layout, self.dtype = self._base.fp8_config, self._base.layout, self._base.dtype
        adapted = _adapters_of(folder, skeleton(self._base.model_config))
        stored = self.layout.names.of
        layers = {f"{name}.weight": module for name, module in adapted.named_modules() if is_adapted(module)}
        self._adapters = {stored[name][0] if name in stored else name: module for name, module in layers.items()}
        self.merged = len(self._adapters)
        self._require_own_weights(model)

    @property
    def names(self) -> Iterable[str]:
        return self._base.names

    def tensor(self, name: str) -> torch.Tensor:
        adapters = self._adapters.get(name)
        if adapters is None:
            return self._base.tensor(name)
        base = adapters.get_base_layer()
        without_memory = base.weight
        base.weight = nn.Parameter(self._base.tensor(name).float(), requires_grad=False)
        try:
            return merged_weight(adapters)
        except ValueError as error:
            raise ValueError(f"The adapters of {name} are not finite; export an earlier checkpoint.") from error
        finally:
            base.weight = without_memory

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        return None if name in self._adapters else self._base.made(name, chosen, power_of_two)

    def record(self) -> dict[str, Any]:
        return self._base.record()

    def copy_files(self, folder: Path) -> None:
        self._base.copy_files(folder)
        copy_beside(self._folder, folder)  # the tokenizer that adapters were trained with

    def _require_own_weights(self, model: str) -> None:
        """Raise ValueError where adapters are on weights that are no layer's of the model, or several layers'."""
        tied = Counter(self.layout.first_name.values())
        for name in self._adapters:
            if tied[self.layout.first_name.get(name, "")] != 1:
                raise ValueError(
                    f"{name} in {model} is no weight of one layer alone; merge its adapters with merge_and_unload."
                )


def _adapters_of(folder: Path, model: nn.Module) -> nn.Module:
    """Put the adapters of a folder into a model without memory; returns the model.

    Raises:
        ValueError: peft is not installed, or the adapters are missing, damaged or another model's.
    """
    try:
        from peft import PeftConfig, get_peft_model, set_peft_model_state_dict
    except ImportError:
        raise ValueError("adapters are merged by peft; pip install peft") from None
    file = folder / ADAPTER_FILE
    if not file.is_file():
        raise ValueError(f"{folder} holds no {ADAPTER_FILE}; save the adapters there as safetensors.")
    for layer in model.modules():
        weight = layer._parameters.get("weight")
        if weight is not None:  # peft puts adapters where weights are: one value takes the place of each
            value = torch.ones((), dtype=weight.dtype)
            layer.weight = nn.Parameter(value.expand(weight.shape), requires_grad=False)
    with faults_named(file):
        # of embeddings that it is on, peft saves the weight too, which the model's folder has
        saved = {name: value for name, value in load_file(file).items() if not name.endswith(_OF_MODEL)}
        try:
            adapted: Any = get_peft_model(model, PeftConfig.from_pretrained(str(folder)))  # type: ignore[arg-type]
            found: Any = set_peft_model_state_dict(adapted, saved)
        except (RuntimeError, ValueError) as error:  # sizes, and names of layers
            raise ValueError(f"{file} is of another model ({first_line(error)}); give that as base.") from None
    if found.unexpected_keys:
        raise ValueError(f"{file} is of another model: it has {first_of(found.unexpected_keys)}; give that as base.")
    absent = [name for name in found.missing_keys if "lora_" in name]
    if absent:
        raise ValueError(f"{file} lacks {absent[0]} and {len(absent) - 1} more; {COPY_AGAIN}.")
    return adapted.get_base_model()
