"""List the tensors that a decoder layer of LLaMA saves for backward, their cost, and the errors of 8-bit codes of them.

    python -m benchmarks.saved_activations --device cpu --out results
    python -m benchmarks.saved_activations --steps 0 --out results

On a GPU forward and backward of a layer of LLaMA-7B are timed too. Bytes are those of autograd's saved tensors that
grow with the tokens, each storage once, in units of the layer's hidden states in 16 bits. Codes are tried on what norms
and SwiGLU read in the model of `fp8booster train`, after some steps on the sources of Python's standard library, and on
data with outliers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import fp8booster
from benchmarks.gradients.collect import training_options
from benchmarks.gradients.steps import steps_in_fp32
from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.timing import Variant, time_interleaved
from fp8booster import FP8Config, convert_to_fp8
from fp8booster.cli.train.data import TokenFile, prepare_tokens
from fp8booster.cli.train.options import TrainOptions
from fp8booster.config import Activations
from fp8booster.formats import E4M3
from fp8booster.kernels.group_codes import decode_groups, encode_groups
from fp8booster.nn.fused import fuse_model


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that autograd holds between forward and backward."""

    where: str
    """The module, and the function that saves it."""

    tensor: torch.Tensor

    @property
    def storage(self) -> torch.UntypedStorage:
        """Its memory, which views share."""
        return self.tensor.untyped_storage()


def saved_by(model: nn.Module, forward: Callable[[], torch.Tensor]) -> list[SavedTensor]:
    """Return the tensors that a forward saves, in order."""
    names = {module: name for name, module in model.named_modules()}
    saved: list[SavedTensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(SavedTensor(_place(sys._getframe(1), names), tensor))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return saved


_SOURCES = str(Path(fp8booster.__file__).parent)


def _place(frame: FrameType | None, names: dict[nn.Module, str]) -> str:
    """The innermost module on the stack, and the innermost function of ours that it called."""
    function = None
    while frame is not None:
        module = frame.f_locals.get("self")
        if function is None and frame.f_code.co_filename.startswith(_SOURCES):
            function = frame.f_code.co_name
        if isinstance(module, nn.Module) and module in names:
            function = frame.f_code.co_name if function is None else function
            return f"{names[module] or type(module).__name__}: {function}"
        frame = frame.f_back
    return function or "?"


def layer_of(hidden: int, features: int, heads: int) -> nn.Module:
    """A decoder layer of LLaMA in BF16, in training mode, in a model that has the rotary embedding."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=features,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        num_hidden_layers=1,
        vocab_size=32,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16().train()


def records_of(model: nn.Module, tokens: int) -> list[Record]:
    """A record for each storage that the model's layer saves and that grows with the tokens."""
    layer, hidden_size = model.model.layers[0], model.config.hidden_size
    found = []
    for batch in (1, 2):
        x = torch.randn(batch, tokens, hidden_size, dtype=torch.bfloat16, requires_grad=True)
        angles = model.model.rotary_emb(x, torch.arange(tokens)[None])
        layer(x, position_embeddings=angles)  # casts the weights
        found.append(saved_by(layer, lambda x=x, angles=angles: layer(x, position_embeddings=angles)))
    unit, records, seen = x.nbytes, [], set()
    for one, two in zip(*found, strict=True):
        if two.tensor.nbytes == one.tensor.nbytes:  # weights, angles, scales
            continue
        if two.storage.data_ptr() not in seen:
            records.append(
                {
                    "where": two.where,
                    "shape": list(two.tensor.shape),
                    "dtype": str(two.tensor.dtype).removeprefix("torch."),
                    "bytes": two.storage.nbytes(),
                    "units": two.storage.nbytes() / unit,
                }
            )
        seen.add(two.storage.data_ptr())
    return records


def times_of(
    sizes: tuple[int, int, int], tokens: int, device: torch.device, *, rounds: int, sample_ms: float
) -> list[Record]:
    """A record for each setting: forward and backward of the layer on 2 sequences, its FP8 weights cast before."""
    variants = []
    for setting, prepare in SETTINGS.items():
        model = layer_of(*sizes).to(device)
        prepare(model)
        variants.append(Variant(setting, _step_of(model, tokens, device)))
    timings = time_interleaved(variants, device=device, rounds=rounds, sample_ms=sample_ms)
    usual = timings[USUAL].ms
    return [
        {"setting": setting, "ms": timing.ms.as_record(), "over": timing.ms.over(usual).as_record()}
        for setting, timing in timings.items()
    ]


def _step_of(model: nn.Module, tokens: int, device: torch.device) -> Callable[[int], None]:
    layer = model.model.layers[0]
    x, dy = torch.randn(2, 2, tokens, model.config.hidden_size, dtype=torch.bfloat16, device=device)
    angles = model.model.rotary_emb(x, torch.arange(tokens, device=device)[None])

    def step(_: int) -> None:
        made = layer(x.requires_grad_(), position_embeddings=angles)
        (made if isinstance(made, torch.Tensor) else made[0]).backward(dy)
        x.grad = None
        layer.zero_grad()

    return step


def bf16(model: nn.Module) -> None:
    """As transformers has it."""


def bf16_fused(model: nn.Module) -> None:
    """Fused around products in BF16."""
    fuse_model(model)


def fp8(saved: str, recompute: str = "none") -> Callable[[nn.Module], None]:
    """Fused around products in FP8."""

    def prepare(model: nn.Module) -> None:
        convert_to_fp8(model, FP8Config(activations=Activations(saved=saved, recompute=recompute)))
        fuse_model(model)

    return prepare


TIMED, TIMED_TOKENS = (4096, 11008, 32), 4096
"""Hidden size, features and heads of LLaMA-7B, and tokens of a sequence."""

USUAL = 'FP8, saved_activations="16-bit"'
"""What times are compared with."""

SETTINGS: dict[str, Callable[[nn.Module], None]] = {
    "BF16": bf16,
    "BF16, fused": bf16_fused,
    USUAL: fp8("16-bit"),
    'FP8, recompute="activations"': fp8("16-bit", "activations"),
    'FP8, recompute="norms"': fp8("16-bit", "norms"),
    'FP8, recompute="both"': fp8("16-bit", "both"),
    'FP8, recompute="all"': fp8("16-bit", "all"),
    'FP8, saved_activations="8-bit"': fp8("8-bit"),
    'FP8, saved_activations="8-bit", recompute="norms"': fp8("8-bit", "norms"),
    'FP8, saved_activations="8-bit", recompute="all"': fp8("8-bit", "all"),
}


def rounded_to_e4m3(values: torch.Tensor, group: int) -> torch.Tensor:
    """E4M3 with a power of two for each group."""
    groups = _groups(values, group)
    scale = torch.exp2((448 / groups.abs().amax(2, keepdim=True).clamp(min=1e-30)).log2().floor())
    return ((groups * scale).to(E4M3).float() / scale).flatten(1)[:, : values.shape[1]]


def rounded_to_int8(values: torch.Tensor, group: int) -> torch.Tensor:
    """Even steps up to a group's amax."""
    groups = _groups(values, group)
    scale = 127 / groups.abs().amax(2, keepdim=True).clamp(min=1e-30)
    return ((groups * scale).round() / scale).flatten(1)[:, : values.shape[1]]


def _groups(values: torch.Tensor, group: int) -> torch.Tensor:
    return F.pad(values.float(), (0, -values.shape[1] % group)).unflatten(1, (-1, group))


CODES: dict[str, tuple[float, Callable[[torch.Tensor], torch.Tensor]]] = {
    "E4M3, groups of 16": (1 + 1 / 16, lambda values: rounded_to_e4m3(values, 16)),
    "E4M3, groups of 128": (1 + 1 / 128, lambda values: rounded_to_e4m3(values, 128)),
    "int8, groups of 128": (1 + 2 / 128, lambda values: rounded_to_int8(values, 128)),
    "roots in int8, groups of 128 (fp8booster)": (1 + 2 / 128, lambda values: decode_groups(encode_groups(values))),
}
"""Bytes for a value, and what the code makes of values, [M, K]."""


def activations_of(options: TrainOptions, tokens: TokenFile, device: torch.device) -> dict[str, torch.Tensor]:
    """Return the inputs of the layers' norms and SwiGLU after the options' steps, in BF16: [M, K], all layers side by
    side.
    """
    read: dict[str, list[torch.Tensor]] = {}

    def keep(kind: str, tensor: torch.Tensor) -> None:
        read.setdefault(kind, []).append(tensor.detach().flatten(0, 1).bfloat16())

    for step, _, model, _ in steps_in_fp32(options, tokens, device, options.steps):
        if step == options.steps - 1:  # the last is looked at
            for layer in model.model.layers:
                for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                    norm.register_forward_hook(lambda _, given, __: keep("norms' inputs", given[0]))
                for kind, module in (("gate", layer.mlp.gate_proj), ("up", layer.mlp.up_proj)):
                    module.register_forward_hook(lambda _, __, made, kind=kind: keep(kind, made))
    return {kind: torch.cat(parts, 1) for kind, parts in read.items()}


def drawn() -> dict[str, torch.Tensor]:
    """Normally distributed values, and with one channel in a hundred 100 times as large."""
    torch.manual_seed(0)
    values = torch.randn(1024, 2048)
    outliers = values.clone()
    outliers[:, ::100] *= 100
    return {"normal": values.bfloat16(), "1 % of channels 100 times as large": outliers.bfloat16()}


def errors_of(kind: str, values: torch.Tensor) -> list[Record]:
    """A record for each code: signal over noise of all values, and of the worst channel, in dB."""
    records = []
    for name, (size, code) in CODES.items():
        noise = (code(values).double() - values.double()).square()
        signal = values.double().square()
        by_channel = 10 * torch.log10(signal.sum(0) / noise.sum(0))
        records.append(
            {
                "values": kind,
                "code": name,
                "bytes": size,
                "snr": 10 * math.log10(signal.sum() / noise.sum()),
                "worst": by_channel.amin().item(),
            }
        )
    return records


TENSORS = (
    Column("saved by", lambda r: r["where"]),
    Column("shape", lambda r: " x ".join(map(str, r["shape"]))),
    Column("dtype", lambda r: r["dtype"]),
    Column("bytes", lambda r: f"{r['bytes']:,}"),
    Column("U", lambda r: f"{r['units']:.3f}"),
)
SUMS = (Column("setting", lambda r: r["setting"]), Column("U", lambda r: f"{r['units']:.2f}"))
TIMES = (
    Column("setting", lambda r: r["setting"]),
    Column("ms", lambda r: spread(r["ms"], 2)),
    Column(f"time over {USUAL}", lambda r: spread(r["over"], 3)),
)
ERRORS = (
    Column("values", lambda r: r["values"]),
    Column("code", lambda r: r["code"]),
    Column("bytes a value", lambda r: f"{r['bytes']:.3f}"),
    Column("all, dB", lambda r: f"{r['snr']:.1f}"),
    Column("worst channel, dB", lambda r: f"{r['worst']:.1f}"),
)


def main(
    hidden: Annotated[int, typer.Option(help="Of the layer whose bytes are counted.")] = 1024,
    features: Annotated[int, typer.Option(help="Of its feed-forward block.")] = 2752,
    heads: Annotated[int, typer.Option(help="Of its attention.")] = 8,
    tokens: Annotated[int, typer.Option(help="Of a sequence.")] = 256,
    steps: Annotated[
        int, typer.Option(min=0, help="Steps before activations are looked at; 0 leaves out what codes lose.")
    ] = 100,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each setting's time.")] = 15,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 100.0,
    quick: command.Quick = False,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
    device_name: Annotated[
        str, typer.Option("--device", help="cuda or cpu, of training and times; bytes are the CPU's.")
    ] = "cuda",
) -> None:
    """List what a layer saves for backward, and measure what codes lose of it."""
    device, gpu = command.measured_device(device_name)
    if quick:
        hidden, features, heads, tokens, steps, rounds = 128, 344, 1, 32, min(steps, 2), 1
    tables, sums = [], []
    for setting, prepare in SETTINGS.items():
        model = layer_of(hidden, features, heads)
        prepare(model)
        records = records_of(model, tokens)
        sums.append({"setting": setting, "units": sum(record["units"] for record in records)})
        tables.append(Table(setting, setting, TENSORS, records))
    head = environment.head(gpu, commit=commit) | {
        "layer": f"LLaMA's, hidden size {hidden}, {features} features, {heads} heads, 2 x {tokens} tokens"
    }
    tables.insert(0, Table("sums", "Saved by a layer", SUMS, sums, "U: the bytes of its hidden states in 16 bits."))
    if device.type == "cuda" or quick:
        timed, of_sequence = ((hidden, features, heads), tokens) if quick else (TIMED, TIMED_TOKENS)
        times = times_of(timed, of_sequence, device, rounds=rounds, sample_ms=0 if quick else sample_ms)
        note = (
            f"Hidden size {timed[0]}, {timed[1]} features, 2 x {of_sequence} tokens, forward and backward: median "
            "[10th-90th percentile] of the rounds, interleaved."
        )
        tables.insert(1, Table("times", "Time of a layer", TIMES, times, note))
    if steps:
        options = training_options("tiny", max(steps, 2), 1 if quick else 8, 32 if quick else 128)
        file = prepare_tokens(options, lambda text: typer.echo(text, err=True))
        head["activations"] = f"of the model tiny in FP32 after {options.steps} steps on {file.name}"
        errors = [
            record
            for kind, values in (activations_of(options, file, device) | drawn()).items()
            for record in errors_of(kind, values.cpu())
        ]
        tables.append(Table("codes", "What codes lose", ERRORS, errors, "Signal over noise."))
    result = Result("saved_activations", "What a decoder layer saves for backward", head, tables)
    command.deliver(result, folder=folder, json_file=json_file)


if __name__ == "__main__":
    command.run_command(main)
