"""Causal language models in folders in Hugging Face's format, in 16 bits or in FP8, which hold all of their tensors.

transformers fills what a folder lacks with random numbers, and drops what it holds besides. What it renames, stacks,
ties and ignores differs from version to version, and so it is asked: it loads the model from tensors without memory,
and reports what was missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8booster.formats import FORMATS
from fp8booster.reading import first_line, first_of, read_record
from fp8booster.serving.formats import UNUSED_SCALES, block_of, decode, require_finite
from fp8booster.serving.layout import names_of_each
from fp8booster.serving.shards import Shards
from fp8booster.training.models import attention_of, causal_lm, model_of_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_SHOWN = 3  # names in a sentence

_GIVE_MODEL = "give the folder of a model"


def is_in_fp8(folder: Path) -> bool:
    """Tell whether the weights of a folder are in FP8, by its config.json.

    Raises:
        ValueError: they are quantized otherwise, or in a form that is not known, or in FP8 and it does not say so.
    """
    file = folder / "config.json"
    record = read_record(file, {}, _GIVE_MODEL)
    if record.get("transformers_weights") is not None:
        raise ValueError(
            f"{file} names its file of weights (transformers_weights); call it model.safetensors, and remove the field."
        )
    settings = record.get("quantization_config")
    if settings is not None:
        block_of(settings, str(file))
    elif _holds_fp8(folder):
        raise ValueError(
            f"{folder} holds weights in FP8, and its config.json has no quantization_config; write the model with "
            "fp8booster.export in place of save_pretrained."
        )
    return settings is not None


def _holds_fp8(folder: Path) -> bool:
    try:
        shards = Shards(folder)
        return any(shards.dtype(name) in FORMATS for name in shards.names)
    except ValueError:  # no weights, or damaged ones, are reported by who reads them
        return False


def forget_quantization(config: PretrainedConfig) -> None:
    """Make it the config of the model in 16 bits."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config


class StoredModel:
    """The tensors of a folder, which are those of the model that transformers builds from a config.

    A tied weight is there once.

    Args:
        folder: in Hugging Face's format.
        config: of the model in 16 bits; None: the folder's.

    Raises:
        ValueError: the folder holds no weights, or damaged ones, lacks tensors of the model, or holds others, some of
            other shapes, or numbers that are no weights, or is quantized in a form that is not known.
    """

    def __init__(self, folder: Path, config: PretrainedConfig | None = None) -> None:
        from transformers import AutoConfig

        self.folder, file = folder, folder / "config.json"
        self.record = read_record(file, {"model_type": str} if config is None else {}, _GIVE_MODEL)
        """Content of config.json, but for its quantization_config."""
        # transformers would else load layers of its own for FP8
        settings = self.record.pop("quantization_config", None)
        self.in_fp8 = settings is not None
        self.block = block_of(settings, str(file)) if self.in_fp8 else None
        """As of `block_of`."""
        self.config = config or AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        """Config of the model in 16 bits."""
        forget_quantization(self.config)
        self.shards = Shards(folder)
        self.rename({})
        model = model_of_config(self.config)
        self._drop_tied(model)
        self._require_whole(model)

    def rename(self, names: Mapping[str, str]) -> None:
        """Rename tensors as `Shards.rename` does."""
        self.shards.rename(names)
        self.scale_of = self.shards.scales() if self.in_fp8 else {}
        """Names of scales, by the names of the weights that have one."""

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors but those that are scales."""
        unused = UNUSED_SCALES if self.scale_of else ()
        of_weights = set(self.scale_of.values())
        return [name for name in self.shards.names if name not in of_weights and not name.endswith(unused)]

    def value(self, name: str) -> torch.Tensor:
        """Return a tensor: of an FP8 weight its values in FP32, of another as it is.

        Raises:
            ValueError: it is in FP8 without a scale, or with one that does not fit, or one of both is not finite.
        """
        tensor, scale = self.shards.tensor(name), self.scale_of.get(name)
        if scale is not None:
            return decode(tensor, self.shards.tensor(scale), self.block, name)
        if tensor.dtype in FORMATS:
            raise ValueError(
                f"{name} in {self.folder} is in FP8 and has no scale; copy the model again, or give another."
            )
        return tensor

    def load(self, dtype: torch.dtype) -> PreTrainedModel:
        """Return the model in 16 bits, in evaluation mode. Raises ValueError for values that are not finite."""
        tensors = {}
        for name in self.names:
            value = self.value(name)
            if name in self.scale_of:
                value = value.to(dtype)  # rounded once; in FP16 it may overflow
            tensors[name] = require_finite(f"{name} in {self.folder}", value)
        return as_loaded(self._through_transformers(tensors, dtype), self.folder)

    def _drop_tied(self, model: nn.Module) -> None:
        """Leave one of the names of a tied weight. Raises ValueError where its values differ: one would be dropped."""
        for names in names_of_each(model):
            there = [name for name in names if name in self.shards]
            for first, other in pairwise(there):
                # equal bytes under other scales are other values
                in_fp8 = {first, other} & self.scale_of.keys()
                if in_fp8 or not torch.equal(self.shards.tensor(first), self.shards.tensor(other)):
                    raise ValueError(
                        f"{first} and {other} in {self.folder} differ, and its config.json makes them one weight; set "
                        "tie_word_embeddings to false there, or copy the model again."
                    )
            for other in there[1:]:
                self.shards.drop(other)

    def _require_whole(self, model: nn.Module) -> None:
        """Raise ValueError unless transformers finds all tensors of the model in the folder, and no others."""
        # by names, types and shapes: no value need be in memory for this check
        found = {name: self.shards.dtype(name) for name in self.names}
        own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        counts = {name: value.dtype for name, value in own if not value.is_floating_point()}
        meta = {
            name: torch.empty(self.shards.shape(name), dtype=counts.get(name, torch.bfloat16), device="meta")
            for name in found
        }
        self._through_transformers(meta, torch.bfloat16, without_memory=True)
        no_weights = [name for name, dtype in found.items() if not dtype.is_floating_point and name not in counts]
        if no_weights:  # unless transformers ignores them, the model lacks them
            rest = {name: value for name, value in meta.items() if name not in no_weights}
            try:
                self._through_transformers(rest, torch.bfloat16, without_memory=True)
            except ValueError:
                kinds = [f"{name} as {found[name]}" for name in no_weights]
                raise ValueError(
                    f"{self.folder} holds {first_of(kinds, shown=_SHOWN)}, and weights are floating-point numbers; "
                    "copy the model again, or give another."
                ) from None

    def _through_transformers(
        self, tensors: dict[str, torch.Tensor], dtype: torch.dtype, *, without_memory: bool = False
    ) -> PreTrainedModel:
        """Return the model of tensors under their names in files, in evaluation mode.

        Args:
            without_memory: on "meta", neither the model nor the tensors have values.

        Raises:
            ValueError: the model has tensors that are not there, or has not all that are there, or has other shapes.
        """
        kind, place = causal_lm(self.config), {"device_map": {"": "meta"}} if without_memory else {}
        if without_memory:  # transformers would draw missing tensors on the host
            own = {"__module__": kind.__module__, "_init_weights": lambda self, module: None}
            kind = type(kind.__name__, (kind,), own)
        with _quiet():
            try:
                model, found = kind.from_pretrained(
                    None,
                    config=self.config,
                    state_dict=dict(tensors),
                    torch_dtype=dtype,
                    attn_implementation=attention_of(self.config),
                    ignore_mismatched_sizes=True,  # they are in what is found then
                    output_loading_info=True,
                    **place,
                )
            except RuntimeError as error:  # of tensors that are to be stacked, as experts
                raise ValueError(
                    f"The weights in {self.folder} do not fit its config.json ({first_line(error)}); save both again, "
                    "together."
                ) from None
        missing, extra, others = (
            # some versions give shapes with a name
            first_of(sorted(key if isinstance(key, str) else str(key[0]) for key in found[f"{fault}_keys"]), _SHOWN)
            for fault in ("missing", "unexpected", "mismatched")
        )
        if others:
            raise ValueError(
                f"The weights in {self.folder} do not fit its config.json (size mismatch of {others}); save both "
                "again, together."
            )
        if missing:
            raise ValueError(f"{self.folder} lacks {missing}; copy the model again.")
        if extra:
            raise ValueError(
                f"{self.folder} holds {extra}, which the model of its config.json does not have; give the config.json "
                "that belongs to the weights."
            )
        return model


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off the progress bars and tables of transformers, whose faults are told in sentences."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    # transformers would print tables of what this file tells in a sentence
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()


def as_loaded(model: Any, folder: Path) -> PreTrainedModel:
    """Give a model its generation config and its name, as transformers' `from_pretrained` does; return the model."""
    from transformers import GenerationConfig

    file = folder / "generation_config.json"
    if file.is_file():
        read_record(file, {}, "copy the model again")
        model.generation_config = GenerationConfig.from_pretrained(str(folder))  # with the hash that generate() reads
    model.name_or_path = model.config.name_or_path = str(folder)
    return model.eval()
