"""Gated feed-forward experts, all of a rank, by grouped FP8 products instead of one by one.

    tokens -- laid out by expert --> gate and up --> SwiGLU --> down -- brought back --> results

A grouped product takes one launch for all experts where one by one each takes several, which the host cannot queue as
fast as small experts run. Where the grouped form is not right or not faster, nothing is computed here, the caller runs
the experts one by one, and `GroupedExperts.why_one_by_one`, which the report shows, says why.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.formats import E4M3
from fp8booster.kernels.alignment import ALIGNMENT
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.grouped_product import why_no_grouped_product
from fp8booster.kernels.transpose import transposed
from fp8booster.nn.experts.gated import gate_up_down, why_not_gated
from fp8booster.nn.experts.grouped_linear import GroupedWeight, cast_experts, grouped_linear
from fp8booster.nn.experts.row_layout import RowLayout, permute, unpermute
from fp8booster.nn.fused.pointwise import Saving, activate
from fp8booster.nn.linear.layer import FP8Layer, FP8Linear
from fp8booster.nn.linear.speed_model import computes_in_fp8
from fp8booster.nn.modules import held_by_modules, must_be_called
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import FreshCopy, reusable
from fp8booster.nn.weights.stacking import are_stacked, stack_rows, stacked_columns, stacked_view

ONE_BY_ONE_FROM = 1e11
"""Rows times input times output features of a product of one expert, in the mean over experts and products, from which
one by one is faster. Of 4096 x 14336 features, 1024 rows (6e10) were 34 % faster grouped and 2048 rows (1.2e11) 9 %
slower (benchmarks/results/h200/experts_NVIDIA-H200_2026-11-21_torch-2.11.0-cu130.md)."""

EXPERTS_THAT_PAY = 8
"""So many experts were faster grouped in FP8 than one by one in BF16, whatever their size, in the same file. Fewer are
grouped where `speed_model.fp8_pays` for their rows as for one product."""


def _grouped_weight(layers: Sequence[FP8Layer], experts: int, provided: bool, casts: Casts) -> GroupedWeight:
    """The FP8 weight of the same layers of every expert, such as gate and up, stacked by rows.

    Those that an engine provides stay as they are, with their scales; the parameters may hold no values then. Where
    they lie in memory of their own each, this copies them, once a step: one byte a value more, and one for the
    transpose, unless that is made in backward.

    Args:
        layers: by expert, as many of each.
        experts: how many.
        provided: by an engine.
        casts: of the layers as one.
    """
    config = layers[0].fp8_config
    if not provided:
        return cast_experts(stack_rows([layer.held_weight for layer in layers]), experts, casts)
    matrices = [layer.fp8_weight.forward([layer.held_weight], casts, transpose=False) for layer in layers]
    parts = [matrix.data for matrix in matrices]
    if are_stacked(parts):
        data = stacked_view(parts)
    else:  # through uint8: torch copies few FP8 tensors on CPU
        data = torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
    scales = [matrix.inverse_scale for matrix in matrices]
    in_each = len(layers) // experts
    # those that an engine gathers as one have one scale; then the gradient of their input is one product
    if all(scale.data_ptr() == scales[number // in_each * in_each].data_ptr() for number, scale in enumerate(scales)):
        scales = scales[::in_each]
    transpose = data.new_empty(0)
    if config.keeps_transposes:
        stacked = stacked_columns([matrix.transpose for matrix in matrices])
        transpose = transposed(data) if stacked is None else stacked
    return GroupedWeight.of(data, transpose, torch.stack(scales).view(experts, -1))


def _casts(config: FP8Config) -> dict[str, Casts]:
    """Return the casts of the products of experts that compute as one."""
    return {name: Casts.of_layer(config) for name in ("gate_up", "down")}


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
        config = next((layer.fp8_config for layer in gate_up_down(experts[0]) if isinstance(layer, FP8Layer)), None)
        self.fp8_casts: dict[str, Casts] = {} if config is None else _casts(config)

    def __reduce__(self) -> tuple:
        return type(self), (self.experts, self._always)

    @property
    def why_one_by_one(self) -> str | None:
        """Return why the experts run one by one in training, or did for some batches; None: in grouped products.

        What only a batch shows is known after it.
        """
        return self._why_never() or ", ".join(self._reasons) or None

    @property
    def saves_in_8_bits(self) -> bool:
        """Tell whether gate and up are saved so for backward by grouped products, as far as is known."""
        return self.why_one_by_one is None and gate_up_down(self.experts[0])[-1].fp8_config.saves_in_8_bits

    def products(self) -> list[list[FP8Layer]]:
        """The layers that run as one product, in the order of their weights there; none where experts run apart."""
        return [] if self._why_never() is not None else self._products()

    def _products(self) -> list[list[FP8Layer]]:
        """Gates and ups, by expert, and downs."""
        layers = [gate_up_down(expert) for expert in self.experts]
        return [[layer for gate, up, _ in layers for layer in (gate, up)], [down for _, _, down in layers]]

    def __call__(
        self,
        tokens: torch.Tensor,
        counts: Sequence[Sequence[int]],
        weight_gradient_factors: Sequence[float] | torch.Tensor | None = None,
        usual_rows: float | None = None,
    ) -> torch.Tensor | None:
        """Return what `experts.run_experts` gives, or None: run the experts one by one.

        Args:
            tokens, counts, weight_gradient_factors, usual_rows: as in `run_experts`.
        """
        if not all(expert.training for expert in self.experts) or torch.compiler.is_compiling():
            return None
        reason = self._why_not(tokens, len(tokens) if usual_rows is None else usual_rows)
        if reason is not None:
            self._reasons[reason] = None
            return None
        gates_ups, downs = self._products()
        config, provided = downs[0].fp8_config, _is_provided(downs[0])
        require_fp8(tokens.device, config.emulate)
        factors = _joined(weight_gradient_factors, tokens.device)
        layout = RowLayout.of(counts, tokens.device)
        x = permute(tokens, layout)
        self.fp8_casts = {name: casts.under(config) for name, casts in (self.fp8_casts or _casts(config)).items()}
        for copy, layers, casts in (
            (self._gate_up, gates_ups, self.fp8_casts["gate_up"]),
            (self._down, downs, self.fp8_casts["down"]),
        ):
            if copy is self._down:
                x = activate(x, gated=True, saving=Saving(in_8_bits=config.saves_in_8_bits))
            weights = [_weight(layer) for layer in layers]
            quantized = copy.get(weights, (config, provided))
            if quantized is None:
                copy.forget()  # first, so that the allocator can give the same memory again
                grouped = _grouped_weight(layers, len(self.experts), provided, casts)
                quantized = copy.put(weights, (config, provided), grouped)
            x = grouped_linear(x, weights, quantized, layout.groups, casts, factors)
        return unpermute(x, layout)

    def _why_not(self, tokens: torch.Tensor, rows: float) -> str | None:
        """Return why the experts cannot run as one on these tokens, in training."""
        if (reason := self._why_never()) is not None:
            return reason
        if torch.is_autocast_enabled(tokens.device.type):
            return "under autocast"
        if tokens.dtype != torch.bfloat16:
            return "grouped products give BF16 alone"
        _, _, down = gate_up_down(self.experts[0])
        if not reusable(tokens, down.held_weight):
            return "inference mode or a graph that is captured"
        reason = None if self._always else self._why_slower(rows)
        if reason is not None:
            return reason
        provided = _is_provided(down)
        for layer in (layer for expert in self.experts for layer in gate_up_down(expert)):
            if layer.fp8_weight.is_transient:
                return "the weights are whole only while a layer runs"
            if _is_provided(layer) != provided:
                return "an engine keeps the FP8 weights of some of the layers alone"
        return None

    def _why_slower(self, rows: float) -> str | None:
        """Return why grouped products of so many rows in all would take longer, or None where they would not."""
        gate, _, down = gate_up_down(self.experts[0])
        config, count = down.fp8_config, len(self.experts)
        outputs, inputs = gate.held_weight.shape
        products = (2 * gate.held_weight.numel() + down.held_weight.numel()) / 2
        if rows / count * products >= ONE_BY_ONE_FROM:
            return "one by one is faster for so many tokens"
        device = down.held_weight.device
        if count >= EXPERTS_THAT_PAY or down.fp8_weight.always:
            return None
        if computes_in_fp8(config, int(rows), inputs, 2 * outputs, device):
            return None
        return "too few tokens for so few experts"

    def _why_never(self) -> str | None:
        """Return why the experts, as they are, cannot run as one on any tokens."""
        if len(self.experts) < 2:
            return "one expert"
        first: list[FP8Layer] = []
        for expert in self.experts:
            if (reason := why_not_gated(expert)) is not None:
                return reason
            layers = gate_up_down(expert)
            first = first or layers
            for layer, same in zip(layers, first, strict=True):
                if (reason := _why_not_like(layer, same)) is not None:
                    return reason
        gate, up, down = first
        config = down.fp8_config
        if not gate.fp8_config == up.fp8_config == config:
            return "the layers' FP8Configs differ"
        if any(size % ALIGNMENT for layer in first for size in layer.held_weight.shape):
            return f"a size is no multiple of {ALIGNMENT}"
        if down.fp8_casts.why_not_by_engines is not None:
            return down.fp8_casts.why_not_by_engines
        if config.input_format is not E4M3 or config.weight_format is not E4M3:
            return "grouped products multiply E4M3 alone"
        return why_no_grouped_product(down.held_weight.device, config.emulate)


def _why_not_like(layer: nn.Module, same: FP8Layer) -> str | None:
    """Return why a layer cannot be computed together with the same one of the first expert, or None where it can."""
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


def _weight(layer: FP8Layer) -> torch.Tensor:
    parameters: Mapping[str, Any] = layer._parameters
    return parameters["weight"]


def _is_provided(layer: FP8Layer) -> bool:
    return layer.fp8_weight.is_provided([_weight(layer)])


def _joined(factors: Sequence[float] | torch.Tensor | None, device: torch.device) -> torch.Tensor | float:
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
