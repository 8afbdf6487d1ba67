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

    input_format: torch.dtype = formats.E4M3
    """Format of a layer's input."""

    weight_format: torch.dtype = formats.E4M3
    """Format of a layer's weight."""

    gradient_format: torch.dtype = None  # type: ignore[assignment] # see __post_init__
    """Format of the gradient of a layer's output; None is E5M2 for tensorwise and E4M3 for rowwise scales."""

    fast_accumulation_fprop: bool = True
    """Let the forward product skip the promotion of partial sums to FP32: 6 % faster on an H200, fewer bits."""

    fast_accumulation_dgrad: bool = False
    """The same for the product that gives the input's gradient."""

    fast_accumulation_wgrad: bool = False
    """The same for the product that gives the weight's gradient, which sums over all tokens and suffers most."""

    power_of_two: bool = None  # type: ignore[assignment] # see __post_init__
    """Round scales down to powers of two: exact to apply and undo, at a cost of up to one bit of range; None is False
    for tensorwise and True for rowwise scales."""

    granularity: str = "tensorwise"
    """How many values share a scale: "tensorwise", one scale a tensor, or "rowwise", one for each token and for each
    output feature (and, for the transposes that backward reads, for each feature)."""

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
    then read as NaN after a step, but in checkpoints and state dicts, and run in FP8 for any number of tokens. None is
    False where these copies would take more than 1/32 of the GPU's memory (`nn.weights.memory`)."""

    keep_weight_transposes: bool | None = None
    """Keep the transpose of each FP8 weight, which backward reads, from step to step. False makes it in backward, at
    each micro-batch: one byte a value less for a pass over the FP8 weights. Nothing changes where an engine keeps none
    anyway (Gemini, FSDP), nor for GPT-2's Conv1D under ZeRO. None is False where the transposes would take more than
    1/32 of the GPU's memory. For tensorwise scales; rowwise ones keep the transposes."""

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

    gradient_accumulation: str = "32-bit"
    """How ZeRO keeps a rank's part of reduced gradients until the next micro-batch's are added: "32-bit", in FP32 after
    the second; "16-bit", in BF16; or "8-bit", by groups of 128 values (`kernels.gradient_sums`), also after the first,
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
        defaults = _DEFAULTS_BY_GRANULARITY.get(self.granularity, {})
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        for name, allowed in _ALLOWED.items():
            value = getattr(self, name)
            if not any(type(value) is type(choice) and value == choice for choice in allowed):
                choices = " or ".join(repr(choice) for choice in allowed)
                raise ValueError(f"FP8Config.{name} is {value!r}; use {choices}")
        for name in _DERIVED:  # now, for a compiler does not trace the first time that one is asked for
            getattr(self, name)
        if self.rowwise and self.keep_weight_transposes is False:
            raise ValueError(
                "FP8Config.keep_weight_transposes is False, and with rowwise scales a transpose has scales of its own "
                'that its FP8 values do not tell; keep the transposes or use granularity="tensorwise"'
            )
        for one, other in _MULTIPLIED:
            if getattr(self, one) is formats.E5M2 and getattr(self, other) is formats.E5M2:
                raise ValueError(
                    f"FP8Config.{one} and FP8Config.{other} are both float8_e5m2, and the hardware multiplies E5M2 "
                    f"only by E4M3; use torch.float8_e4m3fn for {other}"
                )

    @cached_property
    def rowwise(self) -> bool:
        """Whether each row has a scale of its own."""
        return self.granularity == "rowwise"

    @cached_property
    def saves_in_8_bits(self) -> bool:
        """Whether fused layers save activations in 8 bits."""
        return self.saved_activations == "8-bit"

    @cached_property
    def keeps_16_bits(self) -> bool:
        """Whether FP8 weights have a 16-bit copy; they have one as long as `weights_in_16_bits` is undecided."""
        return self.weights_in_16_bits is not False

    @cached_property
    def keeps_transposes(self) -> bool:
        """Whether FP8 weights have their transpose; they have it as long as `keep_weight_transposes` is undecided."""
        return self.keep_weight_transposes is not False


_DERIVED = ("rowwise", "saves_in_8_bits", "keeps_16_bits", "keeps_transposes")
_SWITCH = (True, False)
_DEFAULTS_BY_GRANULARITY = {
    "tensorwise": {"gradient_format": formats.E5M2, "power_of_two": False},
    "rowwise": {"gradient_format": formats.E4M3, "power_of_two": True},
}
_ALLOWED = {
    "vocabulary_head": _SWITCH,
    "granularity": tuple(_DEFAULTS_BY_GRANULARITY),
    "input_format": formats.FORMATS,
    "weight_format": formats.FORMATS,
    "gradient_format": formats.FORMATS,
    "fast_accumulation_fprop": _SWITCH,
    "fast_accumulation_dgrad": _SWITCH,
    "fast_accumulation_wgrad": _SWITCH,
    "power_of_two": _SWITCH,
    "always": _SWITCH,
    "communication": _SWITCH,
    "gradient_scaling": ("block", "tensor", "auto"),
    "fused": _SWITCH,
    "weights_in_16_bits": (None, *_SWITCH),
    "keep_weight_transposes": (None, *_SWITCH),
    "cuda_graphs": (None, *_SWITCH),
    "saved_activations": ("16-bit", "8-bit"),
    "gradient_accumulation": GRADIENT_ACCUMULATIONS,
    "emulate": _SWITCH,
}
_MULTIPLIED = (
    ("input_format", "weight_format"),  # fprop
    ("gradient_format", "weight_format"),  # dgrad
    ("gradient_format", "input_format"),  # wgrad
)
