"""`FP8Config.smooth_swiglu`: large channels of SwiGLU's output leave the others their bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, fuse, record, report
from fp8booster.config import Activations, WeightCopies
from fp8booster.monitor.sinks import read_scales
from fp8booster.nn.weights import casting, source
from fp8booster.nn.weights.casting import Casts
from fp8booster.scaling import INPUT
from fp8booster.scaling.smooth_swiglu import ChannelFactors, SmoothSwiGLU, factors_of
from fp8booster.tensor import QuantizedMatrix
from tests.nn import reference
from tests.nn.fused.models import batch, build
from tests.nn.fused.test_decoder import fused

SMOOTH = FP8Config(scaling="smooth-swiglu", always=True)
PLANTED, LARGER = 5, 200.0


def planted(model: nn.Module) -> nn.Module:
    """One channel of gate and of up, in each layer, is 200 times too large: their product 40000 times."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate_proj.weight[PLANTED] *= LARGER
            layer.mlp.up_proj.weight[PLANTED] *= LARGER
    return model


def of_inputs(model: nn.Module) -> list[float]:
    """Signal over quantization noise of what each down projection reads, of all channels but the planted one."""
    found = []

    def see(role: str, tensor: torch.Tensor, made: QuantizedMatrix) -> None:
        if role == INPUT:
            values = tensor.detach().reshape(-1, tensor.shape[-1]).double()
            rows, columns = values.shape
            kept = made.dequantize(rows, columns)
            others = torch.arange(columns) != PLANTED
            found.append(reference.signal_to_noise(values[:, others], kept[:, others]))

    for layer in model.model.layers:
        layer.mlp.down_proj.fp8_casts.observers.append(see)
    model(input_ids=batch(), labels=batch())
    return found


def test_other_channels_keep_their_bits_where_one_scale_loses_them() -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 256}
    results = []
    for config in (SMOOTH, FP8Config(always=True)):
        model = fused(planted(build(**sizes)), config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        model(input_ids=batch(), labels=batch()).loss.backward()
        optimizer.step()
        results.append(of_inputs(model))
    smooth, plain = results
    assert min(smooth) > 25
    assert max(plain) < 22


def layer_and_exact(
    device: torch.device, power_of_two: bool = False, **options: object
) -> tuple[FP8Linear, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    layer = FP8Linear(
        200, 96, device=device, config=FP8Config(scaling=SmoothSwiGLU(power_of_two), always=True, **options)
    )
    layer.fp8_casts = Casts(layer.fp8_config, ChannelFactors)
    x = torch.randn(48, 200, device=device)
    x[:, PLANTED] *= 2.0**20
    return layer, x, torch.randn(48, 96, device=device)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("power_of_two", [False, True])
def test_products_and_gradients_are_those_of_the_layer(power_of_two, keep, device) -> None:
    layer, x, dy = layer_and_exact(device, power_of_two=power_of_two, weight_copies=WeightCopies(transposes=keep))
    exact = reference.exact_linear(x, layer.weight.detach(), dy)
    others = torch.arange(200, device=device) != PLANTED
    for step in range(3):
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        y = layer(leaf)
        y.backward(dy)
        found = [y - layer.bias, leaf.grad[:, others], layer.weight.grad[:, others]]
        expected = [exact.output, exact.input[:, others], exact.weight[:, others]]
        ratios = [reference.signal_to_noise(*pair) for pair in zip(expected, found, strict=True)]
        assert reference.signal_to_noise(exact.input[:, ~others], leaf.grad[:, ~others]) > 20
        assert reference.signal_to_noise(exact.weight[:, ~others], layer.weight.grad[:, ~others]) > 20
        if step == 0:
            assert ratios[2] < 15  # one scale for the input
        else:
            assert ratios[0] > 25
            assert min(ratios[1:]) > 20
        layer.fp8_weight.forget()  # as an optimizer's step does


def test_factors_stay_within_a_step_and_inputs_read_twice_follow_the_weight(device) -> None:
    layer, x, dy = layer_and_exact(device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
    exact = reference.exact_linear(x, layer.weight.detach(), dy).output
    layer(x)
    assert layer.fp8_casts.state.factors is None
    optimizer.step()
    y = layer(x)  # the same tensor object again
    factors = layer.fp8_casts.state.factors
    assert factors.log2().frac().eq(0).all()
    layer(100 * torch.rand_like(x))
    assert layer.fp8_casts.state.factors is factors
    assert reference.signal_to_noise(exact, y - layer.bias) > 25
    optimizer.step()
    layer(x)
    assert layer.fp8_casts.state.factors is not factors
    layer.eval()
    assert torch.equal(layer(x), FP8Linear.forward(copy.deepcopy(layer).eval(), x))


def test_recomputation_gives_the_same_gradients(device) -> None:
    layer, x, dy = layer_and_exact(device)
    optimizer, gradients = torch.optim.SGD(layer.parameters(), lr=0.0), []
    layer(x)
    optimizer.step()
    for recomputed in (False, True):
        leaf = x.clone().requires_grad_()
        y = checkpoint(layer, leaf, use_reentrant=False) if recomputed else layer(leaf)
        gradients.append(torch.autograd.grad(y, (leaf, layer.weight), dy))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_channels_without_numbers_keep_their_scale() -> None:
    inputs = torch.tensor([1.0, 0.0, float("nan"), float("inf"), 1.0, 2.0**20, 1.0])
    assert factors_of(inputs, torch.ones(7)).tolist() == [1, 1, 1, 1, 1, 2.0**-10, 1]
    assert factors_of(torch.zeros(7), torch.ones(7)).eq(1).all()
    assert factors_of(torch.ones(2), torch.full((2,), float("nan"))).eq(1).all()


@pytest.mark.parametrize("saved", ["16-bit", "8-bit"])
def test_a_model_trains_as_without_and_the_report_tells(saved) -> None:
    losses = []
    for smooth in (False, True):
        config = FP8Config(
            always=True, scaling="smooth-swiglu" if smooth else "tensorwise", activations=Activations(saved=saved)
        )
        model = fused(build(hidden_size=128, intermediate_size=256), config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        for _ in range(6):
            loss = model(input_ids=batch(), labels=batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.02)
    rows = {row.name: row.notes for row in report(model).rows}
    assert "scales by channel (smooth SwiGLU)" in rows["model.layers.1.mlp.down_proj"]
    assert "channel" not in rows["model.layers.1.mlp.up_proj"]
    states = [layer.mlp.down_proj.fp8_casts.state for layer in copy.deepcopy(model).model.layers]
    assert [type(state) for state in states] == [ChannelFactors] * 2
    assert all(state.factors is None for state in states)


def test_a_recorder_changes_nothing_and_sees_what_channels_keep(tmp_path) -> None:
    models = [fused(planted(build(hidden_size=128, intermediate_size=256)), SMOOTH) for _ in range(2)]
    losses: list[list[float]] = [[], []]
    for model, found in zip(models, losses, strict=True):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        recording = record(model, every=1, sink=tmp_path / "scales.jsonl") if model is models[1] else None
        for _ in range(3):
            loss = model(input_ids=batch(), labels=batch()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        if recording is not None:
            recording.close()
    assert losses[0] == losses[1]
    rows = [row for row in read_scales(tmp_path / "scales.jsonl")[1] if row.role == "input" and "down" in row.layer]
    assert {row.step for row in rows} == {1, 2, 3}
    assert all((row.flushed < 0.05) is (row.step > 1) for row in rows)


def test_it_is_refused_in_a_capture_which_casts_weights_without_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fused(planted(build()), SMOOTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    for _ in range(2):
        model(input_ids=batch(), labels=batch()).loss.backward()
        optimizer.step()
    monkeypatch.setattr(source, "captured_without_copies", lambda _: True)
    monkeypatch.setattr(casting, "is_captured", lambda _: True)
    with pytest.raises(RuntimeError, match=r'scaling="smooth-swiglu".* does not go into a CUDA graph'):
        model(input_ids=batch(), labels=batch())


def test_where_it_cannot_be_it_is_refused_or_warned_of() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(64, 64)), SMOOTH)
    with pytest.warns(UserWarning, match=r"smooth-swiglu.* has no effect"):
        fuse(model)
