from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, formats, fp8_linear
from fp8booster.config import Formats
from fp8booster.scaling import RealTime
from tests.nn import reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def llama_like(
    device: torch.device, rows: int = 256, inputs: int = 512, outputs: int = 384, dtype: torch.dtype = FP32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x [M, K], w [N, K] and dy [M, N] of the magnitudes seen in LLaMA training."""
    x = torch.randn(rows, inputs, device=device)
    w = torch.randn(outputs, inputs, device=device) * 0.02
    dy = torch.randn(rows, outputs, device=device) * 1e-3
    return x.to(dtype), w.to(dtype), dy.to(dtype)


def run(x, w, dy, bias=None, config=None) -> tuple[torch.Tensor, ...]:
    """Output and gradients of x, w and, if there is one, bias."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, w, bias) if t is not None]
    y = fp8_linear(*leaves, config=config)
    y.backward(dy)
    return y.detach(), *(leaf.grad for leaf in leaves)


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("dtype", formats.HIGH_PRECISION)
def test_signal_to_noise_on_llama_like_data(dtype, power_of_two, device) -> None:
    x, w, dy = llama_like(device, dtype=dtype)
    results = run(x, w, dy, config=FP8Config(scaling=RealTime(power_of_two=power_of_two)))
    exact = reference.exact_linear(x, w, dy)
    y, dx, dw = (reference.signal_to_noise(*pair) for pair in zip(exact, results, strict=True))
    assert y >= 25
    assert dx >= 20
    assert dw >= 20


def test_outlier_features_cost_no_more_than_they_must(device) -> None:
    x, w, dy = llama_like(device)
    x[:, ::128] *= 100  # E4M3 spans 2**17 above its smallest normal value: the others keep their bits
    results = run(x, w, dy)
    exact = reference.exact_linear(x, w, dy)
    for pair in zip(exact, results, strict=True):
        assert reference.signal_to_noise(*pair) >= 20


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("dtype", formats.HIGH_PRECISION)
def test_equals_quantize_multiply_rescale(dtype, emulate, device) -> None:
    x, w, dy = llama_like(device, dtype=dtype)
    results = run(x, w, dy, config=FP8Config(emulate=emulate, fast_accumulation=()))
    inner = (x.shape[1], w.shape[0], x.shape[0])
    magnitudes = reference.linear(x.abs(), w.abs(), dy.abs())
    for result, *expected in zip(results, reference.linear(x, w, dy), magnitudes, inner, strict=True):
        assert result.dtype is dtype
        reference.assert_rounded(result, *expected)


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("dtype", formats.HIGH_PRECISION)
def test_whole_numbers_come_out_exactly(dtype, emulate, device) -> None:
    x, w, dy, bias = (
        torch.randint(-3, 4, shape, device=device).to(dtype) for shape in ((32, 48), (64, 48), (32, 64), (64,))
    )
    y, dx, dw, db = run(x, w, dy, bias, FP8Config(scaling="amax", emulate=emulate))
    exact = reference.exact_linear(x, w, dy)
    assert torch.equal(y, (exact.output + bias.double()).to(dtype))
    assert torch.equal(dx, exact.input.to(dtype))
    assert torch.equal(dw, exact.weight.to(dtype))
    assert torch.equal(db, dy.double().sum(0).to(dtype))


@pytest.mark.parametrize("size", [*range(1, 41)])
@pytest.mark.parametrize("axis", ["rows", "inputs", "outputs", "all"])
def test_any_size_equals_the_reference(axis, size, device) -> None:
    sizes = {"rows": 32, "inputs": 48, "outputs": 16}
    sizes |= dict.fromkeys(sizes, size) if axis == "all" else {axis: size}
    x, w, dy = llama_like(device, **sizes)
    results = run(x, w, dy, config=FP8Config(fast_accumulation=()))
    inner = (sizes["inputs"], sizes["outputs"], sizes["rows"])
    magnitudes = reference.linear(x.abs(), w.abs(), dy.abs())
    for result, *expected in zip(results, reference.linear(x, w, dy), magnitudes, inner, strict=True):
        assert result.is_contiguous()
        reference.assert_rounded(result, *expected)


@pytest.mark.parametrize("emulate", [False, True])
@pytest.mark.parametrize("outputs", [1, 8, 15, 16, 17, 40])
def test_a_bias_reaches_its_own_features(outputs, emulate, device) -> None:
    """Also where the product has more of them, of which the last are cut off."""
    bias = torch.randn(outputs, device=device, dtype=torch.bfloat16)
    weight = torch.randn(outputs, 32, device=device, dtype=torch.bfloat16)
    y = fp8_linear(torch.zeros(3, 32, device=device, dtype=torch.bfloat16), weight, bias, FP8Config(emulate=emulate))
    assert torch.equal(y, bias.expand(3, -1))


@pytest.mark.parametrize(
    "config",
    [
        FP8Config(formats=Formats(gradient=formats.E4M3)),
        FP8Config(formats=Formats(input=formats.E5M2, gradient=formats.E4M3)),
        FP8Config(formats=Formats(weight=formats.E5M2, gradient=formats.E4M3)),
        FP8Config(fast_accumulation=("fprop", "dgrad", "wgrad")),
    ],
    ids=["e4m3", "e5m2 input", "e5m2 weight", "fast accumulation"],
)
def test_every_allowed_recipe_trains(config, device) -> None:
    x, w, dy = llama_like(device, dtype=BF16)
    exact = reference.exact_linear(x, w, dy)
    for pair in zip(exact, run(x, w, dy, config=config), strict=True):
        assert reference.signal_to_noise(*pair) >= 20


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FP8Config(), [True, False, False]),
        (FP8Config(fast_accumulation=("dgrad",)), [False, True, False]),
        (FP8Config(fast_accumulation=("wgrad",)), [False, False, True]),
    ],
)
def test_each_product_accumulates_as_configured(config, expected, device, monkeypatch) -> None:
    seen, original = [], torch._scaled_mm

    def record(*arguments, use_fast_accum, **options):
        seen.append(use_fast_accum)
        return original(*arguments, use_fast_accum=use_fast_accum, **options)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    run(*llama_like(device, 16, 16, 16), config=config)
    assert seen == expected


@pytest.mark.parametrize("shape", [(48,), (1, 48), (5, 48), (2, 3, 48), (2, 1, 4, 48), (1, 1, 1, 48)])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_one_to_four_dimensions(shape, dtype, device) -> None:
    x = torch.randn(shape, device=device, dtype=dtype)
    _, w, _ = llama_like(device, 1, 48, 20, dtype)
    bias = torch.randn(20, device=device, dtype=dtype)
    dy = torch.randn(*shape[:-1], 20, device=device, dtype=dtype)
    y, dx, dw, db = run(x, w, dy, bias)
    flat = run(x.reshape(-1, 48), w, dy.reshape(-1, 20), bias)
    assert y.shape == F.linear(x, w).shape
    assert dx.shape == x.shape
    for one, other in zip((y, dx, dw, db), flat, strict=True):
        assert torch.equal(one.flatten(), other.flatten())


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.transpose(0, 1),
        lambda t: t[:, ::2],
        lambda t: t[:1].expand(6, -1, -1),
        lambda t: t[:, :1].expand(-1, 8, -1),
        lambda t: t.permute(2, 1, 0)[:32].permute(2, 1, 0),
    ],
    ids=["transposed", "strided", "expanded", "expanded inside", "sliced features"],
)
def test_strides_of_the_input_do_not_matter(view, device) -> None:
    base = torch.randn(6, 8, 40, device=device, dtype=BF16, requires_grad=True)
    x = view(base)
    w = torch.randn(24, x.shape[-1], device=device, dtype=BF16, requires_grad=True)
    dy = torch.randn(*x.shape[:-1], 24, device=device, dtype=BF16)
    y = fp8_linear(x, w)
    dense = x.detach().contiguous().requires_grad_()
    y_dense = fp8_linear(dense, w)
    assert torch.equal(y, y_dense)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    for one, other in zip((dx, dw), torch.autograd.grad(y_dense, (dense, w), dy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("gradient", ["expanded", "transposed"])
def test_strides_of_the_gradient_do_not_matter(gradient, device) -> None:
    x, w, _ = llama_like(device, 32, 48, 16, BF16)
    dy = {
        "expanded": torch.full((1, 1), 1e-3, device=device, dtype=BF16).expand(32, 16),
        "transposed": torch.randn(16, 32, device=device, dtype=BF16).t(),
    }[gradient]
    for one, other in zip(run(x, w, dy), run(x, w, dy.contiguous()), strict=True):
        assert torch.equal(one, other)


def test_strides_of_the_weight_do_not_matter(device) -> None:
    x, w, dy = llama_like(device, 32, 48, 16, BF16)
    for one, other in zip(run(x, w.t().contiguous().t(), dy), run(x, w, dy), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("shape", [(0, 48), (2, 0, 48)])
def test_an_empty_batch_gives_empty_output_and_zero_gradients(shape, device) -> None:
    x = torch.empty(shape, device=device, dtype=BF16, requires_grad=True)
    w = torch.randn(20, 48, device=device, dtype=BF16, requires_grad=True)
    bias = torch.randn(20, device=device, dtype=BF16, requires_grad=True)
    y = fp8_linear(x, w, bias)
    y.sum().backward()
    assert y.shape == (*shape[:-1], 20)
    assert y.dtype is BF16
    assert x.grad.shape == shape
    assert w.grad.shape == w.shape
    assert not w.grad.any()
    assert not bias.grad.any()


@pytest.mark.parametrize("granularity", ["tensorwise", "rowwise"])
def test_a_weight_of_no_output_features_gives_what_f_linear_does(granularity, device) -> None:
    x = torch.randn(4, 48, device=device, dtype=BF16)
    w, bias, dy = (torch.empty(shape, device=device, dtype=BF16) for shape in ((0, 48), (0,), (4, 0)))
    y, dx, dw, db = run(x, w, dy, bias, FP8Config(scaling=granularity))
    assert y.shape == (4, 0)
    assert torch.equal(dx, torch.zeros_like(x))
    assert dw.shape == w.shape
    assert db.shape == bias.shape


@pytest.mark.parametrize("parameters", [BF16, FP32])
@pytest.mark.parametrize("inputs", [BF16, FP32])
@pytest.mark.parametrize("autocast_dtype", [BF16, FP16])
def test_autocast_decides_the_output_and_each_gradient_keeps_its_tensors_dtype(
    autocast_dtype, inputs, parameters, device
) -> None:
    x, w, dy = llama_like(device, 32, 48, 16)
    x = x.to(inputs).requires_grad_()
    w = w.to(parameters).requires_grad_()
    bias = torch.randn(16, device=device, dtype=parameters, requires_grad=True)
    with torch.autocast(device.type, autocast_dtype):
        y = fp8_linear(x, w, bias)
    assert y.dtype is autocast_dtype
    dy = dy.to(autocast_dtype)
    y.backward(dy)
    assert (x.grad.dtype, w.grad.dtype, bias.grad.dtype) == (inputs, parameters, parameters)
    expected = reference.linear(x.detach(), w.detach(), dy)
    assert reference.signal_to_noise(expected.output + bias.double(), y) > 40
    assert reference.signal_to_noise(expected.input, x.grad) > 40
    assert reference.signal_to_noise(expected.weight, w.grad) > 40
    for tensor in (x, w, bias):
        if tensor.dtype is FP32:  # its gradient was not rounded to autocast's dtype on the way
            assert tensor.grad.ne(tensor.grad.to(autocast_dtype)).any()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["input", "weight"])
@pytest.mark.parametrize("emulate", [False, True])
def test_a_bad_value_reaches_the_loss(where, bad, emulate, device) -> None:
    x, w, _ = llama_like(device, 20, 48, 24, BF16)
    {"input": x, "weight": w}[where][3, 5] = bad
    loss = fp8_linear(x, w, config=FP8Config(emulate=emulate)).float().square().mean()
    assert loss.isnan()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_gradient_reaches_both_gradients(bad, device) -> None:
    x, w, dy = llama_like(device, 20, 48, 24, BF16)
    dy[2, 7] = bad
    _, dx, dw = run(x, w, dy)
    assert dx.isnan().all()
    assert dw.isnan().all()


def test_zeros_give_zeros(device) -> None:
    zeros = torch.zeros(16, 16, device=device, dtype=BF16)
    for result in run(zeros, zeros, zeros):
        assert torch.equal(result, zeros)


@pytest.mark.parametrize(
    ("input_needs", "weight_needs", "expected"), [(True, True, 3), (True, False, 2), (False, True, 2)]
)
def test_only_the_products_asked_for_run(input_needs, weight_needs, expected, device, products) -> None:
    x, w, dy = llama_like(device, 32, 48, 16, BF16)
    x.requires_grad_(input_needs)
    w.requires_grad_(weight_needs)
    fp8_linear(x, w).backward(dy)
    assert len(products) == expected
    assert (x.grad is not None, w.grad is not None) == (input_needs, weight_needs)


@pytest.mark.parametrize("parameters", [torch.float32, BF16])
def test_the_gradient_of_a_bias_is_summed_in_fp32(parameters, device) -> None:
    """One large gradient and many small ones, which a sum in 16 bits loses: 256 + 1 is 256 in BF16."""
    x, w = torch.ones(513, 16, device=device, dtype=BF16), torch.ones(16, 16, device=device, dtype=parameters)
    bias = torch.zeros(16, device=device, dtype=parameters, requires_grad=True)
    dy = torch.ones(513, 16, device=device, dtype=BF16)
    dy[0] = 256
    with torch.autocast(device.type, BF16):
        y = fp8_linear(x, w, bias)
    y.backward(dy)
    # in BF16 768 is a multiple of its step; 1 more shows in an FP32 bias alone that the sum was not rounded before
    dy[1] = 2
    bias.grad, first = None, bias.grad
    with torch.autocast(device.type, BF16):
        fp8_linear(x, w, bias).backward(dy)
    assert first.tolist() == [768.0] * 16
    assert bias.grad.tolist() == [769.0 if parameters is torch.float32 else 768.0] * 16


def test_only_the_bias_can_need_a_gradient(device, products) -> None:
    x, w, dy = llama_like(device, 32, 48, 16, BF16)
    bias = torch.zeros(16, device=device, dtype=BF16, requires_grad=True)
    fp8_linear(x, w, bias).backward(dy)
    assert len(products) == 1
    assert torch.equal(bias.grad, dy.float().sum(0).to(BF16))


def saved_tensors(function) -> list[torch.Tensor]:
    """What autograd keeps of a function's run."""
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        function()
    return saved


@pytest.mark.parametrize(("input_needs", "weight_needs"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("shape", [(64, 48), (2, 32, 48)])
def test_what_is_saved_is_fp8_and_only_what_is_needed(shape, input_needs, weight_needs, device) -> None:
    x = torch.randn(shape, device=device, dtype=BF16, requires_grad=input_needs)
    w = torch.randn(32, 48, device=device, dtype=BF16, requires_grad=weight_needs)
    saved = saved_tensors(lambda: fp8_linear(x, w))
    values = [t for t in saved if t.numel() > 1]
    assert {t.dtype for t in values} == {formats.E4M3}
    assert sum(t.nbytes for t in values) == weight_needs * x.numel() + input_needs * w.numel()
    assert sum(t.nbytes for t in saved if t.numel() == 1) == 4 * (weight_needs + input_needs)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_gives_the_same_bits(use_reentrant, device) -> None:
    x, w, dy = llama_like(device, 24, 48, 48, BF16)

    def block(x, w):
        return fp8_linear(F.gelu(fp8_linear(x, w)), w)

    def gradients(forward) -> tuple[torch.Tensor, ...]:
        leaves = [t.clone().requires_grad_() for t in (x, w)]
        y = forward(*leaves)
        y.backward(dy)
        return y.detach(), *(leaf.grad for leaf in leaves)

    plain = gradients(block)
    checkpointed = gradients(lambda *leaves: checkpoint(block, *leaves, use_reentrant=use_reentrant))
    for one, other in zip(plain, checkpointed, strict=True):
        assert torch.equal(one, other)


def test_input_and_weight_may_change_before_the_backward(device) -> None:
    x, w, dy = llama_like(device, 32, 48, 16, BF16)
    expected = run(x, w, dy)
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    y = fp8_linear(*leaves)
    with torch.no_grad():
        for leaf in leaves:
            leaf.zero_()
    y.backward(dy)
    for one, other in zip(expected, (y, *(leaf.grad for leaf in leaves)), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("of", [torch.square, torch.clone], ids=["square", "constant gradient"])
def test_a_second_derivative_is_refused(of, device) -> None:
    x, w, _ = llama_like(device, 16, 16, 16)
    (dx,) = torch.autograd.grad(of(fp8_linear(x.requires_grad_(), w)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        dx.sum().backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_nothing_is_transposed(mode, device, casts) -> None:
    x, w, _ = llama_like(device, 16, 48, 32, BF16)
    expected = fp8_linear(x, w.requires_grad_())
    with mode():
        y = fp8_linear(x, w)
    assert torch.equal(y, expected)
    assert not y.requires_grad


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 8), (16, 9)), r"input has shape \(4, 8\) and weight \(16, 9\); the last size of both must be"),
        (((), (16, 8)), r"input has shape \(\)"),
        (((4, 8), (8,)), r"weight has shape \(8,\); give a matrix of \[output features, input features\]"),
        (((4, 8), (2, 16, 8)), r"weight has shape \(2, 16, 8\)"),
        (((4, 8), (16, 8), (8,)), r"bias has shape \(8,\); give 16 values"),
        (((4, 8), (16, 8), (1, 16)), r"bias has shape \(1, 16\); give 16 values"),
    ],
)
def test_sizes_that_do_not_fit_are_named(shapes, message, device) -> None:
    with pytest.raises(ValueError, match=message):
        fp8_linear(*(torch.zeros(shape, device=device) for shape in shapes))


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, formats.E4M3])
def test_a_dtype_that_cannot_be_cast_is_named(position, dtype, device) -> None:
    operands = [torch.zeros(shape, device=device) for shape in ((4, 16), (16, 16), (16,))]
    operands[position] = operands[position].to(dtype)
    name = ("input", "weight", "bias")[position]
    with pytest.raises(TypeError, match=f"{name} is {dtype}; cast it to bfloat16, float16 or float32 first"):
        fp8_linear(*operands)


def test_dtypes_that_differ_are_refused_outside_autocast(device) -> None:
    x, w = torch.zeros(4, 16, device=device, dtype=BF16), torch.zeros(8, 16, device=device)
    with pytest.raises(TypeError, match=r"input is torch.bfloat16 and weight is torch.float32; .*torch.autocast"):
        fp8_linear(x, w)


def test_a_device_without_fp8_products_is_refused() -> None:
    x = torch.zeros(16, 16, device="meta")
    with pytest.raises(ValueError, match="no FP8 products for meta devices"):
        fp8_linear(x, x)
