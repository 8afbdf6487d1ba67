from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, formats, report
from fp8booster.nn import FrozenFP8Linear
from fp8booster.nn.linear.functional import fp8_linear
from fp8booster.nn.linear.shared_input import begin_forward, end_forward
from tests.kernels.matrices import quantize

BF16 = torch.bfloat16
GRANULARITIES = ["tensorwise", "rowwise", "blockwise"]


def made(device: torch.device, inputs: int = 256, outputs: int = 128, dtype=BF16, **options) -> tuple:
    """A linear layer, and a copy of it whose weight is kept in FP8; rows have very different sizes."""
    plain = nn.Linear(inputs, outputs, device=device, dtype=dtype)
    with torch.no_grad():
        plain.weight.mul_(torch.logspace(-3, 1, outputs, base=2, device=device)[:, None])
    frozen = copy.deepcopy(plain)
    FrozenFP8Linear.convert_in_place(frozen, FP8Config(**options))
    return plain, frozen


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_it_computes_what_a_frozen_fp8_layer_does(granularity, training, device) -> None:
    plain, frozen = made(device, scaling=granularity)
    frozen.train(training)
    x = torch.randn(24, 256, device=device, dtype=BF16)
    config = FP8Config(scaling=granularity, always=True)
    assert torch.equal(frozen(x), fp8_linear(x, plain.weight, plain.bias, config))


@pytest.mark.parametrize("granularity", ["tensorwise", "blockwise"])
def test_its_input_gradient_is_that_of_a_frozen_fp8_layer(granularity, device) -> None:
    plain, frozen = made(device, scaling=granularity)
    dy = torch.randn(24, 128, device=device, dtype=BF16)
    one, other = (torch.randn(24, 256, device=device, dtype=BF16).requires_grad_() for _ in range(2))
    frozen(one).backward(dy)
    fp8_linear(other, plain.weight.detach(), None, FP8Config(scaling=granularity)).backward(dy)
    assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_its_input_gradient_is_the_exact_one_but_for_the_rounding_of_the_output_s(granularity, dtype, device) -> None:
    _, frozen = made(device, scaling=granularity, dtype=dtype)
    x = torch.randn(24, 256, device=device, dtype=dtype, requires_grad=True)
    dy = torch.randn(24, 128, device=device, dtype=dtype)
    frozen(x).backward(dy)
    exact = dy.double() @ frozen.weight.double()
    assert frozen.weight.dtype == dtype
    assert (x.grad.double() - exact).norm() < (0.06 if granularity == "tensorwise" else 0.035) * exact.norm()
    assert all(parameter.grad is None for name, parameter in frozen.named_parameters() if name != "bias")
    assert frozen.bias.grad is not None


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_its_bias_gets_the_gradient_that_no_scale_of_the_weight_multiplies(granularity, device) -> None:
    _, frozen = made(device, scaling=granularity)
    x = torch.randn(24, 256, device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(24, 128, device=device, dtype=BF16)
    frozen(x).backward(dy)
    assert torch.equal(frozen.bias.grad, dy.sum(0, dtype=torch.float32).to(BF16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16])
def test_it_takes_no_tokens_in_every_dtype_that_it_takes_tokens_in(dtype, device) -> None:
    _, frozen = made(device)
    for tokens in (0, 3):
        x = torch.randn(2, tokens, 256, device=device, dtype=dtype, requires_grad=True)
        y = frozen(x)
        assert (y.shape, y.dtype) == ((2, tokens, 128), dtype)
        y.sum().backward()
        assert x.grad.shape == x.shape
    with torch.autocast(device.type, BF16):
        assert frozen(x[:, :0]).dtype == BF16


def test_row_scales_reach_gradients_as_small_as_fp16_has_them(device) -> None:
    """With FP16's smallest normal numbers: multiplied by a scale in FP16, they would be zero."""
    plain, frozen = made(device, dtype=torch.float16, scaling="rowwise")
    x = torch.randn(16, 256, device=device, dtype=torch.float16, requires_grad=True)
    dy = torch.full((16, 128), 2.0**-14, device=device, dtype=torch.float16)
    frozen(x).backward(dy)
    exact = dy.double() @ plain.weight.double()
    assert (x.grad.double() - exact).norm() < 0.1 * exact.norm()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_it_holds_a_byte_for_each_value_and_saves_no_transpose(granularity, device) -> None:
    plain, frozen = made(device, scaling=granularity)
    values = plain.weight.numel()
    parameters = dict(frozen.named_parameters())
    assert parameters["fp8_data"].nbytes == values
    assert parameters["fp8_inverse_scale"].nbytes <= 4 * 128
    assert not any(parameters[name].requires_grad for name in ("fp8_data", "fp8_inverse_scale"))
    assert not list(frozen.named_buffers())
    saved = []
    x = torch.randn(32, 256, device=device, dtype=BF16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        frozen(x)
    assert sum(tensor.nbytes for tensor in saved) == 0


@pytest.mark.parametrize("sizes", [(256, 128), (250, 120), (48, 32)])
@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_its_state_is_that_of_fp8_checkpoints(granularity, sizes, device) -> None:
    inputs, outputs = sizes
    plain, frozen = made(device, *sizes, scaling=granularity)
    state = frozen.state_dict()
    assert list(state) == ["weight", "weight_scale_inv", "bias"]
    weight, scale = state["weight"], state["weight_scale_inv"]
    assert (weight.dtype, weight.shape) == (formats.E4M3, plain.weight.shape)
    blocks = (-(-outputs // 128), -(-inputs // 128))
    assert scale.shape == {"tensorwise": (), "rowwise": (outputs, 1), "blockwise": blocks}[granularity]
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other = FrozenFP8Linear(inputs, outputs, device=device, dtype=BF16, config=FP8Config(scaling=granularity))
    assert not other.weight.any()
    other.load_state_dict(torch.load(file))
    for name, value in other.state_dict().items():
        same = state[name]
        assert torch.equal(
            value.view(torch.uint8) if name == "weight" else value, same.view(torch.uint8) if name == "weight" else same
        )
    if granularity == "blockwise":  # beyond the blocks too, where products may read
        assert torch.equal(other.fp8_inverse_scale, frozen.fp8_inverse_scale)
    x = torch.randn(24, inputs, device=device, dtype=BF16)
    assert torch.equal(other(x), frozen(x))


def test_a_state_in_16_bits_loads_too(device) -> None:
    plain, frozen = made(device)
    other = FrozenFP8Linear(256, 128, device=device, dtype=BF16)
    other.load_state_dict(plain.state_dict())
    assert torch.equal(other.weight, frozen.weight)


@pytest.mark.parametrize(
    ("granularity", "sizes", "shape"),
    [("tensorwise", (256, 128), (1,)), ("rowwise", (256, 128), (128,)), ("blockwise", (128, 128), ())],
)
def test_scales_load_without_the_dimensions_of_size_one(granularity, sizes, shape, device) -> None:
    _, frozen = made(device, *sizes, scaling=granularity)
    state = frozen.state_dict()
    state["weight_scale_inv"] = state["weight_scale_inv"].reshape(shape)
    other = FrozenFP8Linear(*sizes, device=device, dtype=BF16, config=FP8Config(scaling=granularity))
    other.load_state_dict(state)
    assert torch.equal(other.weight, frozen.weight)


def test_what_does_not_fit_is_refused_with_the_reason() -> None:
    _, frozen = made(torch.device("cpu"))
    state = frozen.state_dict()
    other = FrozenFP8Linear(256, 128, dtype=BF16, config=FP8Config(scaling="rowwise"))
    with pytest.raises(RuntimeError, match="quantize with the same granularity"):
        other.load_state_dict(state)
    with pytest.raises(RuntimeError, match="load the state of the same model"):
        frozen.load_state_dict({"weight": torch.zeros(64, 256), "bias": state["bias"]})
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale_inv"):
        frozen.load_state_dict({"weight": state["weight"], "bias": state["bias"]})
    with pytest.raises(RuntimeError, match=r'Missing key.*"weight"'):
        frozen.load_state_dict({"bias": state["bias"]})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        frozen.load_state_dict({**state, "other": state["bias"]})


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_model_s_dtype_changes_what_is_decoded_and_nothing_that_is_held(granularity, device) -> None:
    _, frozen = made(device, scaling=granularity)
    before = [parameter.clone() for parameter in frozen.parameters()]
    values = frozen.weight.float()
    for change in (nn.Module.half, nn.Module.float, nn.Module.bfloat16):
        change(frozen)
        assert frozen.fp8_data.dtype is torch.uint8
        assert frozen.fp8_inverse_scale.dtype is torch.float32
        assert frozen.weight.dtype is frozen.bias.dtype
    for parameter, same in zip(frozen.parameters(), before, strict=True):
        assert torch.equal(parameter, same)
    assert torch.equal(frozen.weight.float(), values)


def test_a_copy_and_a_pickle_compute_the_same(device) -> None:
    _, frozen = made(device)
    x = torch.randn(16, 256, device=device, dtype=BF16)
    for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        assert torch.equal(other(x), frozen(x))
        assert other.fp8_data.data_ptr() != frozen.fp8_data.data_ptr()


def test_it_is_made_without_memory_and_loaded(device) -> None:
    _, frozen = made(device)
    layer = nn.Linear(256, 128, device="meta", dtype=BF16)
    FrozenFP8Linear.convert_in_place(layer, FP8Config())
    assert all(parameter.is_meta for parameter in layer.parameters())
    layer.to_empty(device=device)
    layer.load_state_dict(frozen.state_dict())
    assert torch.equal(layer.weight, frozen.weight)


def test_it_turns_back_into_a_layer_of_the_values_that_it_has(device) -> None:
    _, frozen = made(device)
    values = frozen.weight
    frozen.revert()
    assert type(frozen) is nn.Linear
    assert torch.equal(frozen.weight, values)
    assert list(frozen.state_dict()) == ["bias", "weight"]


def test_a_layer_that_trained_in_fp8_keeps_its_bytes(device) -> None:
    layer = FP8Linear(48, 32, device=device, dtype=BF16)
    expected = quantize(layer.weight.detach(), formats.E4M3)
    FrozenFP8Linear.convert_in_place(layer, layer.fp8_config)
    assert torch.equal(layer.quantized.data.view(torch.uint8), expected.data.view(torch.uint8))
    assert torch.equal(layer.quantized.inverse_scale, expected.inverse_scale)


def test_an_empty_batch_gives_an_empty_result(device) -> None:
    _, frozen = made(device)
    assert frozen(torch.empty(0, 256, device=device, dtype=BF16)).shape == (0, 128)


def test_layers_of_one_input_share_its_cast(device, casts) -> None:
    layers = [made(device)[1] for _ in range(3)]
    x = torch.randn(16, 256, device=device, dtype=BF16)
    casts.clear()
    module = nn.Sequential(*layers)
    begin_forward(module)
    for layer in layers:
        layer(x)
    end_forward(module)
    assert len(casts) == 1
    layers[1](x)
    assert len(casts) == 2


def test_conversion_leaves_it_as_it_is_and_the_report_names_it() -> None:
    model = nn.Sequential(made(torch.device("cpu"))[1], nn.Linear(128, 64))
    convert_to_fp8(model)
    frozen, trained = model
    assert (type(frozen), type(trained)) == (FrozenFP8Linear, FP8Linear)
    first, second = report(model).rows
    assert (first.precision, first.passes, first.notes) == ("FP8", ("FP8", "FP8", "none"), "weight kept in FP8 alone")
    assert second.passes == ("FP8", "FP8", "FP8")
    model(torch.randn(16, 256)).sum().backward()
    assert trained.weight.grad.any()


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_compiled_code_computes_the_same(granularity, device) -> None:
    _, frozen = made(device, scaling=granularity)
    inputs = [torch.randn(16, 256, device=device, dtype=BF16) for _ in range(2)]
    inputs[1] = inputs[0].clone()
    results = []
    for layer, x in zip((frozen, torch.compile(frozen, backend="aot_eager")), inputs, strict=True):
        x.requires_grad_()
        y = layer(x)
        y.float().square().sum().backward()
        results.append((y, x.grad))
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)
