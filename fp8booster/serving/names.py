"""Names and shapes that checkpoints have for a model's tensors, where they are not the model's own.

transformers 5 renames and stacks tensors as it loads them, and undoes that as it saves: GPT-NeoX's head is `embed_out`
in files and `lm_head` in the model. Engines and transformers 4 read what is in files, and so that is what `export`
writes. The rules are transformers' own (`conversion_mapping.py`).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class StoredNames:
    """What a model's tensors are in its checkpoints: each under one name, or in parts under several.

    Args:
        model: of transformers. Under transformers 4 all names are its own, and so are they in a model some of whose
            tensors are stored together, which is read and written as it is in memory.
    """

    def __init__(self, model: nn.Module) -> None:
        self.shapes = {name: value.shape for name, value in model.state_dict().items()}
        """By the name of a tensor in the model, its shape there."""
        self.dtypes = {name: value.dtype for name, value in model.state_dict().items()}
        """By the name of a tensor in the model, its type there."""
        self._rules = _rules_of(model)
        self._last: tuple[torch.Tensor, dict[str, torch.Tensor]] | None = None
        state = {name: torch.empty(shape, dtype=torch.float32, device="meta") for name, shape in self.shapes.items()}
        parts = self._parts_of_each(state)
        self.of = {name: tuple(each) for name, each in parts.items()}
        """By the name of a tensor in the model, its names in files."""
        self.origin = {stored: name for name, each in parts.items() for stored in each}
        """By each name in files, that in the model."""
        self.stored_shapes = {stored: value.shape for each in parts.values() for stored, value in each.items()}
        """By each name in files, the shape there."""

    @property
    def renamed(self) -> dict[str, str]:
        """By the names in the model of tensors that have another in files, and only one, that one."""
        return {name: each[0] for name, each in self.of.items() if each != (name,) and len(each) == 1}

    def part(self, stored: str, tensor: torch.Tensor) -> torch.Tensor:
        """What of a tensor of the model is in files under one of its names there."""
        if self._last is None or self._last[0] is not tensor:  # a layer's experts are many: they are divided once
            self._last = tensor, self.parts(self.origin[stored], tensor)
        return self._last[1][stored]

    def parts(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """A tensor of the model as files hold it, by the names there: views where it is in parts."""
        if self._rules is None:
            return {name: tensor}
        return self._stored({name: tensor})

    def module_of(self, path: str) -> str:
        """The module of the model that has the weight of a layer whose path in files is this."""
        return self.origin.get(f"{path}.weight", f"{path}.").rpartition(".")[0]

    def _parts_of_each(self, state: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
        """The parts of all tensors; without rules where these do not go tensor by tensor."""
        if self._rules is not None:
            try:
                parts = {name: self._stored({name: value}) for name, value in state.items()}
                one_by_one = {stored: value.shape for each in parts.values() for stored, value in each.items()}
                if one_by_one == {stored: value.shape for stored, value in self._stored(state).items()}:
                    return parts
            except (RuntimeError, ValueError):  # of rules that take several tensors
                pass
            self._rules = None
        return {name: {name: value} for name, value in state.items()}

    def _stored(self, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        from transformers.core_model_loading import revert_weight_conversion

        return revert_weight_conversion(self._rules, state)


def _rules_of(model: nn.Module) -> Any:
    """What transformers takes its rules from, or None without any.

    Those that drop a prefix of files' names are left out, as transformers leaves them out for a model it did not load.
    """
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange
    except ImportError:  # transformers 4
        return None
    rules = get_model_conversion_mapping(model, add_legacy=False)
    rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return SimpleNamespace(_weight_conversions=rules, config=getattr(model, "config", None)) if rules else None
