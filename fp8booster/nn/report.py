"""What computes in FP8 and what does not: one row for every linear layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils import parametrize

from fp8booster.nn.convert import kept_reason, linear_layers, product_features
from fp8booster.nn.fused.merged import MergedLayers, merged_layers
from fp8booster.nn.grouped_experts import grouped_experts
from fp8booster.nn.layer import FP8Layer

PASSES = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class LayerRow:
    """One linear layer."""

    name: str
    """Path in the model."""

    shape: tuple[int, int]
    """(input features, output features) of its products: of this rank's shard where tensors are parallel."""

    precision: str
    """"FP8", or the dtype of its weight, such as "BF16"."""

    passes: tuple[str, str, str]
    """What fprop, dgrad and wgrad compute in; "none" for the gradient of a weight that is not trained."""

    notes: str
    """Why it is not in FP8, what was padded, or why it is not merged with its neighbours."""


@dataclass(frozen=True)
class MergedRow:
    """Layers of one input, such as q, k and v, that `FP8Config.fused` computes as one product where it can."""

    layers: int
    """How many."""

    why_apart: str | None
    """Why they run one by one in training; None where they run as one, as far as it is known."""


@dataclass(frozen=True)
class GroupedRow:
    """Experts of one block, which grouped products compute where they can."""

    experts: int
    """How many, on this rank."""

    why_apart: str | None
    """Why they run one by one in training, or did for some batches; None where they run grouped, as far as is known."""


@dataclass(frozen=True)
class Report:
    """The linear layers of a model, by what they compute in. `str()` gives the table."""

    rows: tuple[LayerRow, ...]
    merged: tuple[MergedRow, ...] = ()
    grouped: tuple[GroupedRow, ...] = ()
    copies_dropped: tuple[str, ...] = ()
    """Which copies of FP8 weights are not kept from step to step: "16-bit copies", "transposes"."""

    @property
    def fp8(self) -> tuple[LayerRow, ...]:
        """Layers whose products run in FP8."""
        return tuple(row for row in self.rows if row.precision == "FP8")

    @property
    def other(self) -> tuple[LayerRow, ...]:
        """Layers whose products run in high precision."""
        return tuple(row for row in self.rows if row.precision != "FP8")

    def summary(self) -> str:
        """One line: how many layers are in FP8, what is padded and merged, and why the others are not."""
        line = f"FP8: {len(self.fp8)} of {len(self.rows)} linear layers"
        padded = sum("padded" in row.notes for row in self.fp8)
        if padded:
            line += f", {padded} padded to multiples of 16"
        emulated = sum("emulated" in row.notes for row in self.fp8)
        if emulated:
            line += f", {emulated} emulated in FP32"
        if self.copies_dropped:
            line += f", without {' and '.join(self.copies_dropped)} of their weights"
        as_one = [group.layers for group in self.merged if group.why_apart is None]
        if as_one:
            line += f", {sum(as_one)} of them merged to {len(as_one)} products"
        apart = Counter(group.why_apart for group in self.merged if group.why_apart is not None)
        for reason, count in apart.items():
            line += f", {count} group{'s' if count > 1 else ''} of layers not merged ({reason})"
        together = sum(block.why_apart is None for block in self.grouped)
        if together:
            line += f", experts of {together} block{'s' if together > 1 else ''} in grouped products"
        one_by_one = Counter(block.why_apart for block in self.grouped if block.why_apart is not None)
        for reason, count in one_by_one.items():
            line += f", experts of {count} block{'s' if count > 1 else ''} one by one ({reason})"
        reasons = Counter((row.precision, row.notes) for row in self.other)
        for (precision, reason), count in reasons.items():
            line += f"; {count} in {precision} ({reason})"
        return line

    def table(self) -> Table:
        """The rows as a rich table."""
        table = Table("layer", "in x out", *PASSES, "notes", title=self.summary())
        for row in self.rows:
            table.add_row(row.name, "{} x {}".format(*row.shape), *row.passes, row.notes)
        return table

    def __str__(self) -> str:
        console = Console(width=160, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


_SHORT_NAMES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


def report(model: nn.Module) -> Report:
    """List every linear layer of a model with the precision of its products.

    Args:
        model: any module, boosted or not. Rows padded for the token count, token counts for which a layer chose BF16,
            and what only a batch shows to keep layers from being merged, appear once such a batch has run outside
            compiled code, which serves many layers with one graph and so cannot tell which.
    """
    groups = merged_layers(model)
    apart = {layer: group for group in groups if group.why_apart is not None for layer in group.layers}
    return Report(
        tuple(_row(name, module, apart.get(module)) for name, module in linear_layers(model)),
        tuple(MergedRow(len(group.layers), group.why_apart) for group in groups),
        tuple(GroupedRow(len(block.experts), block.why_apart) for block in grouped_experts(model)),
        _copies_dropped([module for module in model.modules() if isinstance(module, FP8Layer)]),
    )


def _copies_dropped(layers: list[FP8Layer]) -> tuple[str, ...]:
    dropped = {
        "16-bit copies": any(layer.fp8_weight.restore is not None for layer in layers),
        "transposes": any(not layer.fp8_config.keeps_transposes for layer in layers),
    }
    return tuple(name for name, is_dropped in dropped.items() if is_dropped)


def _row(name: str, module: nn.Module, apart: MergedLayers | None) -> LayerRow:
    weight = _told_by(module)
    dtype = str(weight.dtype).removeprefix("torch.")
    precision = _SHORT_NAMES.get(dtype, dtype)
    if isinstance(module, FP8Layer):
        never = module.in_fp8 and not any(module.in_fp8.values())
        precision, notes = precision if never else "FP8", module.fp8_notes()
    else:
        notes = kept_reason(module)
    if apart is not None:
        notes = "; ".join(filter(None, (notes, f"not merged: {apart.why_apart}")))
    passes = (precision, precision, precision if weight.requires_grad else "none")
    return LayerRow(name, product_features(module), precision, passes, notes)


def _told_by(module: nn.Module) -> torch.Tensor:
    """What tells dtype and training of a layer's weight: that, or what a parametrization computes it from.

    To look at a parametrized weight is to compute it, which may change it (spectral norm) and cannot be done between
    forwards where an engine shards what it is made of.
    """
    if not parametrize.is_parametrized(module, "weight"):
        return module.weight
    originals = module.parametrizations.weight
    return originals.original if originals.is_tensor else originals.original0
