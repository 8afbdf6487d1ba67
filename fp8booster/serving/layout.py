"""Tensors of a model as checkpoints hold them: their names and shapes there, and the weights that are in FP8.

transformers 5 renames and stacks tensors as it loads them, and undoes that as it saves: GPT-NeoX's head is `embed_out`
in files and `lm_head` in the model. Engines and transformers 4 read files, and so files have the names that `export`
writes. The rules are transformers' own (`conversion_mapping.py`). In FP8 are the layers that train in FP8, under the
scales that training has.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.nn.convert import convert_to_fp8
from fp8booster.nn.experts.fp8_experts import FP8Experts, are_experts
from fp8booster.nn.fused import fuse_model
from fp8booster.nn.fused.merged_layers import merged_layers
from fp8booster.nn.linear.frozen import HELD, FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import count_readers
from fp8booster.training.models import model_of_config


class StoredNames:
    """The tensors of a model in its checkpoints: each under one name, or in parts under several.

    Args:
        model: of transformers. Under transformers 4 all names are its own, and so are they in a model some of whose
            tensors are stored together, which is read and written as it is in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        state = state_of(model)
        self.shapes = {name: value.shape for name, value in state.items()}
        """Shapes by the names in the model."""
        self.dtypes = {name: value.dtype for name, value in state.items()}
        """Types by the names in the model."""
        self._rules = _rules_of(model)
        self._last: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
        meta = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in self.shapes.items()}
        if self._rules is not None and not self._go_one_by_one(meta):
            self._rules = None
        parts = {name: self.parts(name, value) for name, value in meta.items()}
        self.of = {name: tuple(each) for name, each in parts.items()}
        """Names in files, by the names in the model."""
        self.origin = {stored: name for name, each in parts.items() for stored in each}
        """Names in the model, by the names in files."""
        self.stored_shapes = {stored: value.shape for each in parts.values() for stored, value in each.items()}
        """Shapes in files, by the names there."""

    @property
    def renamed(self) -> dict[str, str]:
        """Return the names in files of tensors that have one other there, by their names in the model."""
        return {name: each[0] for name, each in self.of.items() if each != (name,) and len(each) == 1}

    def part(self, stored: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor of the model that files hold under a name."""
        if self._last is None or self._last[0] is not tensor:  # a layer's experts are many: they are divided once
            self._last = tensor, self.parts(self.origin[stored], tensor)
        return self._last[1][stored]

    def parts(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return a tensor of the model as files hold it, by the names there: views where it is in parts."""
        if self._rules is None:
            return {name: tensor}
        return self._stored({name: tensor})

    def module_of(self, path: str) -> str:
        """Return the path in the model of the module that has the weight of a layer, by its path in files."""
        return self.origin.get(f"{path}.weight", f"{path}.").rpartition(".")[0]

    def _go_one_by_one(self, state: dict[str, torch.Tensor]) -> bool:
        """Tell whether the rules take one tensor each, so that tensors can be converted one after the other."""
        try:
            each = [self._stored({name: value}) for name, value in state.items()]
            together = {name: value.shape for name, value in self._stored(state).items()}
        except (RuntimeError, ValueError):  # of rules that take several tensors
            return False
        return together == {name: value.shape for parts in each for name, value in parts.items()}

    def _stored(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._rules, state)


def _rules_of(model: nn.Module) -> Any:
    """Return an object that transformers takes its rules from; None where there are none."""
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # transformers 4
        return None
    rules = get_model_conversion_mapping(model, add_legacy=False)
    # transformers drops no prefix either for a model that it did not load
    rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return SimpleNamespace(_weight_conversions=rules, config=getattr(model, "config", None)) if rules else None


@dataclass(frozen=True)
class Layout:
    """Tensors of a model by their names in files."""

    shapes: dict[str, torch.Size]
    first_name: dict[str, str]
    """By each name of a parameter, its first: tied weights have several."""
    parameters: frozenset[str]
    """The rest are buffers."""
    groups: dict[str, tuple[str, ...]]
    """By each weight that is exported in FP8, the weights that share its scale where a tensor has one."""
    cast_by_layers: frozenset[str]
    """Weights in FP8 that no engine casts from its masters, but each layer from its 16-bit value."""
    kept: tuple[str, ...]
    """Linear layers that stay in 16 bits, by their paths."""
    names: StoredNames

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """Return the paths of `kept`, and those in the model: engines read the former, transformers both."""
        return tuple(dict.fromkeys([*self.kept, *map(self.names.module_of, self.kept)]))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state dict by name, as they are: a rank's part, or none in 16 bits.

    A frozen layer's weight has no memory, and its FP8 values and scales are left out.
    """
    state: dict[str, torch.Tensor | None] = {}
    # not by `state_dict`: its hooks gather, restore and decode, which for all weights at once is a copy of the model
    for path, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers}
        for name in module._non_persistent_buffers_set:
            del own[name]
        if isinstance(module, FrozenLayer):
            # a look at its weight would decode it
            shape = module.fp8_shape[::-1] if module.weight_is_transposed else module.fp8_shape
            bias = {name: value for name, value in own.items() if name not in HELD}
            own = {"weight": torch.empty(shape, dtype=module.weight_dtype, device="meta"), **bias}
        state.update({f"{path}.{name}" if path else name: value for name, value in own.items()})
    return {name: value for name, value in state.items() if value is not None}


def names_of_each(model: nn.Module) -> Collection[list[str]]:
    """Return the names of each parameter: a tied weight has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return names.values()


def layout_of_config(config: Any, fp8_config: FP8Config | None) -> Layout:
    """Lay out the model that transformers builds from a config, trained under an `FP8Config`; None: none is in FP8.

    Raises:
        ValueError: no layer would be in FP8, or experts cannot be exported.
    """
    model: Any = model_of_config(config)
    if fp8_config is None:
        return layout_of(model, in_fp8=False)
    convert_to_fp8(model, fp8_config)
    if fp8_config.fused:
        fuse_model(model)
    return layout_of(model)


def layout_of(model: nn.Module, *, in_fp8: bool = True) -> Layout:
    """Lay out a converted model, or, unless `in_fp8`, any that is written in 16 bits.

    Raises:
        ValueError: no layer is in FP8, a rank holds a part of one, or experts cannot be exported.
    """
    names, paths = StoredNames(model), {id(module): name for name, module in model.named_modules()}
    layers = list(_exported(model)) if in_fp8 else []
    stacks = [part for name in _experts(model) for part in _stacked(model, name, names)] if in_fp8 else []
    if in_fp8 and not (layers or stacks):
        raise ValueError("no nn.Linear of the model is in FP8; give an FP8Config whose layers choose some")
    weights = {id(layer): names.of[f"{paths[id(layer)]}.weight"][0] for layer in layers}
    groups: dict[str, tuple[str, ...]] = {name: (name,) for name in weights.values()}
    for merged in merged_layers(model):
        together = tuple(weights[id(layer)] for layer in merged.layers if id(layer) in weights)
        if merged.why_not_merged is None and len(together) == len(merged.layers):
            groups.update(dict.fromkeys(together, together))
    groups.update({name: stack for stack in stacks for name in stack})
    tied = [(each[0], name) for each in names_of_each(model) for name in each]
    # the state dict has a weight that is kept in FP8 alone, and the parameters do not
    frozen = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, FrozenLayer)}
    parameters = {name for _, name in tied} | frozen
    stored = [part for name in _of_linear_layers(model) for part in names.of[name]]
    by_layers = (
        weights[id(layer)]
        for layer in layers
        # nor do engines cast a weight that products would pad
        if layer.fp8_casts.why_not_by_engines is not None or any(size % ALIGNMENT for size in layer.held_weight.shape)
    )
    return Layout(
        shapes=names.stored_shapes,
        first_name={
            name: first
            for one, other in tied
            for first, name in zip(names.of.get(one, ()), names.of.get(other, ()), strict=False)
        },
        parameters=frozenset(part for name in parameters for part in names.of.get(name, ())),
        groups=groups,
        cast_by_layers=frozenset(by_layers).union(*stacks),
        kept=tuple(dict.fromkeys(name.rpartition(".")[0] for name in stored if name not in groups)),
        names=names,
    )


def _exported(model: nn.Module) -> Iterator[FP8Layer]:
    """Yield the FP8 layers that are nn.Linear, which engines replace by their own layers.

    Those whose weight embeddings have too are left out, for engines read them in 16 bits.
    """
    readers = count_readers(model)
    for name, module in model.named_modules():
        if not isinstance(module, FP8Layer):
            continue
        if module.original is nn.Linear:
            if (weight := module._parameters.get("weight")) is None or readers[weight] == 1:
                yield module
        elif not module.weight_is_transposed:
            raise ValueError(
                f"{name} is a {module.original.__name__}, of which a rank holds a part; save the model with "
                "booster.save_model, and export that folder"
            )


def _experts(model: nn.Module) -> list[str]:
    """Return the paths of modules that hold experts as one parameter."""
    modules = model.named_modules()
    return [name for name, module in modules if isinstance(module, FP8Experts) or are_experts(module)]


def _stacked(model: nn.Module, path: str, names: StoredNames) -> list[tuple[str, ...]]:
    """Return the weights in files of a module's FP8 experts, those of each parameter, which has one scale.

    None where files hold the experts as one parameter too, of which engines know no FP8 form: they stay in 16 bits.
    """
    module = model.get_submodule(path)
    if not isinstance(module, FP8Experts):
        return []
    stacks = [names.of[f"{path}.{name}"] for name in module.fp8_weights]
    parts = [part for stack in stacks for part in stack]
    if not all(part.endswith(".weight") and len(names.stored_shapes[part]) == 2 for part in parts):
        return []
    return stacks


def _of_linear_layers(model: nn.Module) -> list[str]:
    """Return linear layers' weights: those of nn.Linear, of experts in one parameter, and of their routers."""
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
