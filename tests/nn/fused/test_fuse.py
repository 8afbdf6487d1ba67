"""`fuse` of models that compute in the precision that they have."""

from __future__ import annotations

import copy
import inspect
import io
from collections import Counter
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, convert_to_fp8, fuse, report
from fp8booster.nn.fused import fused_summary
from fp8booster.nn.fused.decoder import unfused_parts
from fp8booster.nn.fused.merged_layers import merged_linears
from fp8booster.nn.fused.pointwise import row_norm
from fp8booster.nn.quantize import freeze
from tests.nn.fused.models import FAMILIES, batch, build
from tests.nn.fused.test_decoder import sqnr, step
from tests.nn.reference import products_kept
from tests.plugins.test_low_level_zero_census import Census, products

WHOLE = "2 decoder layers fused, loss over chunks of logits"


def apart(reason: str) -> str:
    return f"2 decoder layers fused (4 groups of layers not merged: {reason}), loss over chunks of logits"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_has_the_gradients_of_the_model(family: str) -> None:
    exact = build(family, torch.float32)
    model = copy.deepcopy(exact)
    state = copy.deepcopy(model.state_dict())
    assert fuse(model) == WHOLE
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5) for each in (model, exact)]
    losses = []
    for _ in range(2):  # the second sees what the optimizer wrote over the first's weights
        (loss, gradients), (right, right_gradients) = map(step, (model, exact))
        assert loss == pytest.approx(right, rel=1e-6)
        for name, gradient in right_gradients.items():
            torch.testing.assert_close(gradients[name], gradient, rtol=1e-4, atol=1e-6)
        losses.append(loss)
        for optimizer in optimizers:
            optimizer.step()
    assert losses[1] < losses[0] - 0.01
    assert fused_summary(model) == WHOLE


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_of_the_whole_model_is_that_model(family: str, in_fp8: bool) -> None:
    model = build(family)
    if in_fp8:
        convert_to_fp8(model, FP8Config(emulate=True))
    fuse(model)
    expected = step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert fused_summary(loaded) == WHOLE
    loss, gradients = step(loaded)
    assert loss == expected[0]
    assert all(torch.equal(gradients[name], gradient) for name, gradient in expected[1].items())
    assert inspect.signature(loaded.forward) == inspect.signature(build(family).forward)


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bf16_it_is_as_exact_as_the_model(family: str) -> None:
    bf16 = build(family)
    model, exact = copy.deepcopy(bf16), copy.deepcopy(bf16).float()
    fuse(model)
    (_, right), (_, plain), (_, ours) = map(step, (exact, bf16, model))
    for name, gradient in right.items():
        assert sqnr(ours[name], gradient) > sqnr(plain[name], gradient) - 3, name  # half a bit


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_on_a_gpu_it_is_as_exact_as_the_model(family: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512}
    bf16 = build(family, **sizes).cuda()
    model, exact = copy.deepcopy(bf16), copy.deepcopy(bf16).float()
    assert fuse(model) == WHOLE
    (_, right), (_, plain), (_, ours) = (step(each, batch().cuda()) for each in (exact, bf16, model))
    for name, gradient in right.items():
        assert sqnr(ours[name], gradient) > sqnr(plain[name], gradient) - 3, name


def test_q_k_v_and_gate_up_are_one_product_each_way() -> None:
    model = build()
    fuse(model)
    with Census() as counted:
        step(model)
    layers = [
        *(nn.Linear(64, features, device="meta") for features in (128, 192) * 2),
        *(layer.self_attn.o_proj for layer in model.model.layers),
        *(layer.mlp.down_proj for layer in model.model.layers),
        model.lm_head,
    ]
    assert counted.other == sum(products(layers, batch().numel()).values(), Counter())
    assert not counted.fp8


def test_no_weight_is_copied_after_the_model_was_fused() -> None:
    model = build()
    fuse(model)
    held = [merged.weights[0].untyped_storage().data_ptr() for merged in merged_linears(model)]
    step(model)
    assert held == [
        weight.untyped_storage().data_ptr() for weight in (merged.weights[-1] for merged in merged_linears(model))
    ]


@pytest.mark.parametrize("change", ["copy", "hooks", "dtype", "parameters held by an engine", "views"])
def test_layers_that_cannot_be_merged_run_one_by_one_and_it_says_why(change: str) -> None:
    model = build(dtype=torch.float32)
    right, right_gradients = step(copy.deepcopy(model))
    moved = "their weights have moved since; fuse the model when it has its dtype and device, and no copy of it"
    held = "others, such as an engine, hold the memory of their weights; fuse the model before it is boosted"
    if change == "copy":
        fuse(model)
        model, reason = copy.deepcopy(model), moved
    elif change == "hooks":
        fuse(model)
        for layer in model.model.layers:
            layer.self_attn.v_proj.register_forward_hook(lambda *_: None)
            layer.mlp.gate_proj.register_forward_pre_hook(lambda *_: None)
        reason = "a layer has hooks or a forward of its own, which must run"
    elif change == "dtype":
        fuse(model.bfloat16())
        model, reason = model.float(), moved
    elif change == "parameters held by an engine":
        _engine = [parameter.data.view(-1) for parameter in model.parameters()]  # as ZeRO's, which gathers to them
        places = [parameter.data_ptr() for parameter in model.parameters()]
        fuse(model)
        assert places == [parameter.data_ptr() for parameter in model.parameters()]
        reason = held
    else:
        for parameter in model.parameters():
            parameter.data = torch.cat([parameter.data.flatten(), torch.ones(1)])[:-1].view(parameter.shape)
        fuse(model)
        reason = held
    assert fused_summary(model) == apart(reason)
    loss, gradients = step(model)
    exact = change != "dtype"
    assert loss == pytest.approx(right, rel=1e-6 if exact else 1e-2)
    for name, gradient in right_gradients.items():
        assert sqnr(gradients[name], gradient) > (90 if exact else 25), name


def fused(in_fp8: bool) -> nn.Module:
    model = build()
    if in_fp8:
        convert_to_fp8(model)
    fuse(model)
    return model


def own_forward(layer: nn.Module, called: list) -> None:
    native = layer.forward
    layer.forward = lambda input: (called.append(1), native(input))[1]


def backward_hook(layer: nn.Module, called: list) -> None:
    layer.register_full_backward_hook(lambda *_: called.append(1))


@pytest.mark.parametrize("in_fp8", [False, True])
@pytest.mark.parametrize("add", [own_forward, backward_hook])
def test_what_a_call_of_a_layer_runs_is_run(add: Callable, in_fp8: bool) -> None:
    model, called = fused(in_fp8), []
    step(model)
    for layer in model.model.layers:
        add(layer.self_attn.q_proj, called)
        add(layer.mlp.up_proj, called)
    step(model)
    assert len(called) == 4
    why = "a layer has hooks or a forward of its own, which must run"
    assert why in (report(model).summary() if in_fp8 else fused_summary(model))


class Adapter(nn.Module):
    """As PEFT's LoRA: in the place of a layer, which it holds."""

    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        options = {"bias": False, "dtype": base_layer.weight.dtype}
        self.down = nn.Linear(base_layer.in_features, 4, **options)
        self.up = nn.Linear(4, base_layer.out_features, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def adapt(model: nn.Module) -> list[Adapter]:
    """Put an adapter on a layer of each attention and each feed-forward block."""
    torch.manual_seed(0)
    adapters = []
    for layer in model.model.layers:
        for block, name in ((layer.self_attn, "v_proj"), (layer.mlp, "gate_proj")):
            adapters.append(Adapter(getattr(block, name)))
            setattr(block, name, adapters[-1])
    return adapters


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("in_fp8", [False, True])
def test_adapters_may_come_before_or_after_a_model_is_fused(in_fp8: bool, frozen: bool) -> None:
    before, after = build(), build()
    for model in (before, after):
        if in_fp8:
            (freeze if frozen else convert_to_fp8)(model, FP8Config(emulate=True))
        model.requires_grad_(not frozen)
    adapt(before)
    assert fuse(before).startswith("2 decoder layers fused")
    assert not unfused_parts(before)
    fuse(after)
    adapt(after)
    (loss, gradients), (right, right_gradients) = map(step, (before, after))
    assert loss == right
    trained = {name for name, gradient in gradients.items() if gradient is not None}
    assert trained == {name for name, gradient in right_gradients.items() if gradient is not None}
    assert any("v_proj.up" in name for name in trained)
    assert all(torch.equal(gradients[name], right_gradients[name]) for name in trained)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_adapters_put_in_after_a_model_was_fused_are_trained(in_fp8: bool) -> None:
    model = fused(in_fp8).requires_grad_(False)
    model.model.embed_tokens.requires_grad_(True)
    step(model)
    adapters = adapt(model)
    step(model)
    assert all(adapter.up.weight.grad.any() for adapter in adapters)
    why = "4 groups of layers not merged" + (" (" if in_fp8 else ": ") + "the layers have adapters"
    assert why in (report(model).summary() if in_fp8 else fused_summary(model))
    for layer in model.model.layers:  # as PEFT's merge_and_unload
        layer.self_attn.v_proj = layer.self_attn.v_proj.base_layer
        layer.mlp.gate_proj = layer.mlp.gate_proj.base_layer
    step(model)
    assert fused_summary(model) == WHOLE
    assert not in_fp8 or "10 of them merged to 4 products" in report(model).summary()


def test_another_choice_of_layers_may_come_after_the_model_was_fused() -> None:
    model = fused(True)
    step(model)
    convert_to_fp8(model, FP8Config(layers=lambda name, _: "q_proj" not in name and "lm_head" not in name))
    step(model)
    assert "2 groups of layers not merged (a layer was taken out of FP8)" in report(model).summary()


def test_evaluation_autocast_and_frozen_layers() -> None:
    exact = build(dtype=torch.float32)
    model = copy.deepcopy(exact)
    fuse(model)
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    _, right = step(exact)
    _, gradients = step(model)
    assert gradients.pop("model.layers.0.self_attn.k_proj.weight") is None
    assert all(sqnr(gradient, right[name]) > 90 for name, gradient in gradients.items())
    with torch.autocast("cpu", torch.bfloat16):
        assert step(model)[0] == pytest.approx(step(exact)[0], rel=1e-2)
    model.eval(), exact.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batch()).logits, exact(batch()).logits)


@pytest.mark.parametrize("in_fp8", [False, True])
def test_selective_checkpointing_may_keep_what_products_gave(in_fp8: bool) -> None:
    model = fused(in_fp8)
    loss, right = step(model)
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=products_kept)
    again, gradients = step(model)
    assert again == loss
    assert all(torch.equal(gradients[name], gradient) for name, gradient in right.items())


def test_a_fused_norm_gives_what_may_be_changed_in_place() -> None:
    norm = fused(False).model.norm
    norm(torch.randn(2, 3, 64).bfloat16()).mul_(2).sum().backward()
    assert norm.weight.grad.any()


def test_under_autocast_what_blocks_add_to_keeps_its_precision() -> None:
    x, residual = torch.randn(2, 3, 16).bfloat16(), 100 * torch.randn(2, 3, 16)
    leaves = [x.requires_grad_(), residual.requires_grad_()]
    y, h = row_norm(x, torch.ones(16), 1e-5, residual)
    assert torch.equal(h, x + residual)
    torch.testing.assert_close(y, h / (h.square().mean(-1, keepdim=True) + 1e-5).sqrt())
    (y * torch.randn(16)).sum().backward()
    assert [leaf.grad.dtype for leaf in leaves] == [torch.bfloat16, torch.float32]
    torch.testing.assert_close(x.grad, residual.grad.bfloat16())


def test_layers_left_out_of_fp8_are_merged_in_their_precision() -> None:
    exact = build(dtype=torch.float32)
    model = convert_to_fp8(copy.deepcopy(exact), FP8Config(layers=lambda name, _: "mlp" in name))
    assert fuse(model) == WHOLE
    assert [len(merged.layers) for merged in merged_linears(model)] == [3, 3]
    assert step(model)[0] == pytest.approx(step(exact)[0], rel=2e-3)
