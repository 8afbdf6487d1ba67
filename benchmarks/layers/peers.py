"""The layers that fp8booster's are compared with."""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import nn

from benchmarks.layers.layer import Forward, Inputs, Layer


def _needs(package: str) -> Callable[[], str | None]:
    return lambda: None if find_spec(package) else f"{package} is not installed"


def _linear(weight: nn.Parameter) -> nn.Linear:
    outputs, inputs = weight.shape
    layer = nn.Linear(inputs, outputs, bias=False, device="meta")
    layer.weight = weight
    return layer


def bf16(weight: nn.Parameter) -> Forward:
    """`nn.Linear`."""
    layer = _linear(weight)
    return lambda x, inputs: layer(x)


def bf16_compiled(weight: nn.Parameter) -> Forward:
    """`nn.Linear` under torch.compile."""
    layer = torch.compile(_linear(weight), dynamic=False)
    return lambda x, inputs: layer(x)


def torchao(weight: nn.Parameter) -> Forward:
    """The tensorwise layer of torchao under torch.compile, as it is meant to run; it casts the weight each step."""
    from torchao.float8 import Float8LinearConfig
    from torchao.float8.float8_linear import Float8Linear

    layer = torch.compile(Float8Linear.from_float(_linear(weight), config=Float8LinearConfig()), dynamic=False)
    return lambda x, inputs: layer(x)


def colossalai(weight: nn.Parameter) -> Forward:
    """Colossal-AI's native FP8 linear function, repaired; it casts the weight each step.

    Native compiles it with max-autotune, where inductor then fails on the scales' shape: here it is compiled with
    inductor's defaults.
    """
    fp8 = repaired_native_fp8()
    layer = torch.compile(lambda x: fp8._LinearFp8.apply(x, weight, None), dynamic=False)
    return lambda x, inputs: layer(x)


def repaired_native_fp8() -> types.ModuleType:
    """`colossalai.quantization.fp8`, whose product takes the first element of what `torch._scaled_mm` gives.

    That was a pair until torch 2.5 (quantization/fp8.py:801-838).
    """
    import fp8booster.colossal  # noqa: F401  isort: skip  (patches what keeps colossalai from being imported)
    from colossalai.quantization import fp8

    if fp8.torch is torch:
        fp8.torch = _torch_before_2_5()
    return fp8


def _torch_before_2_5() -> types.ModuleType:
    """torch, with a `_scaled_mm` that gives a tuple."""
    former = types.ModuleType("torch")
    former.__dict__.update(torch.__dict__)
    former._scaled_mm = lambda *operands, **options: (torch._scaled_mm(*operands, **options),)
    return former


def transformer_engine(weight: nn.Parameter) -> Forward:
    """Transformer Engine's Linear with current scaling, its FP8 weight cached after the first step."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import Float8CurrentScaling

    outputs, inputs = weight.shape
    layer = te.Linear(inputs, outputs, bias=False, params_dtype=weight.dtype, device=weight.device)
    layer.weight = weight
    recipe = Float8CurrentScaling()
    first = True

    def forward(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        nonlocal first
        with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
            y = layer(x, is_first_microbatch=first)
        first = False
        return y

    return forward


BASELINE = "bf16"
PEERS = {
    BASELINE: Layer("BF16", bf16),
    "bf16-compiled": Layer("BF16, compiled", bf16_compiled, is_peer=True),
    "torchao": Layer("torchao, compiled", torchao, _needs("torchao"), is_peer=True),
    "colossalai": Layer("Colossal-AI repaired, compiled", colossalai, _needs("colossalai"), is_peer=True),
    "te": Layer("Transformer Engine", transformer_engine, _needs("transformer_engine"), is_peer=True),
}
