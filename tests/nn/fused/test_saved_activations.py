"""`FP8Config.saved_activations`: the forward's bits, gradients as close to exact ones, and what is saved."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from benchmarks.saved_activations import SETTINGS, layer_of, records_of
from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.config import Activations
from fp8booster.kernels import activation, row_norm
from fp8booster.nn.fused import fuse_blocks
from fp8booster.nn.linear.layer import FP8Layer
from fp8booster.nn.weights.delivered import Recipe, deliver_recipe, delivered_recipe
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks
from tests.nn.fused.models import FAMILIES, batch, build
from tests.nn.fused.test_decoder import fused, sqnr, step
from tests.plugins.training import boost

IN_16, IN_8 = (FP8Config(activations=Activations(saved=kind)) for kind in ("16-bit", "8-bit"))
LOST_DB = 1.0
"""Of the signal over noise of a parameter's gradient, compared with exact ones: at most. FP8 leaves 18 dB and more."""

SIZES = {"hidden_size": 128, "intermediate_size": 344}


def pair(**changes: object) -> tuple[nn.Module, nn.Module]:
    """One model, saving in 16 bits and in 8."""
    return fused(build(**SIZES | changes), IN_16), fused(build(**SIZES | changes), IN_8)


def test_a_layer_of_llama_saves_9_3_units_in_place_of_14_2() -> None:
    found = {}
    for name in ('FP8, saved_activations="16-bit"', 'FP8, saved_activations="8-bit"'):
        model = layer_of(1024, 2752, 8)
        SETTINGS[name](model)
        found[name] = sum(record["units"] for record in records_of(model, 32))
    assert list(found.values()) == [pytest.approx(14.24, abs=0.02), pytest.approx(9.27, abs=0.02)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_forward_is_the_same_and_gradients_as_close_to_exact_ones(family: str) -> None:
    exact = build(family, torch.float32, **SIZES)
    (_, right), (loss, gradients), (again, of_8_bits) = map(
        step, (exact, *(fused(copy.deepcopy(exact), config) for config in (IN_16, IN_8)))
    )
    assert again == loss
    for name, gradient in right.items():
        if not name.endswith("k_proj.bias"):  # of which attention takes no notice: noise
            assert sqnr(of_8_bits[name], gradient) > sqnr(gradients[name], gradient) - LOST_DB, name
    assert any(not torch.equal(of_8_bits[name], gradients[name]) for name in gradients)


def test_the_last_layer_errs_by_what_was_saved() -> None:
    """What its gradients are made of has not been rounded to FP8 another way before."""
    (_, right), (_, found) = map(step, pair())
    for part in ("mlp.down_proj", "mlp.up_proj", "post_attention_layernorm"):
        name = f"model.layers.1.{part}.weight"
        assert sqnr(found[name], right[name]) > 27, name


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_bf16_models_lose_as_little_under_both_kinds_of_scales(granularity: str) -> None:
    exact = step(build(dtype=torch.float32, **SIZES))[1]
    (loss, gradients), (again, found) = (
        step(fused(build(**SIZES), FP8Config(scaling=granularity, activations=Activations(saved=saved))))
        for saved in ("16-bit", "8-bit")
    )
    assert again == loss
    for name, gradient in exact.items():
        assert sqnr(found[name], gradient) > sqnr(gradients[name], gradient) - LOST_DB, name


def test_checkpointed_layers_and_a_second_backward_give_the_same_gradients() -> None:
    _, model = pair()
    _, right = step(model)
    loss = model(input_ids=batch(), labels=batch()).loss
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert all(torch.equal(parameter.grad, right[name]) for name, parameter in model.named_parameters())
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        _, again = step(model)
        assert all(torch.equal(again[name], gradient) for name, gradient in right.items()), reentrant


def test_nothing_is_encoded_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair()
    for module in (row_norm, activation):
        monkeypatch.setattr(module, "encode_groups", lambda _: pytest.fail("encoded"))
    with torch.no_grad():
        model(input_ids=batch())
    model.eval()
    with torch.inference_mode():
        model(input_ids=batch())


def test_frozen_parts_train_the_others_alike() -> None:
    _, model = pair()
    _, right = step(model)
    model.model.layers[1].mlp.down_proj.weight.requires_grad_(False)
    _, found = step(model)
    assert found.pop("model.layers.1.mlp.down_proj.weight") is None
    assert all(torch.equal(found[name], right[name]) for name in found)


def test_weight_gradients_that_are_computed_later_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    _, model = pair()
    _, right = step(model)
    later = []
    downs = [layer.mlp.down_proj for layer in model.model.layers]
    monkeypatch.setattr(FP8Layer, "fp8_defer", lambda layer: later.append if layer in downs else None)
    _, found = step(model)
    assert all(found[f"model.layers.{number}.mlp.down_proj.weight"] is None for number in range(2))
    assert [
        torch.equal(wgrad(), right[f"model.layers.{number}.mlp.down_proj.weight"])
        for number, wgrad in zip((1, 0), later, strict=True)
    ] == [True, True]


def test_compiled_code_computes_the_same_loss() -> None:
    losses = []
    for model in pair():
        loss = torch.compile(model, backend="aot_eager")(input_ids=batch(), labels=batch()).loss
        loss.backward()
        losses.append(loss.item())
        assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert losses[0] == losses[1]


def test_a_hook_on_down_that_changes_its_input_is_what_its_gradient_is_of() -> None:
    gradients = []
    for model in pair():
        model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, given: (given[0].mul_(0),))
        gradients.append(step(model)[1]["model.layers.0.mlp.down_proj.weight"])
    assert all((gradient == 0).all() for gradient in gradients)


def test_a_recipe_is_not_that_of_a_tensor_changed_since() -> None:
    tensor, recipe = torch.ones(3), Recipe(lambda x: (x, x), (torch.ones(3),))
    assert delivered_recipe(deliver_recipe(tensor, recipe)) is recipe
    assert delivered_recipe(tensor + 0) is None
    tensor.add_(1)
    assert delivered_recipe(tensor) is None


def test_losses_follow_those_of_16_bits() -> None:
    curves = []
    for model in pair():
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        curves.append([])
        for _ in range(30):
            curves[-1].append(step(model)[0])
            optimizer.step()
    assert curves[0][0] == curves[1][0]
    assert curves[0][-1] < 0.5 * curves[0][0]
    assert curves[1][-1] == pytest.approx(curves[0][-1], rel=0.05, abs=0.02)


def test_the_report_says_what_is_saved_in_8_bits_and_its_error() -> None:
    in_16, in_8 = pair()
    said = ", inputs of 4 norms and 2 SwiGLUs saved in 8 bits (an error of 0.7 %)"
    assert "saved in 8 bits" not in report(in_16).summary()
    assert said in report(in_8).summary()
    in_8.model.layers[0].input_layernorm.register_forward_hook(lambda *_: None)
    in_8.model.layers[1].mlp.up_proj.register_forward_hook(lambda *_: None)
    assert "inputs of 3 norms and 1 SwiGLU saved" in report(in_8).summary()
    unfused = convert_to_fp8(build(), IN_8)
    assert report(unfused).saved_in_8_bits == ()
    fuse_blocks(unfused)
    assert report(unfused).saved_in_8_bits == ("4 norms", "2 SwiGLUs")


PLUGINS = {
    "LowLevelZeroPlugin": {"stage": 1, "precision": "bf16"},
    "TorchDDPPlugin": {},
    "TorchFSDPPlugin": {},
    "GeminiPlugin": {"precision": "bf16"},
    "HybridParallelPlugin": {"tp_size": 2, "pp_size": 1, "precision": "bf16"},
}
"""And their arguments."""


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins_train_alike_from_the_same_first_loss(plugin: str) -> None:
    import fp8booster.plugins

    losses, said = [], []
    for saved in ("16-bit", "8-bit"):
        config = FP8Config(activations=Activations(saved=saved), emulate=True)
        made = getattr(fp8booster.plugins, plugin)(use_fp8=True, fp8_config=config, **PLUGINS[plugin])
        boosted = boost(made, tiny_llama().bfloat16())
        losses.append([boosted.step(token_batch(seed=number))[0] for number in range(4)])
        said.append(report(boosted.model.unwrap()).saved_in_8_bits)
    assert said == [(), ("4 norms", "2 SwiGLUs")]
    assert losses[0][0] == losses[1][0]
    assert losses[1] == pytest.approx(losses[0], rel=5e-3)
