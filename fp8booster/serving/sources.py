"""Sources of the tensors of an export: a model in memory, the folder of one, or adapters on such a folder."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3, HIGH_PRECISION
from fp8booster.kernels.scales import amax_of
from fp8booster.nn.adapters import changes_base, is_adapted, merged_weight
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.source import CachedWeight
from fp8booster.reading import COPY_AGAIN, faults_named, first_line, first_of, read_record, require_file
from fp8booster.scaling import RealTime
from fp8booster.serving.formats import CheckpointFormat, granularity_of, require_finite, require_stored
from fp8booster.serving.gathering import gathered, gathered_dtypes, is_colossal, is_sharded
from fp8booster.serving.layout import Layout, layout_of, layout_of_config, skeleton, state_of
from fp8booster.serving.shards import Masters
from fp8booster.serving.stored import StoredModel
from fp8booster.tensor import QuantizedMatrix, stored_scale
from fp8booster.training.adapters import ADAPTER_CONFIG, ADAPTER_FILE
from fp8booster.training.models import causal_lm

_BESIDE = (".json", ".txt", ".model", ".jinja", ".tiktoken")
"""Ends of files that are copied with a model: of its tokenizer, generation_config.json."""

_TEMPLATES = "additional_chat_templates"
"""Folder in which transformers 5 saves a tokenizer's chat templates but its first, chat_template.jinja."""

_MORE = ("modules_to_save", "lora_bias", "trainable_token_indices", "target_parameters")
"""Settings of peft with which it trains more than matrices of linear layers and embeddings."""

_OF_THIS_PROCESS = ("_name_or_path", "_attn_implementation_autoset")
"""Fields that save_pretrained leaves out: the place of the model, and a mark with which transformers 4 would choose no
fast attention."""


class Source(ABC):
    """The tensors of a model, by their names in files."""

    fp8_config: FP8Config
    layout: Layout
    dtype: torch.dtype = torch.bfloat16
    """Type of what is written in 16 bits: FP16 for a model that has that and no BF16."""
    merged: int = 0
    """Weights that adapters are merged into."""
    from_masters: int = 0
    """Weights that are cast from masters."""

    def __init__(self) -> None:
        self._amaxes: dict[tuple[str, ...], torch.Tensor] = {}

    @property
    @abstractmethod
    def names(self) -> Iterable[str]:
        """Return the names of all tensors, a tied one once."""

    @abstractmethod
    def tensor(self, name: str) -> torch.Tensor:
        """Return the value of a tensor in files, in FP32 where it is still to be rounded."""

    def weight(self, name: str) -> torch.Tensor:
        """Return the value that training casts."""
        return self.tensor(name)

    def castable(self, name: str) -> torch.Tensor:
        """Return the value that training casts, in a type that FP8 is cast from. Raises ValueError for none."""
        weight = self.weight(name)
        require_floating(name, weight)
        require_finite(name, weight)
        # products of training cast FP32, BF16 and FP16, and no FP64
        return weight if weight.dtype in HIGH_PRECISION else weight.float()

    def shared_amax(self, name: str) -> torch.Tensor:
        """Return the amax of the weights that share a scale with a weight."""
        group = self.scale_group(name)
        if group not in self._amaxes:
            # kept, so that q, k and v are read once for it and not thrice
            self._amaxes[group] = torch.stack([amax_of(self.castable(each)) for each in group]).max()
        return self._amaxes[group]

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return values and scale of a weight that is at hand in FP8 in this format; None for others.

        Raises:
            ValueError: it is at hand in another format, and nowhere else: to cast it again would round it twice.
        """
        return None

    def scale_group(self, name: str) -> tuple[str, ...]:
        """Return the weights that share a scale."""
        return self.layout.groups[name]

    @abstractmethod
    def record(self) -> dict[str, Any]:
        """Return the content of config.json."""

    @abstractmethod
    def copy_files(self, folder: Path) -> None:
        """Write the files that belong to the model besides its weights and config."""


class Live(Source):
    """A model in memory.

    Args:
        model: converted or not. What ranks divide is gathered tensor by tensor, by all of them in the same order.
        config: None is that of a converted model's layers, or `FP8Config()`.
        in_fp8: layers are to be written in FP8.

    Raises:
        TypeError, ValueError: as `fp8booster.serving.tensors`.
    """

    def __init__(self, model: nn.Module, config: FP8Config | None, *, in_fp8: bool = True) -> None:
        super().__init__()
        self._model = model = bare_model(model)
        adapters = adapters_in(model)
        self._adapters = {f"{name}.weight": module for name, module in adapters.items()}
        self.merged = len(adapters)
        layers = {name: module for name, module in model.named_modules() if isinstance(module, FP8Layer)}
        layers = _without_adapters(layers, adapters)
        self._layers = {f"{name}.weight": layer for name, layer in layers.items()}
        self._merged: dict[FP8Layer, MergedLayers] = {
            layer: merged for merged in merged_layers(model) if merged.why_not_merged is None for layer in merged.layers
        }
        self._tensors = _without_adapters(state_of(model), adapters)
        self._dtypes = gathered_dtypes(model)
        self._whole: dict[str, torch.Tensor] = {}
        """What was gathered, or merged, of the weights that share a scale, by the names in the model."""
        self.is_sharded = any(map(is_sharded, self._tensors.values()))
        """Ranks hold parts of the model."""
        if adapters and self.is_sharded:
            raise ValueError(f"ranks hold parts of a model with adapters; {_SAVE_ADAPTERS}")
        # a converted model has chosen its layers, unless it is asked for others; frozen ones cannot change
        frozen = any(isinstance(layer, FrozenLayer) for layer in layers.values())
        own = not in_fp8 or (bool(layers) and (config is None or frozen))
        chosen = next((layer.fp8_config for layer in layers.values()), FP8Config()) if own else FP8Config()
        self.fp8_config = config or chosen
        divided = any(map(is_colossal, self._tensors.values()))
        if dist.is_initialized() and dist.get_world_size() > 1:
            _require_all_tensors(model.config, self._tensors, divided)
        if own and not divided and not adapters:
            self.layout = layout_of(model, in_fp8=in_fp8)
        else:
            # shardformer's layers have the shapes of a rank, and adapters stand where files have layers
            self.layout = layout_of_config(self._model.config, self.fp8_config if in_fp8 else None)
        self.dtype = _half_of(value.dtype for value in self._tensors.values())
        stored = self.layout.names.of
        _require_of_one_layer((stored.get(name, (name,))[0] for name in self._adapters), self.layout, "the model")

    @property
    def names(self) -> Iterable[str]:
        stored = [part for name in self._tensors for part in self.layout.names.of[name]]
        return [name for name in stored if self.layout.first_name.get(name, name) == name]

    def tensor(self, name: str) -> torch.Tensor:
        origin = self.layout.names.origin[name]
        layer = None if origin in self._adapters else self._layers.get(origin)
        if isinstance(layer, FrozenLayer):
            values = layer.quantized.dequantize(*layer.fp8_shape)
            return values.t() if layer.weight_is_transposed else values
        # shards of FSDP2 have values, whatever the layer holds while they are gathered
        held = self._tensors[origin]
        of_fsdp = is_sharded(held) and not is_colossal(held)
        if layer is not None and layer.fp8_weight.lacks_values and not of_fsdp:
            raise ValueError(
                f"{name} has no values in 16 bits between two steps (WeightCopies.high_precision); use a format with "
                "the scales of training, or save the model with booster.save_model, and export that folder"
            )
        return self.layout.names.part(name, self._value(name, origin)).detach()

    def _value(self, name: str, origin: str) -> torch.Tensor:
        tensor, adapters = self._tensors[origin], self._adapters.get(origin)
        if adapters is None and not is_sharded(tensor):
            return tensor
        # each is read twice where several share a scale: for the amax of all, and for its cast
        together = {self.layout.names.origin[each] for each in self.layout.groups.get(name, (name,))}
        self._whole = {other: whole for other, whole in self._whole.items() if other in together}
        if origin not in self._whole:
            whole = gathered(tensor, self._dtypes.get(id(tensor))) if adapters is None else merged_weight(adapters)
            self._whole[origin] = whole
        return self._whole[origin]

    def made(self, name: str, chosen: CheckpointFormat, power_of_two: bool) -> tuple[torch.Tensor, torch.Tensor] | None:
        origin = self.layout.names.origin[name]
        layer = None if origin in self._adapters else self._layers.get(origin)
        if layer is None or is_sharded(layer.held_weight):
            return None
        config = layer.fp8_config
        if isinstance(layer, FrozenLayer):
            _require_granularity(name, config.granularity, chosen)
        elif (config.granularity, config.power_of_two) != (chosen.granularity, power_of_two):
            return None
        rows, columns = layer.held_weight.shape
        # the bytes that training multiplied by, not another cast of the same value
        if layer.fp8_weight.is_provided([layer.held_weight]):
            quantized, first = layer.fp8_weight.forward([layer.held_weight], layer.fp8_casts, transpose=False), 0
        elif (found := self._fresh(name, layer)) is not None:
            quantized, first = found
        else:
            return None
        return quantized.data[first : first + rows, :columns], stored_scale(quantized.inverse_scale, rows, columns)

    def _fresh(self, name: str, layer: FP8Layer) -> tuple[QuantizedMatrix, int] | None:
        """Return what a layer multiplied by in training since the last step, and the first of its rows there."""
        one: Any = layer if self.layout.groups[name] == (name,) else self._merged.get(layer)
        # scales that training remembers are none of the weight as it is
        if one is None or not layer.training or not isinstance(one.fp8_casts.scaling, RealTime):
            return None
        source, weights = one.fp8_weight, [layer.held_weight] if one is layer else one.weights
        # rows of several layers have finer scales of their own only where no block reaches over two layers
        if not isinstance(source, CachedWeight) or (one is not layer and layer.fp8_config.finer_scales):
            return None
        fresh = source.fresh(weights, one.fp8_casts)
        if fresh is None:
            return None
        before = [] if one is layer else weights[: one.layers.index(layer)]
        return fresh, sum(map(len, before))

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
        self._stored.rename(self.layout.names.renamed)
        for name in self._stored.names:
            if name not in self.layout.shapes:  # transformers ignores it, as what it makes from others
                self._stored.shards.drop(name)
        scale_of, shards = self._stored.scale_of, self._stored.shards
        if in_fp8 and scale_of:  # the layers in FP8 are the folder's choice
            kept = tuple(name for name in self.layout.kept if f"{name}.weight" not in scale_of)
            self.layout = dataclasses.replace(self.layout, groups={name: (name,) for name in scale_of}, kept=kept)
        _require_shapes(self.layout, {name: shards.shape(name) for name in self._stored.names}, str(folder))
        self.dtype = _half_of(shards.dtype(name) for name in self._stored.names)
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
        _require_granularity(name, there, chosen)
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
        adapted = _adapters_of(folder, skeleton(self._stored.config))
        stored = self.layout.names.of
        layers = {f"{name}.weight": module for name, module in adapted.named_modules() if is_adapted(module)}
        self._adapters = {stored[name][0] if name in stored else name: module for name, module in layers.items()}
        self.merged = len(self._adapters)
        _require_of_one_layer(self._adapters, self.layout, model)

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


_OWN_MEMORY = ("FullyShardedDataParallel", "GeminiDDP")
"""Classes of FSDP1 and Gemini, by name: to import them takes seconds."""

_SAVE = "save it with booster.save_model, and export that folder"


def bare_model(model: nn.Module) -> Any:
    """Return the model of transformers within wrappers of Colossal-AI, DDP and the compiler, its parameters arrived.

    Raises:
        TypeError: there is none.
        ValueError: an engine keeps parameters where nobody else finds them.
    """
    bare: Any = model
    for module in (model, *model.modules()):  # Gemini's wrapper is none of its modules
        engine = next((kind.__name__ for kind in type(module).__mro__ if kind.__name__ in _OWN_MEMORY), None)
        if engine is not None:
            raise ValueError(
                f"{engine} lays parameters into memory of its own; {_SAVE}, or use FSDP2 or LowLevelZeroPlugin"
            )
    # a compiled model passes on what it is asked for, and its modules have other names
    while "_orig_mod" in bare._modules or not hasattr(bare, "save_pretrained"):
        inner = bare._modules.get("_orig_mod", bare._modules.get("module"))
        if inner is None:
            raise TypeError(f"{type(model).__name__} is no model of transformers; unwrap it, or export its checkpoint")
        bare = inner
    if "peft" in sys.modules and hasattr(bare, "peft_config") and hasattr(bare, "get_base_model"):
        bare = bare.get_base_model()
    if "colossalai.zero.low_level" in sys.modules:
        from fp8booster.colossal.zero.late_weights import wait_for_weights

        # not by the wrapper's method, which gathers the masters of all weights for a checkpoint
        wait_for_weights(bare)
    return bare


def adapters_in(model: nn.Module) -> dict[str, nn.Module]:
    """Return peft's adapters around layers of a model, by the paths of these.

    Raises:
        ValueError: they cannot be merged as the model is.
    """
    found = {}
    for path, module in model.named_modules():
        kinds = {kind.__name__ for kind in type(module).__mro__}
        if kinds & {"ModulesToSaveWrapper", "AuxiliaryTrainingWrapper", "LNTuningLayer"}:
            raise ValueError(f"peft trains a copy of {path}; {_SAVE_ADAPTERS}")
        if not is_adapted(module):
            continue
        inside = [each for each in module.modules() if isinstance(each, FP8Layer) and not isinstance(each, FrozenLayer)]
        if any(each.fp8_weight.lacks_values for each in inside):
            raise ValueError(
                f"the adapters of {path} have no values in 16 bits between two steps (WeightCopies.high_precision); "
                f"{_SAVE_ADAPTERS}"
            )
        found[path] = module
    return found


_SAVE_ADAPTERS = "save the adapters, and export their folder, or hand over what peft's merge_and_unload gives"

_Held = TypeVar("_Held")


def _without_adapters(held: Mapping[str, _Held], adapters: Collection[str]) -> dict[str, _Held]:
    """Return what a model holds by names, without adapters, under the names that it had before peft wrapped layers.

    Args:
        adapters: paths of the layers that have some.
    """
    kept, base = {}, "base_layer"
    for name, value in held.items():
        ends = [end for end, letter in enumerate(f"{name}.") if letter == "."]
        end = next((end for end in ends if name[:end] in adapters), None)
        if end is None:
            kept[name] = value
        elif name[end + 1 :].startswith(base):
            kept[name[:end] + name[end + 1 + len(base) :]] = value
    return kept


def _require_of_one_layer(adapters: Iterable[str], layout: Layout, place: object) -> None:
    """Raise ValueError for adapters on no layer's weight, or on that of several, as a tied one."""
    owners = Counter(layout.first_name.values())
    for name in adapters:
        if owners[layout.first_name.get(name, "")] != 1:
            raise ValueError(
                f"{name} in {place} is not one layer's weight; merge its adapters with peft's merge_and_unload."
            )


def _require_all_tensors(config: Any, tensors: Mapping[str, torch.Tensor], divided: bool) -> None:
    """Raise ValueError for a stage of a pipeline, or some of the experts, which would be taken for the model.

    Args:
        config: of the model.
        tensors: by the names in the model.
        divided: parameters may have the shapes of a rank.
    """
    layout = layout_of_config(config, None)
    whole = layout.names.shapes
    there = {name: whole.get(name, each.shape) if divided else each.shape for name, each in tensors.items()}
    _require_shapes(dataclasses.replace(layout, shapes=whole, first_name={}), there, "this process")


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
            value = torch.ones((), dtype=weight.dtype)
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


def _half_of(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """Return the 16-bit type of a model: FP16 where it has that and no BF16."""
    return torch.float16 if {torch.float16, torch.bfloat16} & {*dtypes} == {torch.float16} else torch.bfloat16


def _copy_beside(source: Path, folder: Path) -> None:
    """Copy the files of a model's folder that are not about its weights: the tokenizer, generation_config.json."""
    for path in source.iterdir():
        of_weights = path.name in ("config.json", ADAPTER_CONFIG) or path.name.endswith(".index.json")
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
            "ones; use the format that it is in, or bf16: another cast would round it twice."
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


def require_floating(name: str, tensor: torch.Tensor) -> None:
    """Raise ValueError for a tensor that is no weight in 16 bits or more."""
    if not tensor.is_floating_point() or tensor.element_size() == 1:
        raise ValueError(
            f"{name} is {tensor.dtype}, and weights have 16 bits or more; give the model as it was trained"
        )
