"""Choose what runs in FP8, and how: one frozen object, validated once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from fp8booster import formats
from fp8booster.comm.encoding import Encoding
from fp8booster.optim.gradient_sums import GRADIENT_ACCUMULATIONS
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, WEIGHT, Scaling, check_strategy, named
from fp8booster.scaling.checks import require_one_of, require_switch, require_whole

LayerPredicate = Callable[[str, nn.Module], bool]

VOCABULARY_HEADS = ("lm_head", "embed_out")


def all_but_vocabulary_heads(name: str, module: nn.Module) -> bool:
    """True for every linear layer but the one that makes the logits, whose output is the most sensitive to rounding.

    A name tells this of some heads. As `FP8Config.layers` it leaves out those that the model itself names too
    (`nn.modules`).
    """
    return name.rpartition(".")[2] not in VOCABULARY_HEADS


FAST_PRODUCTS = ("fprop", "dgrad", "wgrad")
"""The products of a linear layer: y = x wT, dx = dy w, and dw = dyT x."""


@dataclass(frozen=True)
class Formats:
    """The FP8 formats of a layer's operands: the field's "hybrid" recipe unless given otherwise.

    Raises:
        ValueError: a field is no FP8 format, or both operands of a product are E5M2, which no hardware multiplies.
    """

    input: torch.dtype = formats.E4M3
    """Of a layer's input."""

    weight: torch.dtype = formats.E4M3
    """Of a layer's weight."""

    gradient: torch.dtype | None = None
    """Of the gradient of a layer's output; None: E5M2 with tensorwise scales, E4M3 with finer ones."""

    def __post_init__(self) -> None:
        require_one_of(self, "input", formats.FORMATS)
        require_one_of(self, "weight", formats.FORMATS)
        require_one_of(self, "gradient", (None, *formats.FORMATS))


@dataclass(frozen=True)
class WeightCopies:
    """The copies of FP8 weights that are kept from step to step.

    None keeps one unless it would take more than 1/32 of the GPU's memory (`nn.weights.memory`).
    """

    high_precision: bool | None = None
    """Under ZeRO, keep the value of each gathered FP8 weight in 16 bits too, for what reads a parameter itself. False
    saves these two bytes a value, and weights are gathered while the next forward runs. The parameters of FP8 layers
    then read as NaN after a step, but in checkpoints and state dicts, and run in FP8 for any number of tokens. Where
    something reads a layer's `weight` without the layer, that one keeps its 16-bit copy."""

    transposes: bool | None = None
    """Keep the transpose of each FP8 weight, which backward reads. False makes it in backward, at each micro-batch: one
    byte a value less for a pass over the FP8 weights. Nothing changes where an engine keeps none anyway (FSDP, and
    Gemini but for frozen weights), nor for GPT-2's Conv1D under ZeRO. Rowwise scales need the transposes, which have
    scales of their own."""

    def __post_init__(self) -> None:
        require_one_of(self, "high_precision", (None, True, False))
        require_one_of(self, "transposes", (None, True, False))


@dataclass(frozen=True)
class Activations:
    """The inputs of products, norms and SwiGLU as fused layers keep them for backward."""

    saved: str = "16-bit"
    """What norms and SwiGLU of decoder layers read: "16-bit", in the model's dtype, or "8-bit", by groups of 128 values
    (`kernels.group_codes`), of which backward makes the down projection's input again. The forward is the same, bit for
    bit; what was saved errs by 0.7 %. A layer of LLaMA then saves 9.3 in place of 14.2 times its hidden states in 16
    bits. What is not fused saves what it did."""

    recompute: str = "none"
    """Which inputs of products backward computes again, in place of keeping them in FP8: "activations", what SwiGLU and
    its like give the down projection, from gate and up; "norms", what a decoder layer's norms give q, k and v, and gate
    and up, from the norms' inputs; "both"; "all", both of these, and what attention gives its output projection is cast
    again; or "none". What they are computed from is saved anyway, and gradients stay the same, bit for bit. A layer of
    LLaMA then saves 12.9, 13.2, 11.9 or 11.4 in place of 14.2 times its hidden states in 16 bits. With `saved="8-bit"`
    activations are computed again whatever this says, and norms' outputs from their inputs in 8 bits. For fused layers;
    inputs that ranks gather are kept."""

    def __post_init__(self) -> None:
        require_one_of(self, "saved", ("16-bit", "8-bit"))
        require_one_of(self, "recompute", ("none", "activations", "norms", "both", "all"))


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    """The configuration of linear layers in FP8.

    The defaults are E4M3 for what flows forward, E5M2 for gradients, one real-time scale a tensor.

    Raises:
        ValueError: a field has a value that is not allowed; the message says which are.
        TypeError: a field has the wrong type.
    """

    layers: LayerPredicate = all_but_vocabulary_heads
    """`layers(name, module)` is True for each linear layer that shall compute in FP8, and for each module that holds
    experts as one parameter (transformers 5: it has no `in_features`); name is the module's path. The default leaves
    out vocabulary heads, by their names and by what a model's `get_output_embeddings()` gives, and the routers of
    experts. See `vocabulary_head`."""

    vocabulary_head: bool = False
    """Compute vocabulary heads in FP8 too, whatever `layers` says of them: the three products of each chunk of tokens
    where the loss is computed so (`fused`). Their output is the most sensitive to rounding."""

    high_precision_ends: int = 0
    """Leave so many of the first and of the last decoder layers in the model's precision, vocabulary heads aside: the
    members of each outermost `nn.ModuleList`, counted over all pipeline stages."""

    scaling: Scaling = "tensorwise"  # type: ignore[assignment] # a name: see __post_init__
    """The strategy that scales operands: an object, or a name (`scaling.named`). "tensorwise", "rowwise" and
    "blockwise" are real-time scales, one for a tensor, for a row, or for 128 values and 128 x 128 weights
    (`scaling.RealTime`); "amax" is tensorwise with powers of two; "delayed" takes amaxes of earlier steps; "constant"
    is one power of two for all; "smooth-swiglu" scales channels of SwiGLU's output. A subclass of `scaling.Scaling` is
    a strategy of your own."""

    formats: Formats = Formats()
    """FP8 formats of the operands."""

    fast_accumulation: tuple[str, ...] = ("fprop",)
    """The products that skip the promotion of partial sums to FP32, of `FAST_PRODUCTS`: 6 % faster on an H200, fewer
    bits. wgrad, which sums over all tokens, suffers most. Blockwise products have none."""

    always: bool = False
    """Compute in FP8 also where a layer is so small that BF16 is faster on this GPU, by `nn.linear.speed_model`."""

    messages: Encoding | None = Encoding()  # noqa: RUF009  (frozen)
    """How gradients, activations and weights are sent in FP8, where a plugin's `fp8_communication` does not say
    otherwise; None: not in FP8. `Encoding(block_size=None)` is one scale a message; `Encoding(automatic_scaling=True)`
    is FP8-LM's, for the gradients that ZeRO reduces, which are added in FP8."""

    fused: bool = True
    """Fuse what lies between the products of decoder layers (`nn.fused`): q, k and v as one product, gate and up as
    one, norms with residuals, rotary embedding and SwiGLU as one kernel each, which deliver amax to the casts; and the
    loss over chunks of logits. For the families of transformers' models that docs/guide.md lists, in every plugin;
    and the experts of a rank as grouped products. What has no fused form stays as it is, and the line that a plugin
    logs names it."""

    cuda_graphs: bool | None = None
    """Replay decoder layers as CUDA graphs in training, once they ran a few times with the same shapes
    (`nn.graphs.capture_layers`), so that a small model does not wait for Python; values stay the same, bit for bit.
    None does so on a GPU where the host takes longer for a layer than the GPU, or the layer sends to other ranks; True
    wherever it can be. Of a layer with experts that must run eagerly the other parts are replayed. Layers share what
    they need only while they run; where there is no room for what stays, they run eagerly. The report tells which
    layers were not captured, and why. In the plugins, and by `fuse` in plain PyTorch."""

    weight_copies: WeightCopies = WeightCopies()
    """Copies of FP8 weights that are kept."""

    activations: Activations = Activations()
    """How activations are saved and recomputed."""

    gradient_accumulation: str = "32-bit"
    """How ZeRO keeps a rank's part of reduced gradients until the next micro-batch's are added: "32-bit", in FP32 after
    the second; "16-bit", in BF16; or "8-bit", by groups of 128 values (`kernels.group_codes`), also after the first,
    and decoded for the step. For `LowLevelZeroPlugin`, and `HybridParallelPlugin` with ZeRO and without a pipeline.
    What `no_sync` accumulates is whole on each rank, in 16 bits."""

    emulate: bool = False
    """Compute the products in FP32 from the FP8 values, for GPUs without FP8 products: same rounding, no speed."""

    def __post_init__(self) -> None:
        if not callable(self.layers):
            raise TypeError(
                f"FP8Config.layers is {self.layers!r}; give a function of a layer's name and module that returns True "
                "where the layer shall compute in FP8"
            )
        if isinstance(self.scaling, str):
            object.__setattr__(self, "scaling", named(self.scaling))
        for name, kind in OBJECTS.items():
            value = getattr(self, name)
            if not isinstance(value, kind) and not (value is None and name == "messages"):
                own = "a name such as 'delayed', or an fp8booster.scaling.Scaling"
                give = own if kind is Scaling else f"an fp8booster.{kind.__name__}"
                raise TypeError(f"FP8Config.{name} is {value!r}; give {give}")
        check_strategy(self.scaling)
        require_whole(self, "high_precision_ends", 0, 2**31)
        require_one_of(self, "gradient_accumulation", GRADIENT_ACCUMULATIONS)
        require_one_of(self, "cuda_graphs", (None, True, False))
        require_switch(self, "vocabulary_head", "always", "fused", "emulate")
        self._check_products()
        for name in _DERIVED:  # now, for a compiler does not trace the first time that one is asked for
            getattr(self, name)
        self._check_combinations()
        self.scaling.check(self)

    def _check_products(self) -> None:
        given = self.fast_accumulation
        if not isinstance(given, tuple) or any(each not in FAST_PRODUCTS for each in given):
            raise ValueError(f"FP8Config.fast_accumulation is {given!r}; give a tuple of names, of {FAST_PRODUCTS}")
        if self.granularity == "blockwise" and set(given) - {"fprop"}:
            raise ValueError(
                f"FP8Config.fast_accumulation is {given!r}, and products with blockwise scales have no fast "
                "accumulation; leave it out"
            )
        dtypes = {"input": self.input_format, "weight": self.weight_format, "gradient": self.gradient_format}
        for name, dtype in dtypes.items():
            if self.granularity == "blockwise" and dtype is not formats.E4M3:
                raise ValueError(
                    f"Formats.{name} is float8_e5m2, and with blockwise scales the hardware multiplies E4M3 alone; use "
                    "torch.float8_e4m3fn"
                )
        for one, other in _MULTIPLIED:
            if dtypes[one] is formats.E5M2 and dtypes[other] is formats.E5M2:
                raise ValueError(
                    f"Formats.{one} and Formats.{other} are both float8_e5m2, and the hardware multiplies E5M2 only by "
                    f"E4M3; use torch.float8_e4m3fn for {other}"
                )

    def _check_combinations(self) -> None:
        if self.rowwise and self.weight_copies.transposes is False:
            raise ValueError(
                "FP8Config.weight_copies has transposes=False, and with rowwise scales a transpose has scales of its "
                'own that its FP8 values do not tell; keep the transposes or use scaling="tensorwise"'
            )
        if not self.fused and self.activations != Activations():
            raise ValueError(
                f"FP8Config.activations is {self.activations}, which fused layers do, and fused is False; leave one of "
                "them out"
            )
        if self.cuda_graphs and not self.scaling.is_captured:
            raise ValueError(
                f'FP8Config.scaling is "{self.scaling.name}", and cuda_graphs is True: a captured layer cannot tell '
                'when a step begins; leave cuda_graphs out, or use scaling="tensorwise"'
            )

    @property
    def granularity(self) -> str:
        """Return how many values share a scale, one of `scaling.GRANULARITIES`."""
        return self.scaling.granularity

    @property
    def power_of_two(self) -> bool:
        """Tell whether scales are powers of two."""
        return self.scaling.power_of_two

    @cached_property
    def input_format(self) -> torch.dtype:
        """Return the format of a layer's input."""
        return self.formats.input

    @cached_property
    def weight_format(self) -> torch.dtype:
        """Return the format of a layer's weight."""
        return self.formats.weight

    @cached_property
    def gradient_format(self) -> torch.dtype:
        """Return the format of the gradient of a layer's output."""
        return self.formats.gradient or (formats.E5M2 if self.granularity == "tensorwise" else formats.E4M3)

    @cached_property
    def format_of(self) -> Mapping[str, torch.dtype]:
        """The format of an operand, by its role."""
        return {WEIGHT: self.weight_format, INPUT: self.input_format, OUTPUT_GRADIENT: self.gradient_format}

    @cached_property
    def product_options(self) -> Mapping[str, dict[str, Any]]:
        """The options of `kernels.product.product`, by the name of a product."""
        fast = self.fast_accumulation
        return {name: {"fast_accumulation": name in fast, "emulate": self.emulate} for name in FAST_PRODUCTS}

    @cached_property
    def rowwise(self) -> bool:
        """Tell whether each row has a scale of its own."""
        return self.granularity == "rowwise"

    @cached_property
    def finer_scales(self) -> str | None:
        """Return what to call scales that are finer than one a tensor, where that is a reason; None: one a tensor."""
        return None if self.granularity == "tensorwise" else f"{self.granularity} scales"

    @cached_property
    def saves_in_8_bits(self) -> bool:
        """Tell whether fused layers save activations in 8 bits."""
        return self.activations.saved == "8-bit"

    @cached_property
    def recomputes_activations(self) -> bool:
        """Tell whether backward computes again what fused activations give."""
        return self.saves_in_8_bits or self.activations.recompute in ("activations", "both", "all")

    @cached_property
    def recomputes_norms(self) -> bool:
        """Tell whether backward computes again what the norms of fused decoder layers give."""
        return self.activations.recompute in ("norms", "both", "all")

    @cached_property
    def recasts_attention(self) -> bool:
        """Tell whether backward casts again what fused attention gives."""
        return self.activations.recompute == "all"

    @cached_property
    def keeps_high_precision(self) -> bool:
        """Tell whether FP8 weights have a 16-bit copy; they have one as long as that is undecided."""
        return self.weight_copies.high_precision is not False

    @cached_property
    def keeps_transposes(self) -> bool:
        """Tell whether FP8 weights have their transpose; they have it as long as that is undecided."""
        return self.weight_copies.transposes is not False


_DERIVED = [name for name, value in vars(FP8Config).items() if isinstance(value, cached_property)]
OBJECTS = {
    "scaling": Scaling,
    "formats": Formats,
    "messages": Encoding,
    "weight_copies": WeightCopies,
    "activations": Activations,
}
_MULTIPLIED = (("input", "weight"), ("gradient", "weight"), ("gradient", "input"))  # fprop, dgrad, wgrad

TRAINING_ALONE = frozenset(
    ("messages", "weight_copies", "cuda_graphs", "activations", "gradient_accumulation", "formats.gradient")
)
"""Fields that inference does not read, and parts of fields."""


def config_or_default(config: FP8Config | None, name: str = "config") -> FP8Config:
    """A configuration that an argument of this name gives; None is `FP8Config()`. Raises TypeError for another type."""
    if config is not None and not isinstance(config, FP8Config):
        raise TypeError(f"{name} is {config!r}; give an fp8booster.FP8Config")
    return FP8Config() if config is None else config
