"""Report what computes in FP8 and what does not: a row for each linear layer, and for each other weight of products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import prod
from operator import attrgetter
from typing import cast

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.utils import parametrize

from fp8booster.config import FP8Config
from fp8booster.nn.convert import (
    Kept,
    heads_among,
    kept_reason,
    linear_layers,
    product_features,
    weights_outside,
    why_unknown,
)
from fp8booster.nn.experts.fp8_experts import FP8Experts
from fp8booster.nn.experts.grouped import GroupedExperts, grouped_experts
from fp8booster.nn.experts.loads import loads_of
from fp8booster.nn.experts.spread import spread_of
from fp8booster.nn.fused.attention import kernels
from fp8booster.nn.fused.attention_form import head_size, heads_of_a_key, value_size
from fp8booster.nn.fused.decoder import FusedDecoderLayer, changed_parts
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.fused.part import FusedMLP
from fp8booster.nn.fused.self_attention import FusedAttention, unfused_calls
from fp8booster.nn.graphs import captured_layers, graph_breaks
from fp8booster.nn.linear.frozen import FrozenLayer
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import may_be_bypassed, require_module

PASSES = ("fprop", "dgrad", "wgrad")

READ_ALONE = "its weight is read without the layer, which has not run"
NOT_RUN = "has not run"
PASSED_OVER = "they have not run, and what lies beside them has: other code may read their weights"


@dataclass(frozen=True)
class LayerRow:
    """One linear layer, or one parameter of another module that products may read."""

    name: str
    """Path in the model."""

    shape: tuple[int, ...]
    """(input features, output features) of a layer's products, of this rank's shard where tensors are parallel; the
    shape of another module's parameter."""

    precision: str
    """"FP8", or the dtype of its weight, such as "BF16"; "none" where it has not run while its neighbours did."""

    passes: tuple[str, str, str]
    """What fprop, dgrad and wgrad compute in; "none" too for the gradient of a weight that is not trained."""

    notes: str
    """Why it is not in FP8, what was padded, or why it is not merged with its neighbours."""

    @property
    def weights(self) -> int:
        """Return how many weights its products read."""
        return prod(self.shape)


@dataclass(frozen=True)
class MergedRow:
    """Layers of one input, such as q, k and v, that `FP8Config.fused` computes as one product where it can."""

    layers: int
    """How many."""

    why_not_merged: str | None
    """Why they run one by one in training; None where they run as one, as far as it is known."""


@dataclass(frozen=True)
class GroupedRow:
    """Experts of one block, which grouped products compute where they can."""

    experts: int
    """How many, on this rank."""

    why_one_by_one: str | None
    """Why they run one by one in training, or did for some batches; None where they run grouped, as far as is known."""

    why_one_by_one_in_evaluation: str | None = None
    """Why they ran one by one for some batches in evaluation, though in training they need not; None: they did not."""


@dataclass(frozen=True)
class LoadRow:
    """The tokens of one block's experts in the last batch in training."""

    name: str
    """Path of the block, or of its experts."""

    tokens: tuple[int, ...]
    """How many of this rank's tokens chose each expert, of the experts of all ranks. None is dropped."""

    sent: str | None
    """How tokens are sent to experts on other ranks, such as "in FP8, as the first product reads them"; None: none
    are."""

    @property
    def busiest(self) -> float:
        """Return how many times the mean the expert with most tokens has; 1 where all have as many."""
        return max(self.tokens) * len(self.tokens) / max(1, sum(self.tokens))

    @property
    def idle(self) -> int:
        """Return how many experts have none."""
        return self.tokens.count(0)


@dataclass(frozen=True)
class Report:
    """The weights that a model multiplies by, by the precision of the products. `str()` gives the table."""

    rows: tuple[LayerRow, ...]
    """Its linear layers."""

    outside: tuple[LayerRow, ...] = ()
    """Parameters of other modules that products may read, such as convolutions; only experts among them are in FP8."""

    merged: tuple[MergedRow, ...] = ()
    grouped: tuple[GroupedRow, ...] = ()
    loads: tuple[LoadRow, ...] = ()
    """Of blocks of experts that have run in training."""

    copies_dropped: tuple[str, ...] = ()
    """Which copies of FP8 weights are not kept from step to step: "16-bit copies", "transposes"."""

    saved_in_8_bits: tuple[str, ...] = ()
    """What saves for backward in 8 bits what it read, counted: "4 norms", "2 SwiGLUs"."""

    recomputed: tuple[str, ...] = ()
    """Whose outputs backward computes again for the product that read them, counted in the same way."""

    recast: int = 0
    """Of how many attentions backward casts the output again, for the projection that read it."""

    head_in_fp8: bool = False
    """Whether a vocabulary head is among the layers in FP8."""

    attention: str | None = None
    """Which kernels fused attention runs on this GPU, and why not faster ones; None without it, or without a GPU."""

    unfused_calls: tuple[tuple[str, int], ...] = ()
    """Why fused attention ran as transformers wrote it for some calls in training, and how many layers' did."""

    changed: tuple[tuple[str, int], ...] = ()
    """Why norms and feed-forward blocks that were fused run as transformers wrote them now, and how many."""

    captured: tuple[tuple[str | None, int], ...] = ()
    """How many layers are replayed as CUDA graphs in training, beside None, and how many are not, beside the reason."""

    graph_breaks: tuple[tuple[str, int], ...] = ()
    """Reasons why something runs eagerly between the graphs of replayed layers, and in how many."""

    @property
    def fp8(self) -> tuple[LayerRow, ...]:
        """Layers whose products run in FP8."""
        return tuple(row for row in self.rows if row.precision == "FP8")

    @property
    def other(self) -> tuple[LayerRow, ...]:
        """Layers whose products run in high precision."""
        return tuple(row for row in self.rows if row.precision != "FP8")

    @property
    def share(self) -> float:
        """Return how many of the weights of matrix products are in FP8, from 0 to 1."""
        every = (*self.rows, *self.outside)
        return _share([row for row in every if row.precision == "FP8"], every)

    def summary(self) -> str:
        """One line: how many layers and weights are in FP8, what is padded and merged, and why the others are not."""
        line = f"FP8: {len(self.fp8)} of {len(self.rows)} linear layers"
        if len(self.fp8) < len(self.rows) or self.outside:
            line += f" ({_percent(self.share)} of the weights of matrix products)"
        if self.head_in_fp8:
            line += ", the vocabulary head among them"
        padded = sum("padded" in row.notes for row in self.fp8)
        if padded:
            line += f", {padded} padded to multiples of 16"
        emulated = sum("emulated" in row.notes for row in self.fp8)
        if emulated:
            line += f", {emulated} emulated in FP32"
        if self.copies_dropped:
            line += f", without {' and '.join(self.copies_dropped)} of their weights"
        as_one = [group.layers for group in self.merged if group.why_not_merged is None]
        if as_one:
            line += f", {sum(as_one)} of them merged to {len(as_one)} products"
        if self.saved_in_8_bits:
            line += f", inputs of {' and '.join(self.saved_in_8_bits)} saved in 8 bits (an error of 0.7 %)"
        if self.recomputed:
            line += f", outputs of {' and '.join(self.recomputed)} computed again in backward"
        if self.recast:
            line += f", outputs of {_counted(self.recast, 'attention')} cast again in backward"
        for reason, count in Counter(group.why_not_merged for group in self.merged).items():
            if reason is not None:
                line += f", {_counted(count, 'group')} of layers not merged ({reason})"
        ways = Counter(block.why_one_by_one for block in self.grouped)
        for reason, count in sorted(ways.items(), key=lambda way: way[0] is not None):
            how = "in grouped products" if reason is None else f"one by one ({reason})"
            line += f", experts of {_counted(count, 'block')} {how}"
        apart = Counter(block.why_one_by_one_in_evaluation for block in self.grouped if block.why_one_by_one is None)
        for reason, count in apart.items():
            if reason is not None:
                line += f", of {_counted(count, 'block')} one by one for some batches in evaluation ({reason})"
        if self.loads:
            line += f"; the busiest expert of a block had {max(row.busiest for row in self.loads):.1f} times the mean"
            idle, experts = (
                sum(each) for each in zip(*((row.idle, len(row.tokens)) for row in self.loads), strict=True)
            )
            line += f" of the last batch's tokens here, and {idle} of {experts} experts had none"
        for way, count in Counter(row.sent for row in self.loads).items():
            if way is not None:
                line += f", tokens of {_counted(count, 'block')} sent to other ranks {way}"
        for reason, count in self.captured:
            why = "" if reason is None else f" not ({reason})"
            line += f", {_counted(count, 'layer')}{why} replayed as CUDA graphs"
        for reason, count in self.graph_breaks:
            line += f", graphs of {_counted(count, 'layer')} broken ({reason})"
        for reason, count in self.unfused_calls:
            line += f", attention of {_counted(count, 'layer')} unfused for some calls ({reason})"
        for reason, count in self.changed:
            line += f", {_counted(count, 'part')} fused no longer ({reason})"
        if self.attention is not None:
            line += f", attention by {self.attention}"
        reasons = Counter((row.precision, row.notes) for row in self.other)
        for (precision, reason), count in reasons.items():
            not_run = f"; {count} that {'have' if count > 1 else 'has'} not run"
            line += not_run if precision == "none" else f"; {count} in {precision} ({reason})"
        kinds = dict.fromkeys((row.precision, row.notes) for row in self.outside)
        for precision, reason in kinds:
            rows = [row for row in self.outside if (row.precision, row.notes) == (precision, reason)]
            share = _percent(_share(rows, (*self.rows, *self.outside)))
            counted = _counted(len(rows), "parameter")
            line += f"; {counted} of no linear layer in {precision}, {share} of the weights ({reason})"
        return line

    def table(self) -> Table:
        """The rows as a rich table."""
        table = Table("layer", "in x out", *PASSES, "notes", title=self.summary())
        for row in (*self.rows, *self.outside):
            table.add_row(row.name, " x ".join(map(str, row.shape)), *row.passes, row.notes)
        return table

    def __str__(self) -> str:
        console = Console(width=160, no_color=True)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' if count > 1 else ''}"


def _share(some: Sequence[LayerRow], of: Sequence[LayerRow]) -> float:
    return sum(row.weights for row in some) / max(1, sum(row.weights for row in of))


def _percent(share: float) -> str:
    """In whole percent, which are 0 and 100 for none and all alone."""
    whole = round(100 * share)
    if 0 < share < 0.01:
        return "less than 1 %"
    return f"{min(whole, 99) if share < 1 else whole} %"


_SHORT_NAMES = {"bfloat16": "BF16", "float16": "FP16", "float32": "FP32"}


def report(model: nn.Module) -> Report:
    """List what a model multiplies by, linear layers and others, with the precision of the products.

    Args:
        model: any module, boosted or not. Rows padded for the token count, token counts for which a layer chose BF16,
            layers that the model's forward passes over, and what only a batch shows to keep layers from being merged
            or fused, appear once such a batch has run outside compiled code, which serves many layers with one graph
            and so cannot tell which.
    """
    require_module(model)
    layers = [module for module in model.modules() if isinstance(module, FP8Layer)]
    bypassed = _bypassed(model)
    dropped = {
        "16-bit copies": any(layer.fp8_weight.lacks_values for layer in layers),
        "transposes": any(not layer.fp8_config.keeps_transposes for layer in layers),
    }
    # found once: each looks at every module, of which large models have many thousands
    groups, linears, experts = merged_layers(model), linear_layers(model), list(grouped_experts(model))
    heads, unknown = heads_among(model, linears), why_unknown(model)
    apart: dict[nn.Module, MergedLayers] = {
        layer: group for group in groups if group.why_not_merged is not None for layer in group.layers
    }
    return Report(
        tuple(_layer_row(name, module, unknown, apart.get(module), bypassed.get(module)) for name, module in linears),
        tuple(
            _outside_row(f"{path}.{name}" if path else name, module, getattr(module, name), kept, bypassed.get(module))
            for path, module, name, kept in weights_outside(model, linears)
        ),
        tuple(MergedRow(len(group.layers), group.why_not_merged) for group in groups),
        tuple(map(_grouped_row, experts)),
        tuple(LoadRow(name, tokens, _sent(block)) for name, block, tokens in loads_of(model)),
        tuple(name for name, is_dropped in dropped.items() if is_dropped),
        tuple(_counted(count, part) for part, count in _saving_in_8_bits(model, experts).items()),
        tuple(_counted(count, part) for part, count in _recomputed(model).items()),
        sum(isinstance(module, FusedAttention) and module.recast_by is not None for module in model.modules()),
        any(id(layer) in heads for layer in layers),
        _attention(model),
        unfused_calls=tuple(unfused_calls(model).items()),
        changed=tuple(changed_parts(model).items()),
        captured=tuple(captured_layers(model).items()),
        graph_breaks=tuple(graph_breaks(model).items()),
    )


def _sent(block: nn.Module) -> str | None:
    spread = spread_of(block)
    return None if spread is None else spread.way


def _attention(model: nn.Module) -> str | None:
    """By the first; all have the same heads."""
    found = next((module for module in model.modules() if isinstance(module, FusedAttention)), None)
    weight = None if found is None else next(found.parameters(), None)
    if found is None or weight is None or not weight.is_cuda:
        return None
    heads = found.config.num_attention_heads
    return kernels(
        weight.device,
        weight.dtype if weight.dtype == torch.float16 else torch.bfloat16,
        query_heads=heads,
        key_heads=heads // heads_of_a_key(found),
        features=head_size(found),
        value_features=value_size(found),
    )


def _saving_in_8_bits(model: nn.Module, experts: Sequence[GroupedExperts]) -> Counter[str]:
    """Return how many norms and activations save in 8 bits what they read; each expert has a SwiGLU, grouped or not."""
    grouped = {each for block in experts if block.saves_in_8_bits for each in block.experts}
    saves = attrgetter("saves_in_8_bits")
    return _fused_parts(model, lambda _, config: saves(config), saves, grouped)


def _recomputed(model: nn.Module) -> Counter[str]:
    """Return how many norms and activations have outputs that `FP8Config.recompute` lets backward compute again."""
    return _fused_parts(
        model,
        lambda block, config: config.recomputes_norms and _reads_its_own_tokens(block),
        lambda config: config.recomputes_activations and not config.saves_in_8_bits,
    )


def _reads_its_own_tokens(block: nn.Module) -> bool:
    """Tell whether no product of a block reads tokens that ranks gather, which backward does not make again."""
    exchanges = (each.fp8_exchange() for each in block.modules() if isinstance(each, FP8Layer))
    return all(exchange is None or exchange.input_key is None for exchange in exchanges)


def _grouped_row(block: GroupedExperts) -> GroupedRow:
    return GroupedRow(len(block.experts), block.why_one_by_one, block.why_one_by_one_in_evaluation)


def _fused_parts(
    model: nn.Module,
    has_norms: Callable[[nn.Module, FP8Config], bool],
    has_activations: Callable[[FP8Config], bool],
    more: Collection[nn.Module] = (),
) -> Counter[str]:
    """Count fused norms and activations of which a configuration asks something, and experts besides.

    Args:
        model: to look through.
        has_norms: whether a decoder layer's norms do what its configuration asks.
        has_activations: whether a configuration asks it of activations.
        more: experts whose activations do it.
    """
    parts: Counter[str] = Counter()
    for module in model.modules():
        config = module.fused_config if isinstance(module, (FusedDecoderLayer, FusedMLP)) else None
        if isinstance(module, FusedDecoderLayer) and config is not None and has_norms(module, config):
            parts["norm"] += sum(map(may_be_bypassed, module.norms()))
        of_block = isinstance(module, FusedMLP) and module.why_not_now is None and module.is_fused
        of_block = of_block and config is not None and has_activations(config)
        if module in more or of_block:
            parts["SwiGLU" if getattr(module, "kind", "silu") == "silu" else "activation"] += 1
    return parts


def _bypassed(model: nn.Module) -> dict[nn.Module, str]:
    """The FP8 layers that have not run while the model did, as far as uncompiled code tells, and what is known of each.

    A layer by itself may wait for its turn, as an expert does or half of a GAN. It was passed over where somebody
    looked at its weight, or where another layer of the module that holds it has run. Experts in one parameter were
    where a layer of the same decoder layer has run. Those that ran as one were not, whoever looked.
    """
    found: dict[nn.Module, str] = {}
    ran_as_one = {each for block in grouped_experts(model) if block.has_run for each in block.experts}
    # a model that has not run yet has passed over nothing
    has_run = any(layer.has_run for layer in model.modules() if isinstance(layer, FP8Layer))
    for holder in model.modules() if has_run else ():
        layers = [child for child in holder.children() if isinstance(child, FP8Layer)]
        for layer in layers if holder not in ran_as_one else ():
            if layer.has_run:
                continue
            if layer.weight_read_in_training or layer.weight_read_in_evaluation or layer.fp8_weight.was_read:
                found[layer] = READ_ALONE
            elif any(other.has_run for other in layers):
                found.setdefault(layer, NOT_RUN)
        for decoder_layer in holder if isinstance(holder, nn.ModuleList) else ():
            experts = [each for each in decoder_layer.modules() if isinstance(each, FP8Experts) and not each.has_run]
            if experts and any(each.has_run for each in decoder_layer.modules() if isinstance(each, FP8Layer)):
                found.update(dict.fromkeys(experts, PASSED_OVER))
    return found


def _layer_row(
    name: str, module: nn.Module, unknown: str, group: MergedLayers | None, bypassed: str | None
) -> LayerRow:
    weight, precision = _stored_weight(module), None
    if isinstance(module, FP8Layer) and bypassed is not None:
        precision, notes = "none" if bypassed is NOT_RUN else None, bypassed
    elif isinstance(module, FP8Layer):
        never = module.in_fp8 and not any(module.in_fp8.values())
        precision, notes = None if never else "FP8", module.fp8_notes()
    else:
        notes = kept_reason(module, unknown)
    if group is not None:
        notes = "; ".join(filter(None, (notes, f"not merged: {group.why_not_merged}")))
    return _row(name, product_features(module), weight, notes, precision)


def _outside_row(name: str, module: nn.Module, weight: torch.Tensor, kept: Kept, bypassed: str | None) -> LayerRow:
    if bypassed is not None:
        return _row(name, kept.shape, weight, bypassed)
    if isinstance(module, FP8Experts):
        return _row(name, kept.shape, weight, module.fp8_notes(), "FP8" if module.in_fp8 else None)
    return _row(name, kept.shape, weight, kept.reason)


def _row(name: str, shape: tuple[int, ...], weight: torch.Tensor, notes: str, precision: str | None = None) -> LayerRow:
    if precision is None:
        dtype = str(weight.dtype).removeprefix("torch.")
        precision = _SHORT_NAMES.get(dtype, dtype)
    passes = (precision, precision, precision if weight.requires_grad else "none")
    return LayerRow(name, shape, precision, passes, notes)


def _stored_weight(module: nn.Module) -> torch.Tensor:
    """Return what tells dtype and training of a layer's weight: that, or what a parametrization computes it from.

    To look at a weight that is kept in FP8 is to decode it. To look at a parametrized one is to compute it, which may
    change it (spectral norm) and cannot be done between forwards where an engine shards what it is made of.
    """
    if isinstance(module, FrozenLayer):
        return module.fp8_data
    if isinstance(module, FP8Layer) and "weight" in module._parameters:
        return module.held_weight
    if not parametrize.is_parametrized(module, "weight"):
        return cast(torch.Tensor, module.weight)
    originals = cast(nn.ModuleDict, module.parametrizations)["weight"]
    return cast(torch.Tensor, originals.original if originals.is_tensor else originals.original0)
