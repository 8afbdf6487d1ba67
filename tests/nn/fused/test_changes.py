"""Fused models that are changed afterwards, or used by several threads: they compute what transformers' would."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama import modeling_llama

from fp8booster import FP8Config, convert_to_fp8, fuse, report
from fp8booster.config import Activations
from fp8booster.nn.fused import fused_summary
from tests.nn.fused.models import INSTALLED, batch, build
from tests.nn.fused.test_decoder import step

Change = Callable[[nn.Module], Any]


def of_layers(change: Change) -> Change:
    def change_all(model: nn.Module) -> None:
        for layer in model.model.layers:
            change(layer)

    return change_all


def assert_computes_the_same(model: nn.Module, exact: nn.Module) -> None:
    """In training, losses and gradients; in evaluation, logits."""
    (right, expected), (loss, gradients) = (step(each.train()) for each in (exact, model))
    assert loss == pytest.approx(right, rel=1e-6)
    for name, gradient in expected.items():
        assert (gradients[name] - gradient).norm() <= 1e-5 * gradient.norm(), name
    found, logits = (each.eval()(input_ids=batch()).logits for each in (model, exact))
    torch.testing.assert_close(found, logits, rtol=1e-4, atol=1e-4)


def wrapped(forward: Callable) -> Callable:
    """As accelerate does it: a forward of an instance's own that calls the one before."""
    return lambda *args, **kwargs: 2 * forward(*args, **kwargs)


def wrap(*path: str) -> Change:
    def change(layer: nn.Module) -> None:
        module = layer.get_submodule(".".join(path))
        module.forward = wrapped(module.forward)

    return change


class Half(modeling_llama.LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states) / 2


def derive(norm: nn.Module) -> None:
    """Give a norm a class derived from the one that it has now."""
    now: Any = type(norm)
    norm.__class__ = type("Derived", (now,), {"forward": lambda self, x: now.forward(self, x) / 2})


CHANGES: dict[str, Change] = {
    "another activation": lambda layer: setattr(layer.mlp, "act_fn", nn.ReLU(inplace=True)),
    "another that has a kernel": lambda layer: setattr(layer.mlp, "act_fn", ACT2FN["gelu"]),
    "an activation with a parameter": lambda layer: setattr(layer.mlp, "act_fn", nn.PReLU(init=0.5)),
    "another norm": lambda layer: setattr(layer, "input_layernorm", Half(64)),
    "a derived norm": lambda layer: derive(layer.input_layernorm),
    "a derived second norm": lambda layer: derive(layer.post_attention_layernorm),
    "epsilon": lambda layer: setattr(layer.post_attention_layernorm, "variance_epsilon", 0.5),
    "another output projection": lambda layer: setattr(layer.self_attn, "o_proj", deterministic(64, 64)),
    "another gate": lambda layer: setattr(layer.mlp, "gate_proj", deterministic(64, 96)),
    "scaling": lambda layer: setattr(layer.self_attn, "scaling", 1.5),
    "wrapped norm": wrap("input_layernorm"),
    "wrapped second norm": wrap("post_attention_layernorm"),
    "wrapped activation": wrap("mlp", "act_fn"),
    "wrapped gate": wrap("mlp", "gate_proj"),
    "wrapped query": wrap("self_attn", "q_proj"),
    "wrapped output": wrap("mlp", "down_proj"),
    "wrapped block": wrap("mlp"),
}


def deterministic(inputs: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-0.1, 0.1, outputs * inputs).sin().view(outputs, inputs))
    return layer


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_changed_after_fusing_counts_in_training_and_evaluation(change: str) -> None:
    exact = build(dtype=torch.float32, initializer_range=0.2)
    model = copy.deepcopy(exact)
    fuse(model)
    before, _ = step(model)
    for each in (exact, model):
        of_layers(CHANGES[change])(each)
    assert_computes_the_same(model, exact)
    assert step(model.train())[0] != pytest.approx(before, rel=1e-6)


@pytest.mark.parametrize(
    ("family", "name"), [("gemma2", "act_fn"), ("phi3", "activation_fn"), ("gpt_neox", "act"), ("gpt2", "act")]
)
def test_an_activation_of_any_block_may_be_replaced_and_put_back(family: str, name: str) -> None:
    exact = build(family, torch.float32, initializer_range=0.2)
    model = copy.deepcopy(exact)
    fuse(model)
    summary = fused_summary(model)
    for each in (exact, model):
        for block in [module for module in each.modules() if name in module._modules]:
            setattr(block, name, nn.Tanh())
    assert_computes_the_same(model, exact)
    assert "2 not: MLP: its activation is Tanh now" in fused_summary(model)
    for block in [module for module in model.modules() if name in module._modules]:
        setattr(block, name, ACT2FN["gelu_new"])
    assert fused_summary(model) == summary


def test_the_report_counts_activations_that_run() -> None:
    model = convert_to_fp8(build(), FP8Config(emulate=True, activations=Activations(saved="8-bit")))
    fuse(model)
    assert report(model).saved_in_8_bits == ("4 norms", "2 SwiGLUs")
    layer = model.model.layers[0]
    layer.mlp.act_fn = nn.ReLU()
    layer.input_layernorm.forward = wrapped(layer.input_layernorm.forward)
    assert report(model).saved_in_8_bits == ("3 norms", "1 SwiGLU")
    assert report(model).changed == (("MLP: its activation is ReLU now", 1),)
    assert ", 1 part fused no longer (MLP: its activation is ReLU now)" in report(model).summary()


@pytest.mark.parametrize("cls", [modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm, modeling_llama.LlamaAttention])
def test_a_forward_replaced_in_a_class_runs(cls: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    exact = build(dtype=torch.float32)
    model = copy.deepcopy(exact)
    fuse(model)
    assert_computes_the_same(model, exact)
    native = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        made = native(self, *args, **kwargs)
        return (made[0] * 1.5, *made[1:]) if isinstance(made, tuple) else made * 1.5

    monkeypatch.setattr(cls, "forward", forward)
    assert_computes_the_same(model, exact)
    assert "the forward of its class was replaced" in fused_summary(model)


def test_a_forward_replaced_in_the_class_of_a_model_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(dtype=torch.float32)
    fuse(model)
    native, seen = modeling_llama.LlamaForCausalLM.forward, []

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        seen.append(self)
        return native(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", forward)
    assert model(input_ids=batch(), labels=batch()).logits is not None
    assert seen == [model]


class Tempered(modeling_llama.LlamaAttention):
    """An attention with attributes that no other has: one that its forward reads alone."""

    temperature = None

    def forward(
        self, hidden_states: torch.Tensor, position_embeddings: Any, attention_mask: Any = None, **kwargs: Any
    ) -> Any:
        kwargs |= {"position_embeddings": position_embeddings, "attention_mask": attention_mask}
        output, *others = super().forward(hidden_states, **kwargs)
        return (output if self.temperature == 1.0 else output * self.temperature, *others)


Tempered.__module__ = modeling_llama.__name__


def test_an_attribute_that_an_attention_alone_reads_counts() -> None:
    exact = build(dtype=torch.float32)
    for layer in exact.model.layers:
        layer.self_attn.__class__ = Tempered
        layer.self_attn.temperature = 1.0
    model = copy.deepcopy(exact)
    assert " not: " not in fuse(model)
    for temperature in (3.0, 2.0, 1.0):
        for each in (exact, model):
            for layer in each.model.layers:
                layer.self_attn.temperature = temperature
        assert_computes_the_same(model, exact)
        why = "attention: its attributes have changed, and it computes something else now"
        assert report(model).changed == (() if temperature == 1.0 else ((why, 2),))


def test_a_norm_of_heads_may_be_replaced() -> None:
    exact = build("qwen3", torch.float32)
    model = copy.deepcopy(exact)
    fuse(model)
    for each in (exact, model):
        for layer in each.model.layers:
            layer.self_attn.q_norm = Half(16)
    assert_computes_the_same(model, exact)
    assert report(model).changed == (("attention: a norm of its heads was replaced by one that has no fused form", 2),)


@pytest.mark.parametrize("name", ["input_layernorm", "self_attn.q_layernorm"])
def test_a_layer_norm_may_lose_its_weight(name: str) -> None:
    exact = build("stablelm", torch.float32, qk_layernorm=name != "input_layernorm")
    model = copy.deepcopy(exact)
    fuse(model)
    for each in (exact, model):
        for layer in each.model.layers:
            for norm in layer.get_submodule(name).modules():
                if isinstance(norm, nn.LayerNorm):
                    norm.weight = norm.bias = None
    assert_computes_the_same(model, exact)


LLAMA_4: dict[str, Change] = {
    "scaled angles": lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
    "a hook on a norm": lambda model: [
        layer.self_attn.qk_norm.register_forward_pre_hook(lambda _, args: (args[0] + 0.5,))
        for layer in model.model.layers
        if hasattr(layer.self_attn, "qk_norm")
    ],
}


@pytest.mark.parametrize("change", LLAMA_4)
def test_heads_that_are_normed_behind_the_rotation_stay_so(change: str) -> None:
    exact = build("llama4_text", torch.float32, initializer_range=0.2)
    model = copy.deepcopy(exact)
    assert " not: " not in fuse(model)
    for each in (exact, model):
        LLAMA_4[change](each)
    assert_computes_the_same(model, exact)
    assert report(model).changed == ()


@pytest.mark.skipif("gpt_oss" not in INSTALLED, reason="transformers 5 has it")
@pytest.mark.parametrize(("name", "value"), [("is_causal", False), ("sliding_window", 4)])
def test_an_attention_with_sinks_whose_attributes_change_is_given_a_mask(name: str, value: object) -> None:
    exact = build("gpt_oss", torch.float32, initializer_range=0.2)
    model = copy.deepcopy(exact)
    fuse(model)
    for each in (exact, model):
        for layer in each.model.layers:
            setattr(layer.self_attn, name, value)
    assert_computes_the_same(model, exact)


@pytest.mark.parametrize("replace", ["attention", "layer", "layers"])
def test_packed_batches_are_refused_once_an_attention_is_replaced(replace: str) -> None:
    exact = build(dtype=torch.float32)
    model = copy.deepcopy(exact)
    fuse(model)
    packed = {"input_ids": batch()[:1], "position_ids": torch.arange(32)[None] % 16}
    for each in (model, copy.deepcopy(model)):
        each(**packed)
        plain = copy.deepcopy(exact).model.layers
        if replace == "attention":
            each.model.layers[1].self_attn = plain[1].self_attn
        elif replace == "layer":
            each.model.layers[1] = plain[1]
        else:
            each.model.layers = plain
        with pytest.raises(ValueError, match="some attention of the model is not fused"):
            each(**packed)


@pytest.mark.parametrize("config", [None, FP8Config(emulate=True, always=True)], ids=["FP32", "FP8"])
def test_threads_share_a_fused_model(config: FP8Config | None) -> None:
    model = build(dtype=torch.float32)
    if config is not None:
        convert_to_fp8(model, config)
    fuse(model)
    fit = Barrier(4)

    def run(seed: int) -> torch.Tensor:
        ids = torch.randint(128, (1, 24), generator=torch.Generator().manual_seed(seed))
        fit.wait(timeout=60)
        outputs = [model(input_ids=ids, labels=ids).loss for _ in range(10)]
        assert all(torch.equal(each, outputs[0]) for each in outputs)
        return outputs[0].detach()

    for mode in (True, False):
        model.train(mode)
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(run, range(4)))
        fit = Barrier(1)
        assert [run(seed) for seed in range(4)] == found
        fit = Barrier(4)


def test_threads_with_packed_and_plain_batches_do_not_mix() -> None:
    model = build(dtype=torch.float32)
    fuse(model)
    rotary, places = model.model.rotary_emb, Barrier(2)
    of_packed = {"input_ids": batch()[:1], "position_ids": torch.arange(32)[None] % 16}
    plain = {"input_ids": batch()[:1]}
    right = [model(**each).logits for each in (of_packed, plain)]

    def meet(*_: Any) -> None:
        places.wait(timeout=60)

    # both threads are between what tells the model of its batch and what its layers are told
    handle = rotary.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda each: model(**each).logits, (of_packed, plain)))
    handle.remove()
    for logits, expected in zip(found, right, strict=True):
        torch.testing.assert_close(logits, expected)
