"""What is taken for a known activation, norm or feed-forward block, and what must not be."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2CLS, ACT2FN
from transformers.models.llama import modeling_llama

from fp8booster import fuse
from fp8booster.kernels import activation as kernel
from fp8booster.nn.fused import trials
from fp8booster.nn.fused.activations import activation_kind
from fp8booster.nn.fused.attention_form import Form, is_of_form
from fp8booster.nn.fused.families import PARTS
from fp8booster.nn.fused.trials import gates_by_activation, is_gated, norm_of
from tests.nn.fused.models import build
from tests.nn.fused.test_decoder import step

KNOWN = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}
"""What is known of transformers' activations."""


class Swish(nn.Module):
    def __init__(self, beta: float) -> None:
        super().__init__()
        self.beta = beta

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(self.beta * x)


class OwnSiLU(nn.SiLU):
    """One by name and class, which computes something else in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(x) * (1.5 if self.training else 1.0)


class Learned(Swish):
    def __init__(self) -> None:
        super().__init__(1.0)
        del self.beta
        self.beta = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize("name", ACT2CLS)
def test_an_activation_that_is_known_computes_what_the_kernel_does(name: str) -> None:
    activation = ACT2FN[name]
    kind = activation_kind(activation)
    assert kind == KNOWN.get(name)
    if kind is not None:
        assert not list(activation.parameters())
        x = torch.cat([scale * torch.randn(9, 16) for scale in (0.0, 1e-6, 1.0, 10.0, 1e4, 1e15)])
        for mode in (True, False):
            activation.train(mode)
            torch.testing.assert_close(kernel.activate.reference(x, kind=kind).y, activation(x), rtol=1e-5, atol=1e-6)


def test_no_activation_is_taken_for_another() -> None:
    for activation in (Swish(1.0), Swish(3.0), Learned(), OwnSiLU(), nn.Hardswish(), nn.Mish(), nn.Softplus()):
        assert activation_kind(activation) is None
    changed = nn.GELU()
    assert activation_kind(changed) == "gelu"
    changed.approximate = "tanh"
    assert activation_kind(changed) == "gelu_tanh"
    of_transformers = ACT2FN["gelu"]
    of_transformers.act = torch.relu
    assert activation_kind(of_transformers) is None
    of_transformers.act = functools.partial(F.gelu, approximate="tanh")
    assert activation_kind(of_transformers) == "gelu_tanh"


def test_a_forward_replaced_in_a_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert activation_kind(nn.SiLU()) == "silu"
    assert norm_of(modeling_llama.LlamaRMSNorm) is not None
    assert is_gated(modeling_llama.LlamaMLP, GATED)
    for cls in (nn.SiLU, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP):
        monkeypatch.setattr(cls, "forward", lambda self, x: x)
    assert activation_kind(nn.SiLU()) is None
    assert norm_of(modeling_llama.LlamaRMSNorm) is None
    assert not is_gated(modeling_llama.LlamaMLP, GATED)


GATED = PARTS[5]


def with_activation(make: Callable[[], nn.Module]) -> nn.Module:
    model = build(dtype=torch.float32)
    for layer in model.model.layers:
        layer.mlp.act_fn = make()
    return model


@pytest.mark.parametrize(
    "make",
    [lambda: ACT2FN["gelu_10"], lambda: Swish(3.0), Learned, OwnSiLU],
    ids=["gelu_10", "Swish", "Learned", "own"],
)
def test_gradients_of_an_activation_that_is_like_another_are_its_own(make: Callable[[], nn.Module]) -> None:
    fuse(with_activation(lambda: Swish(1.0)))  # what was seen of the same class before
    exact = with_activation(make)
    for layer in exact.model.layers:
        layer.mlp.gate_proj.weight.data *= 200  # so that some gates are beyond 10
    model = copy.deepcopy(exact)
    name = type(exact.model.layers[0].mlp.act_fn).__name__
    assert f"2 not: MLP: its activation is {name}" in fuse(model)
    (right, expected), (loss, gradients) = map(step, (exact, model))
    assert loss == pytest.approx(right, rel=1e-6)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


class Norms:
    """Norms that are like LLaMA's for some numbers, or in one mode."""

    class Clamped(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.clamp(-100, 100))

    class FloorOfEpsilon(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x * (x.square().mean(-1, keepdim=True) + max(self.variance_epsilon, 1e-5)).rsqrt()

    class EpsilonOutside(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.variance_epsilon)

    class InTraining(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.01 if self.training else 1.0)

    class Gained(modeling_llama.LlamaRMSNorm):
        gain = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.gain

    class Long(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if x.shape[1] > 64 else 1)

    class Biased(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + self.bias

    class Optional(modeling_llama.LlamaRMSNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self, "gain", 1.0)


class Blocks:
    """Feed-forward blocks that are like LLaMA's for some numbers, or in one mode."""

    class Clamped(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=7)) * self.up_proj(x))

    class Dropping(modeling_llama.LlamaMLP):
        p = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(x), self.p, self.training)

    class Scaled(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1.5 if self.training else 1.0)

    class OwnActivation(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    class Long(modeling_llama.LlamaMLP):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (2 if x.shape[1] > 64 else 1)


class Attention(modeling_llama.LlamaAttention):
    """With a forward that a trial can call."""

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> tuple:
        kwargs |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        output, *others = super().forward(hidden_states, **kwargs)
        return (self.changed(output), *others)

    def changed(self, output: torch.Tensor) -> torch.Tensor:
        return output


class Attentions:
    """Attentions that are like LLaMA's for some numbers, or in one mode."""

    class InTraining(Attention):
        def changed(self, output: torch.Tensor) -> torch.Tensor:
            return output * (1.01 if self.training else 1.0)

    class Clamped(Attention):
        def changed(self, output: torch.Tensor) -> torch.Tensor:
            return output.clamp(-6, 6)

    class Long(Attention):
        def changed(self, output: torch.Tensor) -> torch.Tensor:
            return output * (2 if output.shape[1] > 32 else 1)


def members(of: type) -> list[type[nn.Module]]:
    return [each for each in vars(of).values() if isinstance(each, type)]


@pytest.mark.parametrize("cls", members(Norms))
def test_a_norm_that_is_like_another_is_not_taken_for_it(cls: type[nn.Module]) -> None:
    assert norm_of(cls) is None


@pytest.mark.parametrize("cls", members(Blocks))
def test_a_block_that_is_like_another_is_not_taken_for_it(cls: type[nn.Module]) -> None:
    assert not is_gated(cls, GATED)


@pytest.mark.parametrize("cls", [Attention, *members(Attentions)])
def test_an_attention_that_is_like_another_is_not_taken_for_it(
    cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cls, "__module__", modeling_llama.__name__)
    model = build(dtype=torch.float32)
    model.model.layers[0].self_attn.__class__ = cls
    why = f"1 not: attention but for its one product: {cls.__name__} has no fused form"
    assert (why in fuse(model)) == (cls is not Attention)


def test_a_method_of_a_norm_that_it_calls_is_looked_into() -> None:
    class Split(nn.Module):
        def normal(self, x: torch.Tensor) -> torch.Tensor:
            return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.normal(x) * (1 + self.weight)

    assert norm_of(Split) == trials.Norm(False, True, "eps")

    class Other(Split):
        def normal(self, x: torch.Tensor) -> torch.Tensor:
            return super().normal(x) * (1.0 - 0.0 * self.training)

    assert norm_of(Other) is None


def test_a_bias_that_a_norm_does_not_add_is_not_added() -> None:
    class Centered(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.layer_norm(x, self.weight.shape, self.weight, None, self.eps)

    assert norm_of(Centered) == trials.Norm(True, False, "eps")
    assert norm_of(nn.LayerNorm) == trials.Norm(True, False, "eps", biased=True)


def test_a_gate_of_experts_is_one_of_their_activation() -> None:
    class Experts(nn.Module):
        limit = 7.0

        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate) * up

    class Clamped(Experts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return super()._apply_gate(gate_up.clamp(-self.limit, self.limit))

    class Fixed(Experts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return self.act_fn(gate.clamp(max=10.0)) * up

    class Interleaved(Experts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            return self.act_fn(gate_up[:, ::2]) * gate_up[:, 1::2]

    class Own(Experts):
        def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
            gate, up = gate_up.chunk(2, dim=-1)
            return F.silu(gate) * up

    assert gates_by_activation(Experts)
    assert not any(map(gates_by_activation, (Clamped, Fixed, Interleaved, Own, nn.Module)))


@pytest.mark.parametrize("place", ["of itself", "of its configuration"])
def test_a_form_hangs_on_attributes_of_an_attention_and_of_its_configuration(place: str) -> None:
    attention = build("llama", torch.float32).model.layers[0].self_attn
    holder, known = attention if place == "of itself" else attention.config, {"noted": 1}
    form = Form(hangs_on=(known, {}) if holder is attention else ({}, known))
    assert not is_of_form(attention, form)
    holder.noted = 1
    assert is_of_form(attention, form)
    holder.noted = 2
    assert not is_of_form(attention, form)
