"""Gated feed-forward experts, all of a rank, by grouped FP8 products instead of one by one.

    tokens -- cast, laid out by expert --> gate and up --> SwiGLU --> down -- summed --> results

A grouped product takes one launch for all experts where one by one each takes several, which the host cannot queue as
fast as small experts run. Where the grouped form is not right or not faster, nothing is computed here, the caller runs
the experts one by one, and `GroupedExperts.why_one_by_one`, which the report shows, says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import nn

from fp8booster.config import FP8Config
from fp8booster.kernels.activation import RowWeights
from fp8booster.kernels.device import require_fp8
from fp8booster.kernels.grouped_product import why_no_grouped_product
from fp8booster.nn.experts.alike import WHOLE_IN_LAYERS, AlikeExperts, Look, Stack
from fp8booster.nn.experts.calls import Calls
from fp8booster.nn.experts.fp8_rows import Rows, read_of
from fp8booster.nn.experts.gated import gate_up_down
from fp8booster.nn.experts.routing import Routed
from fp8booster.nn.experts.stack import (
    StackCopy,
    WeightStack,
    pays,
    rows_that_decide,
    run_stacks,
    weights_of_call,
    why_not_bf16,
    why_not_stacked,
)
from fp8booster.nn.fused.pointwise import Saving, activate
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.modules import held_by_modules
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.freshness import captured_without_copies, reusable
from fp8booster.tensor import QuantizedMatrix

ONE_BY_ONE_FROM = 2.2e11
"""Rows times input times output features of a product of one expert, in the mean over experts and products, from which
one by one is faster. Of 8 experts with 4096 x 14336 features and 2048 rows each (1.8e11) grouped ones were 8 % faster,
with 6144 x 16384 and as many rows (3.1e11) 12 % slower (benchmarks/results/h200/experts-one-by-one.md)."""


Grouped = Callable[[Routed, float], torch.Tensor | None]
"""Takes tokens and a factor as `run_experts`, and gives what that does, BF16, or None: one by one."""


def _casts(config: FP8Config) -> dict[str, Casts]:
    """Return the casts of the products of experts that compute as one."""
    return {name: Casts.of_layer(config) for name in ("gate_up", "down")}


_TRAINING = attrgetter("training")


class _Looked(NamedTuple):
    """What a call of experts needs to know of them."""

    look: Look

    provided: bool
    """An engine gives their FP8 weights."""

    filled: list[QuantizedMatrix] | None
    """What `Look.filled` gives."""

    why_not: str | None
    """Why they do not run as one, however many the tokens."""


class _Layers(NamedTuple):
    """Computes experts as one, for one call."""

    up: WeightStack
    down: WeightStack
    saving: Saving
    """Of gate and up, for backward."""


class GroupedExperts:
    """Experts whose products are computed as grouped ones where that is right and faster.

    A copy or a pickle of it holds no FP8 weights.

    Args:
        experts: of one rank; modules that compute `down(act_fn(gate(x)) * up(x))`.
    """

    are_whole: bool = False
    """Weights that are whole only while something runs are so while the experts are computed."""

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        self.experts = tuple(experts)
        self._calls = Calls.by_mode()
        self._alike = AlikeExperts(self.experts)
        self._judged: tuple[Look, str | None] | None = None
        self._gate_up, self._down = StackCopy(), StackCopy()
        config = next((layer.fp8_config for layer in gate_up_down(experts[0]) if isinstance(layer, FP8Layer)), None)
        self.fp8_casts: dict[str, Casts] = {} if config is None else _casts(config)

    def __reduce__(self) -> tuple:
        return type(self), (self.experts,)

    def of_others(self, experts: Sequence[nn.Module]) -> GroupedExperts:
        """Return other experts in place of these, whose casts are observed by who observes these'."""
        others = type(self)(experts)
        others.are_whole = self.are_whole
        for name in others.fp8_casts.keys() & self.fp8_casts.keys():
            casts, before = others.fp8_casts[name], self.fp8_casts[name]
            casts.observers, casts.weight_observers = before.observers, before.weight_observers
        return others

    @property
    def why_one_by_one(self) -> str | None:
        """Return why the experts run one by one in training, or did for some batches; None: in grouped products.

        What only a batch shows is known after it.
        """
        never = self._why_never(self._alike.look())
        if never is WHOLE_IN_LAYERS and self.are_whole:  # they will be when the experts run
            never = None
        return never or self._calls[True].told

    @property
    def why_one_by_one_in_evaluation(self) -> str | None:
        """Return why the experts ran one by one for some batches in evaluation, though in training they need not."""
        return self._calls[False].told

    def note(self, reason: str | None) -> None:
        """Remember that the experts run as one on a batch, or let the report give a reason why they did not on some."""
        self._calls[self.experts[0].training].note(reason)

    @property
    def has_run(self) -> bool:
        """Tell whether the experts were computed as one, which their layers do not see."""
        return any(calls.ran for calls in self._calls.values())

    @property
    def saves_in_8_bits(self) -> bool:
        """Tell whether gate and up are saved so for backward by grouped products, as far as is known."""
        return self.why_one_by_one is None and gate_up_down(self.experts[0])[-1].fp8_config.saves_in_8_bits

    def products(self) -> list[list[FP8Layer]]:
        """The layers that run as one product, in the order of their weights there; none where experts run apart."""
        look = self._alike.look()
        return [] if self._why_never(look) is not None else [look.up.layers, look.down.layers]

    def prepared(self, tokens: torch.Tensor, rows: int) -> Grouped:
        """Look at the experts, which takes the host a while, and return what computes them on tokens that were sent.

        Args:
            tokens: like those that it will be given.
            rows: of these; about so many. Where they would run as one, FP8 weights are looked up.
        """
        looked, layers, about = self._look(tokens), None, rows_that_decide(rows, self.experts[0].training)
        if looked is not None and not looked.look.is_transient and self._why_not(looked, about) is None:
            layers = self._layers(looked, tokens)
            layers.up.look_up(tokens)  # those of down, while the GPU multiplies by these
        return partial(self._on_sent, looked, layers)

    def mix(self, routed: Routed) -> torch.Tensor | None:
        """Return what `prepared` gives on tokens of this rank, whose experts are all here."""
        looked = self._look(read_of(routed.tokens))
        return self._mixed(looked, None, routed.rows, routed)

    def _on_sent(
        self, looked: _Looked | None, layers: _Layers | None, routed: Routed, factor: float
    ) -> torch.Tensor | None:
        rows = rows_that_decide(routed.rows, self.experts[0].training)
        return self._mixed(looked, layers, rows, routed, factor)

    def _mixed(
        self, looked: _Looked | None, layers: _Layers | None, rows: int | None, routed: Routed, factor: float = 1.0
    ) -> torch.Tensor | None:
        if looked is None or not self._runs_on(looked, rows):
            return None

        def compute() -> torch.Tensor:
            layout = routed.layout(len(self.experts))
            up, down, saving = layers or self._layers(looked, routed.tokens)
            up.factor = down.factor = factor

            def activation(x: torch.Tensor) -> torch.Tensor:
                # weights are read here, behind the launch of a product: those that were sent take the host a while
                of_rows = RowWeights(routed.weights.contiguous(), layout.choices)
                return activate(x, gated=True, saving=saving, weights=of_rows)

            return run_stacks(routed.tokens.to(torch.bfloat16), layout, up, activation, down, layout)

        return self._gathered(looked.look, compute)

    def _look(self, tokens: torch.Tensor) -> _Looked | None:
        """Look at the experts as they are now, for rows of tokens; None: in compiled code they run one by one."""
        if torch.compiler.is_compiling():
            return None
        look = self._alike.look()
        reason = self._why_never(look)
        if len(set(map(_TRAINING, self.experts))) > 1:
            reason = "some of the experts are in evaluation"
        if reason is None and look.is_transient and not self.are_whole:
            reason = WHOLE_IN_LAYERS
        filled = look.filled() if reason is None else None
        provided = filled is not None or (look.is_provided() if reason is None else False)
        if provided is None:
            reason = "an engine keeps the FP8 weights of some of the layers alone"
        return _Looked(look, bool(provided), filled, reason or self._why_not_of(look, tokens))

    def _runs_on(self, looked: _Looked, rows: float | None) -> bool:
        """Tell whether so many rows are computed in grouped products, or any; the report says why not."""
        reason = self._why_not(looked, rows)
        self.note(reason)
        return reason is None

    def _layers(self, looked: _Looked, tokens: Rows) -> _Layers:
        """Return what computes the experts on rows of tokens; transient weights must be whole."""
        look, provided, filled, _ = looked
        config = look.down.layers[0].fp8_config
        require_fp8(read_of(tokens).device, config.emulate)
        self._follow(config)
        casts = self.fp8_casts
        if not self.experts[0].training:
            casts = {name: of_product.evaluation for name, of_product in casts.items()}
        count, ups = len(self.experts), len(look.up.layers)

        def stacked(stack: Stack, casts: Casts, copy: StackCopy, part: slice) -> WeightStack:
            if look.is_transient:
                now = Stack.of(stack.layers)  # what is gathered for this call takes the parameters' place
                return WeightStack(now.weights, casts, lambda _: weights_of_call(now, count, casts, provided))
            parts = None if filled is None else filled[part]
            return WeightStack(stack.weights, casts, lambda _: (copy.get(stack, count, casts, provided, parts), None))

        up = stacked(look.up, casts["gate_up"], self._gate_up, slice(ups))
        down = stacked(look.down, casts["down"], self._down, slice(ups, None))
        return _Layers(up, down, Saving(in_8_bits=config.saves_in_8_bits))

    def _gathered(self, look: Look, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `compute` makes of the layers' weights, where these have their values."""
        return compute()

    def input_casts(self, config: FP8Config) -> Casts:
        """Return what casts the inputs of gate and up in training, whose configuration is given."""
        self._follow(config)
        return self.fp8_casts["gate_up"]

    def _follow(self, config: FP8Config) -> None:
        """Let the casts be those of layers with a configuration."""
        self.fp8_casts = {name: casts.under(config) for name, casts in (self.fp8_casts or _casts(config)).items()}

    def _why_not(self, looked: _Looked, rows: float | None) -> str | None:
        """Return why the experts do not run as one on so many rows, or on any."""
        # transient weights are gathered, and their gradients reduced, in one order on all ranks, whatever the rows of
        # each
        if looked.why_not is not None or rows is None or looked.look.is_transient:
            return looked.why_not
        return self._why_slower(looked.look, rows)

    def _why_not_of(self, look: Look, tokens: torch.Tensor) -> str | None:
        """Return why the experts do not run as one on rows of these tokens, though they can on some."""
        weight = look.down.weights[0]
        if (reason := why_not_bf16(tokens, weight)) is not None:
            return reason
        if torch.is_inference_mode_enabled() and not self.experts[0].training and not weight.is_inference():
            if captured_without_copies(tokens):
                return "a graph that is captured"
        elif not reusable(tokens, weight):
            return "inference mode or a graph that is captured"
        return None

    def _why_slower(self, look: Look, rows: float) -> str | None:
        """Return why grouped products of so many rows in all would take longer, or None where they would not."""
        gate, down, layer = look.up.weights[0], look.down.weights[0], look.down.layers[0]
        count = len(self.experts)
        outputs, inputs = gate.shape
        if rows / count * (2 * gate.numel() + down.numel()) / 2 >= ONE_BY_ONE_FROM:
            return "one by one is faster for so many tokens"
        always = layer.fp8_weight.always
        # in evaluation few tokens need few of the experts, and a product reads all
        paying = count if self.experts[0].training else 0
        if pays(layer.fp8_config, paying, rows, (inputs, 2 * outputs), down.device, always=always):
            return None
        return "too few tokens for so few experts" if paying else "too few tokens"

    def _why_never(self, look: Look) -> str | None:
        """Return why the experts, as they are, cannot run as one on any tokens."""
        if (reason := look.why_not()) is not None:
            return reason
        if self._judged is None or self._judged[0] is not look:
            self._judged = look, self._why_not_as_one(look)
        return self._judged[1]

    def _why_not_as_one(self, look: Look) -> str | None:
        """Return why experts that are alike cannot run as one, which follows from the look alone."""
        if len(self.experts) < 2:
            return "one expert"
        down = look.down.layers[0]
        config = down.fp8_config
        if not all(layer.fp8_config == config for layer in look.up.layers[:2]):
            return "the layers' FP8Configs differ"
        sizes = {size for stack in (look.up, look.down) for size in stack.weights[0].shape}
        reason = why_not_stacked(config, sizes, down.fp8_casts.why_not_by_engines)
        if reason is not None:
            return reason
        return why_no_grouped_product(down.held_weight.device, config.emulate)


def grouped_experts(model: nn.Module) -> list[GroupedExperts]:
    """Those that the modules of a model hold as attributes."""
    return held_by_modules(model, GroupedExperts)
