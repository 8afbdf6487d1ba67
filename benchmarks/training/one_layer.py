"""Forward and backward of one decoder layer on one GPU, or what the host does for it, engines interleaved."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from benchmarks.harness.calls import python_calls
from benchmarks.harness.results import Column, Record, Table, spread
from benchmarks.harness.timing import Timing, Variant, let_weights_stay, time_interleaved
from fp8booster import FP8Config, convert_to_fp8
from fp8booster.nn.fused import fuse_blocks
from fp8booster.training.models import Architecture, build

BASELINE = "hf-bf16"
INPUT_SETS = 2


class Missing(RuntimeError):
    """Something that a layer needs is not there."""


Forward = Callable[[torch.Tensor], torch.Tensor]
Make = Callable[["Decoder", FP8Config], "Forward"]


@dataclass(frozen=True)
class Decoder:
    """A model of one decoder layer."""

    model: nn.Module
    positions: tuple[torch.Tensor, torch.Tensor]
    """Cosines and sines of the rotary embedding."""

    @classmethod
    def of(cls, architecture: Architecture, sequence: int, device: torch.device) -> Decoder:
        """In BF16, with random weights, always the same."""
        torch.manual_seed(0)
        model = build(architecture.shortened(1).config(sequence), device=device)
        probe = torch.empty(1, sequence, architecture.hidden, dtype=torch.bfloat16, device=device)
        positions = model.model.rotary_emb(probe, torch.arange(sequence, device=device)[None])
        return cls(model, positions)

    def forward(self, layer: Callable | None = None) -> Forward:
        """A function of x  [batch, sequence, hidden]: the layer, or `layer` in its place."""
        let_weights_stay(self.model.parameters())
        called = self.model.model.layers[0] if layer is None else layer

        def run(x: torch.Tensor) -> torch.Tensor:
            y = called(x, position_embeddings=self.positions)
            return y[0] if isinstance(y, tuple) else y

        return run


def plain(decoder: Decoder, config: FP8Config) -> Forward:
    """Hugging Face's layer."""
    return decoder.forward()


def compiled(decoder: Decoder, config: FP8Config) -> Forward:
    """The same under torch.compile."""
    return decoder.forward(torch.compile(decoder.model.model.layers[0], dynamic=False))


def fused_bf16(decoder: Decoder, config: FP8Config) -> Forward:
    """Its norms, rotary embedding and SwiGLU fused, q, k, v as one product and gate, up as one, all in BF16.

    Raises:
        Missing: a layer of this kind has no fused form.
    """
    return _fused(decoder)


def _fused(decoder: Decoder) -> Forward:
    if not fuse_blocks(decoder.model):
        raise Missing(f"no fused form of {type(decoder.model.model.layers[0]).__name__}")
    return decoder.forward()


def fp8(decoder: Decoder, config: FP8Config) -> Forward:
    """Its linear layers in FP8, weights cast once, as within one optimizer step."""
    convert_to_fp8(decoder.model, config)
    return decoder.forward()


def fp8_cold(decoder: Decoder, config: FP8Config) -> Forward:
    """The same with the weights cast at each step, as after an optimizer's."""
    return _cold(fp8(decoder, config))


def _cold(run: Forward) -> Forward:
    # the step of any optimizer ends the life of all FP8 weights
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])

    def forward(x: torch.Tensor) -> torch.Tensor:
        optimizer.step()
        return run(x)

    return forward


def fused(decoder: Decoder, config: FP8Config) -> Forward:
    """`fp8` with its norms, rotary embedding and SwiGLU fused, q, k, v as one product and gate, up as one.

    Raises:
        Missing: a layer of this kind has no fused form.
    """
    fp8(decoder, config)
    return _fused(decoder)


def fused_cold(decoder: Decoder, config: FP8Config) -> Forward:
    """The same with the weights cast at each step."""
    return _cold(fused(decoder, config))


def torchao(decoder: Decoder, config: FP8Config) -> Forward:
    """Its linear layers by torchao, tensorwise, under torch.compile; they cast the weights at each step.

    Raises:
        Missing: torchao is not installed.
    """
    if find_spec("torchao") is None:
        raise Missing("torchao is not installed")
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(
        decoder.model, config=Float8LinearConfig(), module_filter_fn=lambda module, name: "lm_head" not in name
    )
    return compiled(decoder, config)


LAYERS: Mapping[str, tuple[str, Make]] = {
    BASELINE: ("Hugging Face, BF16", plain),
    "hf-bf16-compile": ("Hugging Face, BF16, compiled", compiled),
    "fp8booster-bf16-fused": ("fp8booster, BF16, fused blocks", fused_bf16),
    "torchao": ("torchao tensorwise, compiled", torchao),
    "fp8booster": ("fp8booster, FP8", fp8),
    "fp8booster-cold": ("fp8booster, FP8, weights cast each step", fp8_cold),
    "fp8booster-fused": ("fp8booster, FP8, fused blocks", fused),
    "fp8booster-fused-cold": ("fp8booster, FP8, fused blocks, weights cast each step", fused_cold),
}
"""Name: label, and how it is built."""

CALLED_FROM_PYTHON = [name for name, (_, make) in LAYERS.items() if make not in (compiled, torchao)]
"""Those whose operations Python calls one by one."""


def measure_layers(
    architecture: Architecture,
    config: FP8Config,
    *,
    batch: int,
    sequence: int,
    device: torch.device,
    rounds: int,
    sample_ms: float,
    names: Iterable[str] | None = None,
) -> tuple[list[Record], dict[str, str]]:
    """Time every layer that can be built, interleaved, of those named, or of all `LAYERS`.

    Returns:
        records, and label: reason of those that could not.
    """
    shape = (batch, sequence, architecture.hidden)
    inputs = [
        tuple(torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2)) for _ in range(INPUT_SETS)
    ]
    variants: list[Variant] = []
    left_out: dict[str, str] = {}
    for name in LAYERS if names is None else names:
        label, make = LAYERS[name]
        found = _variant_or_reason(name, make, config, architecture, sequence, inputs, device)
        if isinstance(found, Variant):
            variants.append(found)
        else:
            left_out[label] = found
    timings = time_interleaved(variants, device=device, rounds=rounds, sample_ms=sample_ms)
    calls = {}
    for variant in variants:
        variant.call(0)  # casts weights that the step of another layer's optimizer made stale
        calls[variant.name] = python_calls(lambda step=variant.call: step(0))
    return layer_records(timings, calls), left_out


def _variant_or_reason(name: str, make: Make, *how: Any) -> Variant | str:
    try:
        return _variant(name, make, *how)
    except Missing as error:
        return str(error)
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        return f"it failed: {type(error).__name__}: {reason}"


def _variant(
    name: str,
    make: Make,
    config: FP8Config,
    architecture: Architecture,
    sequence: int,
    inputs: list[tuple[torch.Tensor, ...]],
    device: torch.device,
) -> Variant:
    decoder = Decoder.of(architecture, sequence, device)
    forward = make(decoder, config)
    parameters = list(decoder.model.parameters())

    def step(index: int) -> None:
        for parameter in parameters:
            parameter.grad = None
        x, dy = inputs[index]
        # a new tensor object each time, so that no layer can keep a cast of it
        forward(x.detach().requires_grad_()).backward(dy)

    step(0)  # compiles what compiles, and fails here if it does
    return Variant(name, step, INPUT_SETS)


def layer_records(timings: Mapping[str, Timing], calls: Mapping[str, int]) -> list[Record]:
    """One record for each layer; "speed" is the baseline's time over its own, round by round.

    Args:
        timings: by the layers' names.
        calls: how many Python functions a step calls.
    """
    baseline = timings.get(BASELINE)
    return [
        {
            "layer": name,
            "label": LAYERS[name][0],
            "ms": timing.ms.as_record(),
            "host_ms": timing.host_ms.as_record(),
            "python_calls": calls[name],
            "speed": None if baseline is None else baseline.ms.over(timing.ms).as_record(),
        }
        for name, timing in timings.items()
    ]


def layer_table(records: list[Record], title: str) -> Table:
    """One row for each layer."""
    return Table(
        "layers",
        title,
        [
            Column("layer", lambda r: r["label"]),
            Column("ms", lambda r: spread(r["ms"], 3)),
            Column("host ms", lambda r: f"{r['host_ms']['median']:.3f}"),
            Column("Python calls", lambda r: str(r["python_calls"])),
            Column(f"speed over {LAYERS[BASELINE][0]}", lambda r: "-" if r["speed"] is None else spread(r["speed"], 2)),
        ],
        records,
        "Forward and backward through autograd, called from Python: median [10th-90th percentile] of the rounds, "
        "the layers interleaved. No optimizer steps, so weights cast once stay cast, except where it says otherwise. "
        "Python calls are those of functions in one step, forward and backward.",
    )
