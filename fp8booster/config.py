"""What runs in FP8, and how: one frozen object, validated once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from fp8booster import formats

LayerPredicate = Callable[[str, nn.Module], bool]

VOCABULARY_HEADS = ("lm_head", "embed_out")

GRADIENT_ACCUMULATIONS = ("32-bit", "16-bit", "8-bit")
"""How gradients add up over micro-batches (`optim.gradient_sums`)."""


def all_but_vocabulary_heads(name: str, module: nn.Module) -> bool:
    """True for every linear layer but the one that makes the logits, whose output is the most sensitive to rounding.

    A name tells this of some heads. As `FP8Config.layers` it leaves out those that the model itself names too
    (`nn.modules`).
    """
    return name.rpartition(".")[2] not in VOCABULARY_HEADS


@dataclass(frozen=True, kw_only=True)
class FP8Config:
    """How linear layers compute in FP8.

    The defaults are the field's "hybrid" recipe: E4M3 for what flows forward, E5M2 for gradients, one real-time scale a
    tensor.

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

    first_last_layers_in_16_bits: int = 0
    """Leave so many of the first and of the last decoder layers in the model's precision, vocabulary heads aside: the
    members of each outermost `nn.ModuleList`, counted over all pipeline stages."""

    input_format: torch.dtype = formats.E4M3
    """Format of a layer's input."""

    weight_format: torch.dtype = formats.E4M3
    """Format of a layer's weight."""

    gradient_format: torch.dtype = None  # type: ignore[assignment] # see __post_init__
    """Format of the gradient of a layer's output; None is E5M2 for tensorwise scales and E4M3 for finer ones."""

    fast_accumulation_fprop: bool = True
    """Let the forward product skip the promotion of partial sums to FP32: 6 % faster on an H200, fewer bits."""

    fast_accumulation_dgrad: bool = False
    """The same for the product that gives the input's gradient."""

    fast_accumulation_wgrad: bool = False
    """The same for the product that gives the weight's gradient, which sums over all tokens and suffers most."""

    power_of_two: bool = None  # type: ignore[assignment] # see __post_init__
    """Round scales down to powers of two: exact to apply and undo, at a cost of up to one bit of range; None is False
    for tensorwise scales and True for finer ones, and with "amax" and "constant" scaling."""

    scaling: str = "real-time"
    """Where a scale comes from: "real-time", from the tensor as it is; "amax", the same, rounded down to a power of
    two (FP8-AMAX of Perez et al., arXiv 2309.17224); "delayed", from the amaxes of earlier steps (Transformer Engine);
    or "constant", one power of two for weights and inputs and one for gradients (their FP8-CSCALE). With the last two
    what is larger than expected saturates; evaluation, and weights that an engine casts, stay real-time."""

    delayed_history: int = 16
    """Steps of the optimizer whose amaxes delayed scaling keeps."""

    delayed_amax: str = "max"
    """Which of them it takes: "max", the largest, or "most recent", the last step's."""

    delayed_margin: int = 0
    """Powers of two that it leaves free above that amax."""

    forward_bias: int = 3
    """The constant scale of weights and inputs is two to this power: with E4M3 what is above 56 saturates."""

    gradient_bias: int = 16
    """The same of gradients: with E5M2 what is above 0.9 saturates, and below 2e-10 becomes zero. For a mean over
    tokens; a loss scale that multiplies the loss multiplies these too."""

    granularity: str = "tensorwise"
    """How many values share a scale: "tensorwise", one scale a tensor; "rowwise", one for each token and for each
    output feature (and, for the transposes that backward reads, for each feature); or "blockwise", one for each 128
    values of a token and for each block of 128 x 128 values of a weight (and, for the transposes, for 128 tokens of a
    feature), on Hopper GPUs. Blockwise products have no fast accumulation, and sizes are padded to multiples of 128."""

    smooth_swiglu: bool = False
    """Multiply each channel of SwiGLU's output by a power of two before the cast, and divide the columns of the down
    projection's weight by it (`nn.weights.channels`), so that a few large channels leave the others their bits. For
    fused feed-forward blocks with tensorwise real-time scales; these weights are gathered in 16 bits."""

    always: bool = False
    """Compute in FP8 also where a layer is so small that BF16 is faster on this GPU, by `nn.linear.speed_model`."""

    communication: bool = True
    """Send gradients and weights in FP8 too, where a plugin's `fp8_communication` does not say otherwise."""

    gradient_scaling: str = "block"
    """How the gradients that ZeRO reduces in FP8 are scaled: "block", one scale for each 256 values; "tensor", one for
    each message; "auto", FP8-LM's automatic scaling (`comm.automatic_scaling`), which adds them in FP8."""

    fused: bool = True
    """Fuse what lies between the products of decoder layers (`nn.fused`): q, k and v as one product, gate and up as
    one, norms with residuals, rotary embedding and SwiGLU as one kernel each, which deliver amax to the casts; and the
    loss over chunks of logits. For the families of transformers' models that docs/guide.md lists, in every plugin;
    and the experts of a rank as grouped products. What has no fused form stays as it is, and the line that a plugin
    logs names it."""

    weights_in_16_bits: bool | None = None
    """Under ZeRO, keep the value of each gathered FP8 weight in 16 bits too, for what reads a parameter itself. False
    saves these two bytes a value, and weights are gathered while the next forward runs. The parameters of FP8 layers
    then read as NaN after a step, but in checkpoints and state dicts, and run in FP8 for any number of tokens. Where
    something reads a layer's `weight` without the layer, that one keeps its 16-bit copy. None is False where these
    copies would take more than 1/32 of the GPU's memory (`nn.weights.memory`)."""

    keep_weight_transposes: bool | None = None
    """Keep the transpose of each FP8 weight, which backward reads, from step to step. False makes it in backward, at
    each micro-batch: one byte a value less for a pass over the FP8 weights. Nothing changes where an engine keeps none
    anyway (Gemini, FSDP), nor for GPT-2's Conv1D under ZeRO. None is False where the transposes would take more than
    1/32 of the GPU's memory. For tensorwise and blockwise scales; rowwise ones keep the transposes."""

    cuda_graphs: bool | None = False
    """Replay decoder layers as CUDA graphs in training, once they ran a few times with the same shapes
    (`nn.graphs.capture_layers`), so that a small model does not wait for Python; values stay the same, bit for bit.
    None does so where the host takes longer for a layer than the GPU. It costs memory, for each graph has its own:
    what passes in it, what a layer saves, and gradients. The report tells which layers were not captured, and why."""

    saved_activations: str = "16-bit"
    """How fused decoder layers keep for backward what their norms and SwiGLU read: "16-bit", in the model's dtype, or
    "8-bit", by groups of 128 values (`kernels.group_codes`), of which backward makes the down projection's input again.
    The forward is the same, bit for bit; what was saved errs by 0.7 %. A layer of LLaMA then saves 9.3 in place of 14.2
    times its hidden states in 16 bits. What is not fused saves what it did."""

    recompute: str = "none"
    """Which inputs of products backward computes again, in place of keeping them in FP8: "activations", what SwiGLU and
    its like give the down projection, from gate and up; "norms", what a decoder layer's norms give q, k and v, and gate
    and up, from the norms' inputs; "both"; "all", both of these, and what attention gives its output projection is cast
    again; or "none". What they are computed from is saved anyway, and gradients stay the same, bit for bit. A layer of
    LLaMA then saves 12.9, 13.2, 11.9 or 11.4 in place of 14.2 times its hidden states in 16 bits. With
    `saved_activations="8-bit"` activations are computed again whatever this says, and norms' outputs from their inputs
    in 8 bits. For fused layers; inputs that ranks gather are kept."""

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
        count = self.first_last_layers_in_16_bits
        if type(count) is not int or count < 0:
            raise ValueError(
                f"FP8Config.first_last_layers_in_16_bits is {count!r}; give a whole number of layers, 0 or more"
            )
        for name in ("granularity", "scaling"):  # by which others have their defaults
            self._require_allowed(name)
        defaults = _DEFAULTS_BY_GRANULARITY[self.granularity] | _DEFAULTS_BY_SCALING[self.scaling]
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name in _ALLOWED:
            self._require_allowed(name)
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise ValueError(f"FP8Config.{name} is {value!r}; use a whole number from {least} to {most}")
        for name in _DERIVED:  # now, for a compiler does not trace the first time that one is asked for
            getattr(self, name)
        if self.rowwise and self.keep_weight_transposes is False:
            raise ValueError(
                "FP8Config.keep_weight_transposes is False, and with rowwise scales a transpose has scales of its own "
                'that its FP8 values do not tell; keep the transposes or use granularity="tensorwise"'
            )
        self._check_scaling()
        for name in ("saved_activations", "recompute"):
            value = getattr(self, name)
            if not self.fused and value != getattr(type(self), name):
                raise ValueError(
                    f"FP8Config.{name} is {value!r}, which fused layers do, and fused is False; use "
                    f"{name}={getattr(type(self), name)!r}, or leave fused out"
                )
        if self.granularity == "blockwise":
            for name in ("fast_accumulation_dgrad", "fast_accumulation_wgrad"):
                if getattr(self, name):
                    raise ValueError(
                        f"FP8Config.{name} is True, and products with blockwise scales have no fast accumulation; "
                        "leave it out"
                    )
            for name in ("input_format", "weight_format", "gradient_format"):
                if getattr(self, name) is not formats.E4M3:
                    raise ValueError(
                        f"FP8Config.{name} is float8_e5m2, and with blockwise scales the hardware multiplies E4M3 "
                        "alone; use torch.float8_e4m3fn"
                    )
        for one, other in _MULTIPLIED:
            if getattr(self, one) is formats.E5M2 and getattr(self, other) is formats.E5M2:
                raise ValueError(
                    f"FP8Config.{one} and FP8Config.{other} are both float8_e5m2, and the hardware multiplies E5M2 "
                    f"only by E4M3; use torch.float8_e4m3fn for {other}"
                )

    def _require_allowed(self, name: str) -> None:
        value, allowed = getattr(self, name), _ALLOWED[name]
        if not any(type(value) is type(choice) and value == choice for choice in allowed):
            choices = " or ".join(repr(choice) for choice in allowed)
            raise ValueError(f"FP8Config.{name} is {value!r}; use {choices}")

    def _check_scaling(self) -> None:
        what = f"FP8Config.scaling is {self.scaling!r}"
        if "power_of_two" in _DEFAULTS_BY_SCALING[self.scaling] and not self.power_of_two:
            raise ValueError(f"{what}, whose scales are powers of two, and power_of_two is False; leave it out")
        for scaling, names in _OPTIONS_OF_SCALING.items():
            for name in names:
                if scaling != self.scaling and getattr(self, name) != getattr(type(self), name):
                    raise ValueError(
                        f'{what}, and FP8Config.{name} is an option of scaling="{scaling}"; leave one of them out'
                    )
        if self.smooth_swiglu:
            needs = {"fused": True, "granularity": "tensorwise", "cuda_graphs": False}
            for name, value in {**needs, "scaling": "amax" if self.scaling == "amax" else "real-time"}.items():
                if getattr(self, name) != value:
                    raise ValueError(
                        f"FP8Config.smooth_swiglu is True, and FP8Config.{name} is {getattr(self, name)!r}; use "
                        f"{name}={value!r}, or leave smooth_swiglu out"
                    )
        if not self.remembers_amaxes:
            return
        if self.granularity != "tensorwise":
            raise ValueError(
                f"{what}, which keeps one amax a tensor, and granularity is {self.granularity!r}; "
                'use granularity="tensorwise" or scaling="real-time"'
            )
        if self.cuda_graphs is not False:
            raise ValueError(
                f"{what}, and cuda_graphs is {self.cuda_graphs}: a captured layer cannot tell when a step begins; "
                'use cuda_graphs=False or scaling="real-time"'
            )

    @cached_property
    def remembers_amaxes(self) -> bool:
        """Whether scales come from other amaxes than those of the tensors that are cast."""
        return self.scaling in ("delayed", "constant")

    @cached_property
    def rowwise(self) -> bool:
        """Whether each row has a scale of its own."""
        return self.granularity == "rowwise"

    @cached_property
    def finer_scales(self) -> str | None:
        """What to call scales that are finer than one a tensor, where that is a reason; None: one a tensor."""
        return None if self.granularity == "tensorwise" else f"{self.granularity} scales"

    @cached_property
    def scale_for(self) -> str:
        """What has a scale of its own in an input or a gradient, as in `tensor.quantize`."""
        return _SCALES[self.granularity][0]

    @cached_property
    def weight_scale_for(self) -> str:
        """The same of a weight."""
        return _SCALES[self.granularity][1]

    @cached_property
    def saves_in_8_bits(self) -> bool:
        """Whether fused layers save activations in 8 bits."""
        return self.saved_activations == "8-bit"

    @cached_property
    def recomputes_activations(self) -> bool:
        """Whether backward computes again what fused activations give."""
        return self.saves_in_8_bits or self.recompute in ("activations", "both", "all")

    @cached_property
    def recomputes_norms(self) -> bool:
        """Whether backward computes again what the norms of fused decoder layers give."""
        return self.recompute in ("norms", "both", "all")

    @cached_property
    def recasts_attention(self) -> bool:
        """Whether backward casts again what fused attention gives."""
        return self.recompute == "all"

    @cached_property
    def keeps_16_bits(self) -> bool:
        """Whether FP8 weights have a 16-bit copy; they have one as long as `weights_in_16_bits` is undecided."""
        return self.weights_in_16_bits is not False

    @cached_property
    def keeps_transposes(self) -> bool:
        """Whether FP8 weights have their transpose; they have it as long as `keep_weight_transposes` is undecided."""
        return self.keep_weight_transposes is not False


_DERIVED = (
    "remembers_amaxes",
    "rowwise",
    "finer_scales",
    "scale_for",
    "weight_scale_for",
    "saves_in_8_bits",
    "recomputes_activations",
    "recomputes_norms",
    "recasts_attention",
    "keeps_16_bits",
    "keeps_transposes",
)
_SWITCH = (True, False)
_DEFAULTS_BY_GRANULARITY = {
    "tensorwise": {"gradient_format": formats.E5M2, "power_of_two": False},
    "rowwise": {"gradient_format": formats.E4M3, "power_of_two": True},
    "blockwise": {"gradient_format": formats.E4M3, "power_of_two": True},
}
_SCALES = {"tensorwise": ("tensor", "tensor"), "rowwise": ("row", "row"), "blockwise": ("group", "block")}
_DEFAULTS_BY_SCALING: dict[str, dict[str, bool]] = {
    "real-time": {},
    "delayed": {},
    "amax": {"power_of_two": True},
    "constant": {"power_of_two": True},
}
_OPTIONS_OF_SCALING = {
    "delayed": ("delayed_history", "delayed_amax", "delayed_margin"),
    "constant": ("forward_bias", "gradient_bias"),
}
_RANGES = {
    "delayed_history": (1, 1024),
    "delayed_margin": (0, 16),
    "forward_bias": (-64, 64),
    "gradient_bias": (-64, 64),
}
_ALLOWED = {
    "vocabulary_head": _SWITCH,
    "scaling": tuple(_DEFAULTS_BY_SCALING),
    "delayed_amax": ("max", "most recent"),
    "granularity": tuple(_DEFAULTS_BY_GRANULARITY),
    "input_format": formats.FORMATS,
    "weight_format": formats.FORMATS,
    "gradient_format": formats.FORMATS,
    "fast_accumulation_fprop": _SWITCH,
    "fast_accumulation_dgrad": _SWITCH,
    "fast_accumulation_wgrad": _SWITCH,
    "power_of_two": _SWITCH,
    "smooth_swiglu": _SWITCH,
    "always": _SWITCH,
    "communication": _SWITCH,
    "gradient_scaling": ("block", "tensor", "auto"),
    "fused": _SWITCH,
    "weights_in_16_bits": (None, *_SWITCH),
    "keep_weight_transposes": (None, *_SWITCH),
    "cuda_graphs": (None, *_SWITCH),
    "saved_activations": ("16-bit", "8-bit"),
    "recompute": ("none", "activations", "norms", "both", "all"),
    "gradient_accumulation": GRADIENT_ACCUMULATIONS,
    "emulate": _SWITCH,
}
_MULTIPLIED = (
    ("input_format", "weight_format"),  # fprop
    ("gradient_format", "weight_format"),  # dgrad
    ("gradient_format", "input_format"),  # wgrad
)


TRAINING_ALONE = frozenset(
    (
        "gradient_format",
        "fast_accumulation_dgrad",
        "fast_accumulation_wgrad",
        *_OPTIONS_OF_SCALING["delayed"],
        "gradient_bias",
        "smooth_swiglu",
        "communication",
        "gradient_scaling",
        "weights_in_16_bits",
        "keep_weight_transposes",
        "cuda_graphs",
        "saved_activations",
        "recompute",
        "gradient_accumulation",
    )
)
"""Fields that inference does not read."""


def config_or_default(config: FP8Config | None, name: str = "config") -> FP8Config:
    """A configuration that an argument of this name gives; None is `FP8Config()`. Raises TypeError for another type."""
    if config is not None and not isinstance(config, FP8Config):
        raise TypeError(f"{name} is {config!r}; give an fp8booster.FP8Config")
    return FP8Config() if config is None else config
