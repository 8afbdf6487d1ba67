"""What of a model is exported in FP8: the layers that train in FP8, under the scales that training has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.nn.convert import convert_to_fp8
from fp8booster.nn.experts.held_as_one import FP8Experts, are_experts
from fp8booster.nn.fused import fuse
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import held_by_several
from fp8booster.serving.names import StoredNames
from fp8booster.training.models import attention_of, building, causal_lm


@dataclass(frozen=True)
class Layout:
    """By name in files, what a model's tensors are."""

    shapes: dict[str, torch.Size]
    first_name: dict[str, str]
    """By each name of a parameter, its first: tied weights have several."""
    parameters: frozenset[str]
    """The rest are buffers."""
    groups: dict[str, tuple[str, ...]]
    """By the name of a weight that is exported in FP8, those that share its scale where a tensor has one."""
    cast_by_layers: frozenset[str]
    """Those among them that no engine casts, from its masters, but each layer from its 16-bit value."""
    kept: tuple[str, ...]
    """Linear layers that stay in 16 bits, by their paths."""
    names: StoredNames

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """The paths of `kept`, and those in the model where they differ: engines read the ones, transformers both."""
        return tuple(dict.fromkeys([*self.kept, *map(self.names.module_of, self.kept)]))


def skeleton(config: Any) -> Any:
    """The causal language model that transformers builds from a config, without memory."""
    kind, attention = causal_lm(config), attention_of(config)
    with building(config), torch.device("meta"):
        model = kind._from_config(config, attn_implementation=attention)
    model.tie_weights()
    return model


def layout_of_config(config: Any, fp8_config: FP8Config | None) -> Layout:
    """Of the model that transformers builds from a config, trained under an `FP8Config`; None: with no layer in FP8.

    Raises:
        ValueError: no layer would be in FP8, or experts cannot be exported.
    """
    model = skeleton(config)
    if fp8_config is None:
        return layout_of(model, in_fp8=False)
    convert_to_fp8(model, fp8_config)
    if fp8_config.fused:
        fuse(model)
    return layout_of(model)


def layout_of(model: nn.Module, *, in_fp8: bool = True) -> Layout:
    """Of a converted model, or, unless `in_fp8`, of any that is written in 16 bits.

    Raises:
        ValueError: no layer is in FP8, a rank holds a part of one, or experts cannot be exported.
    """
    names, paths = StoredNames(model), {id(module): name for name, module in model.named_modules()}
    layers = list(_exported(model)) if in_fp8 else []
    stacks = [part for name in _experts(model) for part in _stacked(model, name, names)] if in_fp8 else []
    if in_fp8 and not (layers or stacks):
        raise ValueError("no nn.Linear of the model is in FP8; export a model with layers that FP8Config.layers names")
    weights = {id(layer): names.of[f"{paths[id(layer)]}.weight"][0] for layer in layers}
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in weights.values()}
    for merged in merged_layers(model):
        together = tuple(weights[id(layer)] for layer in merged.layers if id(layer) in weights)
        if merged.why_not_merged is None and len(together) == len(merged.layers):
            groups.update(dict.fromkeys(together, together))
    groups.update({name: stack for stack in stacks for name in stack})
    first: dict[int, str] = {}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    first_in_model = {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}
    heads = [
        pair
        for name, one in first_in_model.items()
        for pair in zip(names.of.get(name, ()), names.of.get(one, ()), strict=False)
    ]
    # the state dict has a weight that is kept in FP8 alone, and the parameters do not
    frozen = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, FrozenLayer)}
    stored = [part for name in _of_linear_layers(model) for part in names.of[name]]
    return Layout(
        names.stored_shapes,
        dict(heads),
        frozenset(part for name in {*parameters, *frozen} for part in names.of.get(name, ())),
        groups,
        frozenset(
            weights[id(layer)]
            for layer in layers
            if layer.why_cast_by_itself is not None or any(size % ALIGNMENT for size in layer.held_weight.shape)
        ).union(*stacks),
        tuple(dict.fromkeys(_path(name) for name in stored if name not in groups)),
        names,
    )


def _exported(model: nn.Module) -> Iterator[FP8Layer]:
    """The FP8 layers that are nn.Linear, which is what engines put their own layers in the place of.

    Not those whose weight embeddings have too, which engines read in 16 bits.
    """
    tied = held_by_several(model)
    for name, module in model.named_modules():
        if not isinstance(module, FP8Layer):
            continue
        if module.original is nn.Linear:
            if id(module._parameters.get("weight")) not in tied:
                yield module
        elif not module.weight_is_transposed:
            raise ValueError(
                f"{name} is a {module.original.__name__}, of which a rank holds a part; save the model with "
                "booster.save_model, and export that folder"
            )


def _experts(model: nn.Module) -> list[str]:
    """Modules that hold experts as one parameter, by their paths."""
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, FP8Experts) or are_experts(module)]


def _stacked(model: nn.Module, path: str, names: StoredNames) -> list[tuple[str, ...]]:
    """The weights of experts held as one parameter that are in FP8: by parameter, which has one scale, those in files.

    Raises:
        ValueError: files hold the experts as one parameter too.
    """
    module = model.get_submodule(path)
    if not isinstance(module, FP8Experts):
        return []
    stacks = [names.of[f"{path}.{name}"] for name in module.fp8_weights]
    parts = [part for stack in stacks for part in stack]
    if not all(part.endswith(".weight") and len(names.stored_shapes[part]) == 2 for part in parts):
        raise ValueError(
            f"{path} holds its experts as one parameter in files too, of which engines know no FP8 form; give an "
            "FP8Config whose layers leave it out, or the format bf16"
        )
    return stacks


def _of_linear_layers(model: nn.Module) -> list[str]:
    """Weights that are linear layers' in files: those of nn.Linear, and of experts held as one and their routers."""
    found = [f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    for path in _experts(model):
        stacks = model.get_submodule(path).named_parameters(recurse=False)
        found += [f"{path}.{name}" for name, value in stacks if value.dim() == 3]
        block = path.rpartition(".")[0]
        for name, module in model.get_submodule(block).named_children():
            weight = module._parameters.get("weight")
            if weight is not None and weight.dim() == 2 and f"{block}.{name}.weight" not in found:
                found.append(f"{block}.{name}.weight")
    return found


def _path(name: str) -> str:
    """Of the layer that has a weight, or of the module that has a parameter that is no layer's."""
    return name.rpartition(".")[0]
