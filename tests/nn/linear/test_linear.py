from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, forget_weights, formats, fp8_linear
from fp8booster.kernels.cast import cast

BF16 = torch.bfloat16


def layer_and_input(device: torch.device, **options) -> tuple[FP8Linear, torch.Tensor]:
    layer = FP8Linear(48, 32, device=device, dtype=BF16, **options)
    return layer, torch.randn(24, 48, device=device, dtype=BF16)


def test_it_is_a_linear_layer_with_the_same_state(device) -> None:
    layer, _ = layer_and_input(device)
    plain = nn.Linear(48, 32, device=device, dtype=BF16)
    assert isinstance(layer, nn.Linear)
    assert list(layer.state_dict()) == list(plain.state_dict()) == ["weight", "bias"]
    plain.load_state_dict(layer.state_dict())
    other, _ = layer_and_input(device)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.weight, layer.weight)
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert not list(layer.named_buffers())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_it_computes_what_the_function_does(bias, training, device) -> None:
    layer, x = layer_and_input(device, bias=bias, config=FP8Config(scaling="amax"))
    layer.train(training)
    x.requires_grad_()
    dy = torch.randn(24, 32, device=device, dtype=BF16)
    leaves = (x, *layer.parameters())
    y, expected = layer(x), fp8_linear(*leaves, config=FP8Config(scaling="amax"))
    assert torch.equal(y, expected)
    for one, other in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(expected, leaves, dy), strict=True):
        assert torch.equal(one, other)


def test_used_twice_in_one_graph_its_gradients_add(device) -> None:
    layer = FP8Linear(32, 32, device=device)
    first, second = (torch.randn(16, 32, device=device) for _ in range(2))
    (layer(first) + 2 * layer(second)).sum().backward()
    together = layer.weight.grad.clone()
    layer.zero_grad()
    layer(first).sum().backward()
    (2 * layer(second)).sum().backward()
    torch.testing.assert_close(together, layer.weight.grad)
    layer.zero_grad()
    layer(layer(first)).sum().backward()  # the second use reads what the first made
    assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits_and_casts_no_weight_twice(use_reentrant, device, casts) -> None:
    model = nn.Sequential(FP8Linear(48, 32, device=device), nn.GELU(), FP8Linear(32, 48, device=device))
    twin = copy.deepcopy(model)
    x = torch.randn(24, 48, device=device)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    y = model(inputs[0])
    y.square().sum().backward()
    casts.clear()
    y_twin = checkpoint(twin, inputs[1], use_reentrant=use_reentrant)
    y_twin.square().sum().backward()
    assert torch.equal(y, y_twin)
    assert torch.equal(inputs[0].grad, inputs[1].grad)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    for layer in (twin[0], twin[2]):
        assert sum(matrix.data_ptr() == layer.weight.data_ptr() for matrix, _ in casts) == 1


def test_a_frozen_layer_passes_gradients_and_makes_none(device, products) -> None:
    layer, x = layer_and_input(device)
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    assert len(products) == 2
    assert x.grad is not None
    assert layer.weight.grad is None


def test_what_a_frozen_layer_saves_leaves_out_the_input_even_if_it_was_cast_for_another(device) -> None:
    trained, x = layer_and_input(device)
    frozen, _ = layer_and_input(device)
    frozen.requires_grad_(False)
    x.requires_grad_()
    trained(x)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen(x)
    assert [t.shape for t in saved if t.dtype is formats.E4M3] == [(48, 32)]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_it_runs_without_gradients(mode, training, device) -> None:
    layer, x = layer_and_input(device)
    expected = layer(x)
    layer.train(training)
    with mode():
        assert torch.equal(layer(x), expected)
        hidden = x * 1  # made in this mode
        assert torch.equal(layer(hidden), expected)
        hidden.zero_()
        assert torch.equal(layer(hidden), layer.bias.expand(24, 32))


@pytest.mark.parametrize("shape", [(16, 48), (2, 8, 48), (24, 48), (48,)])
def test_its_output_may_be_changed_in_place(shape, device) -> None:
    layer, _ = layer_and_input(device)
    x = torch.randn(shape, dtype=BF16, device=device, requires_grad=True)
    torch.relu(2 * layer(x)).sum().backward()
    expected, x.grad = x.grad, None
    y = layer(x)
    y *= 2
    y.relu_()
    y.sum().backward()
    assert torch.equal(x.grad, expected)


def test_it_trains_after_a_forward_in_inference_mode(device) -> None:
    layer, x = layer_and_input(device)
    with torch.inference_mode():
        layer(x)
    x.requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad.any()
    assert x.grad.any()


def test_an_empty_batch_trains(device) -> None:
    layer, _ = layer_and_input(device)
    y = layer(torch.empty(0, 48, device=device, dtype=BF16))
    y.sum().backward()
    assert y.shape == (0, 32)
    assert not layer.weight.grad.any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_a_copy_is_a_layer_of_its_own(copied, device) -> None:
    layer, x = layer_and_input(device, config=FP8Config(scaling="amax"))
    expected = layer(x)
    twin = copied(layer)
    assert type(twin) is FP8Linear
    assert twin.fp8_config == layer.fp8_config
    assert torch.equal(twin(x), expected)
    with torch.no_grad():
        twin.weight.zero_()
        twin.bias.zero_()
    assert not twin(x).any()
    assert torch.equal(layer(x), expected)


def test_parametrized_after_conversion_it_reads_the_new_weight_each_time(device) -> None:
    layer = torch.nn.utils.spectral_norm(FP8Linear(32, 32, bias=False, device=device))  # another weight at each forward
    x = torch.randn(16, 32, device=device)
    for _ in range(3):
        y = layer(x)
        assert torch.equal(y, fp8_linear(x, layer.weight))
    weight_norm = parametrizations.weight_norm(FP8Linear(32, 32, bias=False, device=device))
    before = weight_norm(x)
    with torch.no_grad():
        weight_norm.parametrizations.weight.original0.mul_(2)
    assert torch.equal(weight_norm(x), 2 * before)


def test_functional_call_reads_the_weight_it_is_given(device) -> None:
    layer, x = layer_and_input(device, bias=False)
    expected = layer(x)
    for factor in (2.0, 4.0):
        y = torch.func.functional_call(layer, {"weight": layer.weight.detach() * factor}, (x,))
        assert torch.equal(y, expected * factor)


def test_only_the_weights_copy_outlives_a_step(device, monkeypatch) -> None:
    made, original = [], cast.run

    def record(*arguments, **options):
        result = original(*arguments, **options)
        made.append([weakref.ref(tensor) for tensor in result])
        return result

    monkeypatch.setattr(cast, "run", record)
    layer, _ = layer_and_input(device)

    def step() -> None:
        layer(torch.randn(24, 48, device=device, dtype=BF16, requires_grad=True)).sum().backward()

    gc.disable()  # what dies must die by its reference count
    try:
        step()
        alive = [any(ref() is not None for ref in copy) for copy in made]
        assert alive == [False, True, False]  # input, weight, gradient
        forget_weights(layer)
        assert not any(ref() is not None for copy in made for ref in copy)
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_of_no_output_features_trains(device) -> None:
    layer = FP8Linear(48, 0, device=device, dtype=BF16, config=FP8Config(always=True))
    x = torch.randn(4, 48, device=device, dtype=BF16, requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert layer.weight.grad.shape == (0, 48)


@pytest.mark.parametrize(
    ("shape", "dtype", "error", "message"),
    [
        ((4, 47), BF16, ValueError, r"input has shape \(4, 47\) and weight \(32, 48\)"),
        ((), BF16, ValueError, r"input has shape \(\) and weight \(32, 48\)"),
        ((4, 48), torch.float32, TypeError, "input is torch.float32 and weight is torch.bfloat16"),
        ((4, 48), torch.int64, TypeError, "input is torch.int64; cast it to"),
    ],
)
def test_bad_input_is_named(shape, dtype, error, message, device) -> None:
    layer, _ = layer_and_input(device)
    with pytest.raises(error, match=message):
        layer(torch.zeros(shape, device=device, dtype=dtype))


def test_training_follows_high_precision(device) -> None:
    plain = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)).to(device)
    fp8 = convert_to_fp8(copy.deepcopy(plain))
    x = torch.randn(256, 32, device=device)
    target = torch.sin(x.cumsum(1))
    losses = []
    for model in (plain, fp8):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(60):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[0] < 0.3
    assert losses[1] == pytest.approx(losses[0], rel=0.2)


def test_functional_call_computes_with_what_it_is_given(device) -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))).to(device)
    other = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))).to(device)
    x = torch.randn(16, 32, device=device)
    model(x)
    given = dict(other.named_parameters())
    y = functional_call(model, given, (x,))
    assert torch.equal(y, other(x))
    found = torch.autograd.grad(y.sum(), list(given.values()))
    expected = torch.autograd.grad(other(x).sum(), list(other.parameters()))
    assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
    assert not torch.equal(model(x), y)


@pytest.mark.parametrize(
    "transformed",
    [
        lambda layer, x: grad(lambda a: layer(a).sum())(x),
        lambda layer, x: vmap(layer)(x[:, None]),
        lambda layer, x: jvp(layer, (x,), (x,)),
        lambda layer, x: grad(lambda w: functional_call(layer, w, (x,)).sum())(
            {name: value.detach() for name, value in layer.named_parameters()}
        ),
        lambda layer, x: grad(lambda a: fp8_linear(a, layer.weight).sum())(x),
    ],
)
def test_transforms_of_torch_func_are_refused(transformed) -> None:
    with pytest.raises(RuntimeError, match=r"torch.func's transforms .* call torch.autograd.grad"):
        transformed(FP8Linear(32, 32), torch.randn(16, 32))
