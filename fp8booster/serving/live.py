"""A model in memory as a source of the tensors of an export."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.nn.adapters import is_adapted, merged_weight
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.source import CachedWeight
from fp8booster.scaling import RealTime
from fp8booster.serving.formats import CheckpointFormat
from fp8booster.serving.gathering import gathered, gathered_dtypes, is_colossal, is_sharded
from fp8booster.serving.layout import layout_of, layout_of_config, state_of
from fp8booster.serving.source import Source, half_of, require_granularity, require_of_one_layer, require_shapes
from fp8booster.tensor import QuantizedMatrix, stored_scale

_OF_THIS_PROCESS = ("_name_or_path", "_attn_implementation_autoset")
"""Fields that save_pretrained leaves out: the place of the model, and a mark with which transformers 4 would choose no
fast attention."""


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
        self.dtype = half_of(value.dtype for value in self._tensors.values())
        stored = self.layout.names.of
        require_of_one_layer((stored.get(name, (name,))[0] for name in self._adapters), self.layout, "the model")

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
            require_granularity(name, config.granularity, chosen)
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
    require_shapes(dataclasses.replace(layout, shapes=whole, first_name={}), there, "this process")
