"""The casts that layers of a model hold: by name, to put others in their place, and the amaxes that they remember."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.experts.grouped import GroupedExperts
from fp8booster.nn.fused.merged_layers import MergedLayers
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.casting import Casts

# what one engine saved is loaded under another, whose wrappers name layers otherwise
_WRAPPERS = re.compile(r"(^|\.)(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|module)(?=\.|$)")
"""Parts of names that wrappers add."""


class HeldCasts(NamedTuple):
    """A place where casts are held."""

    name: str  # of the layer, or of those that run as one
    holder: Any
    part: str | None  # of experts, which of their products
    weights: Sequence[tuple[str, int]] = ()  # layers whose weights are stacked, with the rows of each; one: empty

    def get(self) -> Casts | None:
        """Return the casts; None where the layer is in FP8 no more."""
        held = getattr(self.holder, "fp8_casts", None)
        return held if self.part is None or held is None else held.get(self.part)


def held_casts(model: nn.Module) -> Iterator[HeldCasts]:
    """Find all casts that FP8 layers of a model hold."""
    # found at each call: a conversion or a merge may have replaced the holders
    names = {module: plain_name(name) for name, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, FP8Layer):
            yield HeldCasts(name, module, None)
        if isinstance(module, FP8Experts):
            yield from (HeldCasts(f"{name}.{part}", module, part) for part in module.fp8_casts)
        for held in vars(module).values():
            if isinstance(held, MergedLayers):
                parts = [names.get(layer, "") for layer in held.layers]
                weights = [(part, layer.product_features[1]) for part, layer in zip(parts, held.layers, strict=True)]
                yield HeldCasts(joined(parts), held, None, weights)
            if isinstance(held, GroupedExperts):
                yield from (HeldCasts(f"{name}.experts.{part}", held, part) for part in held.fp8_casts)


def remembered_amaxes(model: nn.Module) -> dict[str, dict[str, Tensor]]:
    """Return the amaxes that scaling remembers of this rank's layers, by name and role: ask between two steps."""
    found = {held.name: casts.saved for held in held_casts(model) if (casts := held.get()) is not None}
    return {name: amaxes for name, amaxes in found.items() if amaxes}


def remember_amaxes(model: nn.Module, remembered: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Let layers go on with what `remembered_amaxes` gave, where they have that history; others begin anew."""
    for held in held_casts(model):
        casts = held.get()
        if casts is not None and held.name in remembered:
            casts.load(remembered[held.name])


def forget_step(model: nn.Module) -> None:
    """Let scaling forget what it noted of a model since the last optimizer step, for this one is skipped."""
    for held in held_casts(model):
        if (casts := held.get()) is not None:
            casts.forget_step()


def plain_name(name: str) -> str:
    """Return a module's name without what wrappers add to it."""
    return _WRAPPERS.sub("", name).lstrip(".")


def joined(names: Sequence[str]) -> str:
    """Return one name for layers that share a cast: model.layers.0.self_attn.q_proj+k_proj+v_proj."""
    parent = names[0].rpartition(".")[0]
    if all(name.rpartition(".")[0] == parent for name in names):
        return names[0] + "".join("+" + name.rpartition(".")[2] for name in names[1:])
    return "+".join(names)
