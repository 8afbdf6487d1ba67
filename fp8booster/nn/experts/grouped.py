"""Gated feed-forward experts, all of a rank, by grouped FP8 products instead of one by one.

    tokens -- laid out by expert --> gate and up --> SwiGLU --> down -- brought back --> results

A grouped product takes one launch for all experts where one by one each takes several, which the host cannot queue as
fast as small experts run. Where the grouped form is not right or not faster, nothing is computed here, the caller runs
the experts one by one, and `GroupedExperts.why_one_by_one`, which the report shows, says why.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from fp8booster.formats import E4M3
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.grouped_product import why_no_grouped_product
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.experts.grouped_linear import GroupedWeight, cast_experts, grouped_linear
from fp8booster.nn.experts.row_layout import RowLayout, bring_back, lay_out
from fp8booster.nn.fused.swiglu import swiglu
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.linear.linear import FP8Linear
from fp8booster.nn.linear.speed_model import fp8_pays
from fp8booster.nn.modules import held_by_modules, must_be_called
from fp8booster.nn.weights.freshness import FreshCopy, reusable
from fp8booster.nn.weights.stacking import as_one, columns_as_one, lie_together, stack_rows

ONE_BY_ONE_FROM = 1e11
"""Rows times input times output features of a product of one expert, in the mean over experts and products, from which
one by one is faster. Of 4096 x 14336 features, 1024 rows (6e10) were 34 % faster grouped and 2048 rows (1.2e11) 9 %
slower (benchmarks/results/h200/experts_NVIDIA-H200_2026-11-21_torch-2.11.0-cu130.md)."""

EXPERTS_THAT_PAY = 8
"""So many experts were faster grouped in FP8 than one by one in BF16, whatever their size, in the same file. Fewer are
grouped where `choice.fp8_pays` for their rows as for one product."""

_HUB = "transformers_modules"
"""Package of the models whose code comes from the hub, in folders of their own."""

_GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
_GATED = {
    ("transformers.models.mixtral.modeling_mixtral", "MixtralBlockSparseTop2MLP"): ("w1", "w3", "w2"),
    ("transformers.models.deepseek_v3.modeling_deepseek_v3", "DeepseekV3MLP"): _GATE_UP_DOWN,
    (f"{_HUB}.modeling_deepseek", "DeepseekMLP"): _GATE_UP_DOWN,
    (f"{_HUB}.modeling_deepseek", "DeepseekV3MLP"): _GATE_UP_DOWN,
}
"""By module and name, classes of experts that compute `down(act_fn(gate(x)) * up(x))`: what they call the three."""


def _weight_of(layers: Sequence[FP8Layer], experts: int, kept: bool) -> GroupedWeight:
    """The FP8 weight of the same layers of every expert, such as gate and up, stacked by rows.

    Args:
        layers: by expert, as many of each.
        experts: how many.
        kept: an engine keeps their FP8 weights.
    """
    if kept:
        return _put_together(layers, experts)
    weights = [layer.weight for layer in layers]
    return cast_experts(stack_rows(weights), experts, layers[0].fp8_config)


def _put_together(layers: Sequence[FP8Layer], experts: int) -> GroupedWeight:
    """The FP8 weights that an engine keeps, and their scales, as they are; the parameters may hold no values.

    Where they lie in memory of their own each, this copies them, once a step: one byte a value more, and one for the
    transpose, unless that is made in backward.
    """
    config = layers[0].fp8_config
    kept = [layer.fp8_weight.forward([layer.weight], config, transpose=False) for layer in layers]
    parts = [each.data for each in kept]
    if lie_together(parts):
        data = as_one(parts)
    else:  # through uint8: torch copies few FP8 tensors on CPU
        data = torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    scales = [each.inverse_scale for each in kept]
    in_each = len(layers) // experts
    # those that an engine gathers as one have one scale; then the gradient of their input is one product
    first_of_expert = [scales[number // in_each * in_each] for number in range(len(scales))]
    if all(a.data_ptr() == b.data_ptr() for a, b in zip(scales, first_of_expert, strict=True)):
        scales = scales[::in_each]
    inverse_scales = torch.stack(scales).view(experts, -1)
    transpose = data.new_empty(0)
    if config.keeps_transposes:
        transpose = columns_as_one([each.transpose for each in kept])
        transpose = transposed(data) if transpose is None else transpose
    return GroupedWeight.of(data, transpose, inverse_scales)


class GroupedExperts:
    """Experts whose products are computed as grouped ones where that is right and faster.

    A copy or a pickle of it holds no FP8 weights.

    Args:
        experts: of one rank; modules that compute `down(act_fn(gate(x)) * up(x))`.
        always: also for numbers of tokens for which one by one is faster.
    """

    def __init__(self, experts: Sequence[nn.Module], always: bool = False) -> None:
        self.experts, self._always = tuple(experts), always
        self._reasons: dict[str, None] = {}
        self._gate_up: FreshCopy[GroupedWeight] = FreshCopy()
        self._down: FreshCopy[GroupedWeight] = FreshCopy()

    def __reduce__(self) -> tuple:
        return type(self), (self.experts, self._always)

    @property
    def why_one_by_one(self) -> str | None:
        """Why the experts run one by one in training, or did for some batches; None where they run as grouped products.

        What only a batch shows is known after it.
        """
        return self._why_never() or ", ".join(self._reasons) or None

    def products(self) -> list[list[FP8Layer]]:
        """The layers that run as one product, in the order of their weights there; none where experts run apart."""
        if self._why_never() is not None:
            return []
        layers = [_parts(expert) for expert in self.experts]
        return [[layer for gate, up, _ in layers for layer in (gate, up)], [down for _, _, down in layers]]

    def __call__(
        self,
        tokens: torch.Tensor,
        counts: Sequence[Sequence[int]],
        weight_gradient_factors: Sequence[float] | torch.Tensor | None = None,
        usual_rows: float | None = None,
    ) -> torch.Tensor | None:
        """What `experts.run_experts` gives, or None: run the experts one by one.

        Args:
            tokens, counts, weight_gradient_factors, usual_rows: as in `run_experts`.
        """
        if not all(expert.training for expert in self.experts) or torch.compiler.is_compiling():
            return None
        reason = self._why_not(tokens, len(tokens) if usual_rows is None else usual_rows)
        if reason is not None:
            self._reasons[reason] = None
            return None
        layers = [_parts(expert) for expert in self.experts]
        gates_ups = [layer for gate, up, _ in layers for layer in (gate, up)]
        downs = [down for _, _, down in layers]
        config = downs[0].fp8_config
        require_fp8(tokens.device, config.emulate)
        kept, count = _is_kept(downs[0], _weight(downs[0])), len(layers)
        factors = _side_by_side(weight_gradient_factors, tokens.device)
        layout = RowLayout.of(counts, tokens.device)
        x = lay_out(tokens, layout)
        for each, of_experts in ((self._gate_up, gates_ups), (self._down, downs)):
            if each is self._down:
                x = swiglu(x)
            weights = [_weight(layer) for layer in of_experts]
            quantized = each.get(weights, (config, kept))
            if quantized is None:
                each.forget()  # first, so that the allocator can give the same memory again
                quantized = each.put(weights, (config, kept), _weight_of(of_experts, count, kept))
            x = grouped_linear(x, weights, quantized, layout.groups, config, factors)
        return bring_back(x, layout)

    def _why_not(self, tokens: torch.Tensor, rows: float) -> str | None:
        """Why the experts cannot run as one on these tokens, in training."""
        reason = self._why_never()
        if reason is not None:
            return reason
        if torch.is_autocast_enabled(tokens.device.type):
            return "under autocast"
        if tokens.dtype != torch.bfloat16:
            return "grouped products give BF16 alone"
        _, _, down = _parts(self.experts[0])
        if not reusable(tokens, down.weight):
            return "inference mode or a graph that is captured"
        reason = None if self._always else self._why_slower(rows)
        if reason is not None:
            return reason
        kept = _is_kept(down, _weight(down))
        for layer in (layer for expert in self.experts for layer in _parts(expert)):
            weight = _weight(layer)
            if layer.fp8_weight.is_transient:
                return "the weights are whole only while a layer runs"
            if _is_kept(layer, weight) != kept:
                return "an engine keeps the FP8 weights of some of the layers alone"
        return None

    def _why_slower(self, rows: float) -> str | None:
        """Why grouped products of so many rows in all would take longer, or None where they would not."""
        gate, _, down = _parts(self.experts[0])
        config, count = down.fp8_config, len(self.experts)
        inputs, outputs = gate.weight.shape[1], 2 * gate.weight.shape[0]
        products = (2 * gate.weight.numel() + down.weight.numel()) / 2
        if rows / count * products >= ONE_BY_ONE_FROM:
            return "one by one is faster for so many tokens"
        if (
            config.always
            or config.emulate
            or not config.keeps_16_bits
            or count >= EXPERTS_THAT_PAY
            or fp8_pays(int(rows), inputs, outputs, down.weight.device)
        ):
            return None
        return "too few tokens for so few experts"

    def _why_never(self) -> str | None:
        """Why the experts, as they are, cannot run as one on any tokens."""
        if len(self.experts) < 2:
            return "one expert"
        first = None
        for expert in self.experts:
            reason = why_not_gated(expert)
            if reason is not None:
                return reason
            layers = _parts(expert)
            first = layers if first is None else first
            for layer, same in zip(layers, first, strict=True):
                reason = _why_not_like(layer, same)
                if reason is not None:
                    return reason
        gate, up, down = first
        config = down.fp8_config
        if not gate.fp8_config == up.fp8_config == config:
            return "the layers' FP8Configs differ"
        if any(size % ALIGNMENT for layer in first for size in layer.weight.shape):
            return f"a size is no multiple of {ALIGNMENT}"
        if config.rowwise:
            return "rowwise scales"
        if config.input_format is not E4M3 or config.weight_format is not E4M3:
            return "grouped products multiply E4M3 alone"
        return why_no_grouped_product(down.weight.device, config.emulate)


def _why_not_like(layer: nn.Module, same: FP8Layer) -> str | None:
    """Why a layer cannot be computed together with the same one of the first expert, or None where it can."""
    # asked of hundreds of layers at each call: parameters are looked up where they are, past nn.Module's search
    if type(layer) is not FP8Linear:
        return f"{type(layer).__name__} has no grouped form"
    if layer.fp8_config is not same.fp8_config and layer.fp8_config != same.fp8_config:
        return "the layers' FP8Configs differ"
    if must_be_called(layer):
        return "a layer has hooks or a forward of its own, which must run"
    if layer._parameters["bias"] is not None:
        return "a layer has a bias"
    weight = _weight(layer)
    if weight.dtype is not torch.bfloat16:
        return "grouped products give BF16 alone"
    return None if weight.shape == _weight(same).shape else "the experts' sizes differ"


def why_not_gated(expert: nn.Module) -> str | None:
    """Why a module is not known to compute `down(silu(gate(x)) * up(x))` and nothing else, or None where it is."""
    if _names(type(expert)) is None:
        return f"{type(expert).__name__} has no grouped form"
    # past nn.Module's search, which is slow for what is not there
    if getattr(vars(expert).get("config"), "pretraining_tp", 1) > 1:
        return "pretraining_tp is more than 1"  # DeepSeek's own code cuts the weights then
    if not isinstance(expert._modules.get("act_fn"), nn.SiLU):
        return f"the activation is {type(expert.act_fn).__name__}"
    if must_be_called(expert):
        return "an expert has hooks or a forward of its own, which must run"
    return None


@functools.cache
def _names(cls: type[nn.Module]) -> tuple[str, str, str] | None:
    """What a class of experts calls its gate, up and down; None: it is not known to compute no more than these."""
    # classes of this package come before the one that they mix into
    written = next(each for each in cls.__mro__ if not each.__module__.startswith("fp8booster."))
    folder, _, file = written.__module__.rpartition(".")
    if folder.startswith(_HUB):
        folder = _HUB
    return _GATED.get((f"{folder}.{file}", written.__name__))


def _parts(expert: nn.Module) -> tuple[FP8Layer, FP8Layer, FP8Layer]:
    """gate, up and down."""
    modules = expert._modules
    gate, up, down = _names(type(expert))
    return modules[gate], modules[up], modules[down]


def _weight(layer: FP8Layer) -> torch.Tensor:
    return layer._parameters["weight"]


def _is_kept(layer: FP8Layer, weight: torch.Tensor) -> bool:
    return layer.fp8_weight.is_provided([weight])


def _side_by_side(factors: Sequence[float] | torch.Tensor | None, device: torch.device) -> torch.Tensor | float:
    """One number for all experts, or float32 [G]."""
    if factors is None:
        return 1.0
    if torch.is_tensor(factors):
        return factors
    if all(factor == factors[0] for factor in factors):
        return float(factors[0])
    return torch.tensor(factors, dtype=torch.float32, device=device)


def grouped_experts(model: nn.Module) -> list[GroupedExperts]:
    """Those that the modules of a model hold as attributes."""
    return held_by_modules(model, GroupedExperts)
