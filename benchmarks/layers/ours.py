"""fp8booster's linear layer, in the ways in which one can call it."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.harness.timing import let_weights_stay
from benchmarks.layers.layer import Forward, Inputs, Layer
from fp8booster import FP8Config, FP8Linear, forget_weights
from fp8booster.nn.linear.functional import linear_from_quantized
from fp8booster.nn.weights.casting import Casts
from fp8booster.nn.weights.delivered import deliver_amax
from fp8booster.scaling import INPUT

CONFIG = FP8Config()
ROWWISE = FP8Config(scaling="rowwise")
BLOCKWISE = FP8Config(scaling="blockwise")


def _layer(weight: nn.Parameter, config: FP8Config = CONFIG) -> FP8Linear:
    outputs, inputs = weight.shape
    layer = FP8Linear(inputs, outputs, bias=False, device="meta", config=config)
    layer.weight = weight
    let_weights_stay([weight])
    return layer


def cached(weight: nn.Parameter) -> Forward:
    """As a training loop calls it; the weight does not change, so its FP8 copy stays."""
    layer = _layer(weight)
    return lambda x, inputs: layer(x)


def rowwise(weight: nn.Parameter) -> Forward:
    """`cached` with a scale for each row."""
    layer = _layer(weight, ROWWISE)
    return lambda x, inputs: layer(x)


def blockwise(weight: nn.Parameter) -> Forward:
    """`cached` with a scale for each 128 values of x and dy, and for each block of 128 x 128 of w."""
    layer = _layer(weight, BLOCKWISE)
    return lambda x, inputs: layer(x)


def cast_each_step(weight: nn.Parameter) -> Forward:
    """The weight is cast at each step, as after an optimizer's."""
    layer = _layer(weight)

    def forward(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        forget_weights(layer)
        return layer(x)

    return forward


def amax_delivered(weight: nn.Parameter) -> Forward:
    """The producers of x and of dy deliver their amax."""
    w = Casts(CONFIG).quantize_weight(weight, transposed=True)

    def forward(x: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        x8 = Casts(CONFIG).quantize(INPUT, x, transposed=True, amax=inputs.x_amax)
        deliver_amax(inputs.dy, inputs.dy_amax)
        return linear_from_quantized(x, weight, None, x8, w, Casts(CONFIG))

    return forward


def compiled(weight: nn.Parameter) -> Forward:
    """Under torch.compile, given the cached FP8 weight: what `cached` computes."""
    w = Casts(CONFIG).quantize_weight(weight, transposed=True)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x8 = Casts(CONFIG).quantize(INPUT, x, transposed=True)
        return linear_from_quantized(x, weight, None, x8, w, Casts(CONFIG))

    compiled_forward = torch.compile(forward, dynamic=False, fullgraph=True)
    return lambda x, inputs: compiled_forward(x)


OURS = {
    "fp8booster": Layer("fp8booster", cached),
    "fp8booster-amax": Layer("fp8booster, amax delivered", amax_delivered, x_amax_given=True, dy_amax_given=True),
    "fp8booster-compiled": Layer("fp8booster, compiled", compiled),
    "fp8booster-rowwise": Layer("fp8booster, rowwise", rowwise),
    "fp8booster-blockwise": Layer("fp8booster, blockwise", blockwise),
    "fp8booster-cold": Layer("fp8booster, weight cast each step", cast_each_step),
}
