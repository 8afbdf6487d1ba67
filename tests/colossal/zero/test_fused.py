"""Fused decoder layers whose weights are gathered together."""

from __future__ import annotations

import pytest
import torch

from fp8booster import FP8Config, forget_weights
from fp8booster.colossal.zero import gathered_weights
from fp8booster.colossal.zero.gathered_weights import WeightBatch
from fp8booster.kernels.cast import cast
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from fp8booster.nn.sharding import Filled
from fp8booster.nn.weights.casting import Casts
from tests.colossal.zero.runs import CLOSE, assert_same_on_all_ranks, batch, gathered, masters, names, wire
from tests.distributed import ranks
from tests.nn.reference import count_calls
from tests.plugins.training import STAGES, Boosted, assert_close, boost, native, train

FUSED = FP8Config(fused=True)


def whole_masters(run: Boosted, layers: MergedLayers) -> torch.Tensor:
    """The masters of merged layers, stacked by rows."""
    of_all = masters(run)
    name_of = {id(parameter): name for name, parameter in names(run).items()}
    return torch.cat([of_all[name_of[id(weight)]] for weight in layers.weights])


@ranks(2)
def test_merged_layers_wait_for_their_own_weights_alone() -> None:
    run = boost(wire(fp8_config=FUSED))
    order, batches, fill, unpack = [], [], gathered_weights.fill_layers, WeightBatch.unpack

    def note_fill(filled: list[Filled], *arguments: object) -> None:
        order.extend(each.source for each in filled)
        fill(filled, *arguments)

    def note_unpack(batch: WeightBatch) -> None:
        order.extend(gathered.layer for gathered in batch.weights)
        unpack(batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gathered_weights, "BATCH_BYTES", 1)  # a batch a weight
        patch.setattr(gathered_weights, "fill_layers", note_fill)
        patch.setattr(WeightBatch, "unpack", note_unpack)
        train(run, steps=1)
    for group in merged_layers(run.model.unwrap()):
        last = len(order) - 1 - order[::-1].index(group.fp8_weight)
        batches.append(last)
        assert max(map(order.index, group.layers)) < last
    assert min(batches) < max(
        order.index(layer) for group in merged_layers(run.model.unwrap()) for layer in group.layers
    )


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_merged_weights_are_the_cast_of_their_masters_under_one_scale(stage: int) -> None:
    run = boost(wire(stage=stage, fp8_config=FUSED))
    groups = merged_layers(run.model.unwrap())
    assert [len(group.layers) for group in groups] == [3, 2, 3, 2]
    for _ in range(2):
        train(run, steps=1)
        for group in groups:
            found = group.fp8_weight.forward(group.weights, group.fp8_casts, transpose=True)
            assert group.fp8_weight.is_provided(group.weights)
            data, transpose, inverse_scale = cast.reference(
                whole_masters(run, group),
                group.layers[0].fp8_config.weight_format,
                plain=True,
                transposed=True,
                power_of_two=False,
                amax=None,
            )
            assert torch.equal(found.data.view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(found.transpose.view(torch.uint8), transpose.view(torch.uint8))
            assert torch.equal(found.inverse_scale, inverse_scale)
            values = (data.float() * inverse_scale).split([len(weight) for weight in group.weights])
            for weight, value in zip(group.weights, values, strict=True):
                assert torch.equal(weight, value.to(weight.dtype))
                assert_same_on_all_ranks(weight)


@ranks(2)
def test_no_merged_weight_is_cast_after_the_first_step_and_each_is_multiplied_whole() -> None:
    run = boost(wire(stage=2, fp8_config=FUSED))
    with pytest.MonkeyPatch.context() as monkeypatch:
        casts = count_calls(monkeypatch, Casts, "quantize_weight")
        run.step(batch())
        groups = merged_layers(run.model.unwrap())
        of_groups = [layer for group in groups for layer in group.layers]
        alone = [layer for _, layer in gathered(run) if layer not in of_groups]
        assert len(alone) == 4
        assert len(casts) == len(groups) + len(alone)
        products = count_calls(monkeypatch, torch, "_scaled_mm")
        run.step(batch())
        run.step(batch())
        assert len(casts) == len(groups) + len(alone)
        multiplied = {operand.shape for pair in products for operand in pair}
        assert all(group.fp8_weight.held.data.shape in multiplied for group in groups)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_fused_model_learns_as_in_16_bits(stage: int) -> None:
    assert_close(
        train(boost(native(stage=stage)), steps=5), train(boost(wire(stage=stage, fp8_config=FUSED)), steps=5), CLOSE
    )


@ranks(2)
def test_weights_of_layers_that_run_one_by_one_serve_them_too() -> None:
    fused, hooked = (boost(wire(stage=2, fp8_config=FUSED)) for _ in range(2))
    for group in merged_layers(hooked.model.unwrap()):
        group.layers[0].register_forward_hook(lambda module, args, output: None)
    assert_close(train(fused, steps=4), train(hooked, steps=4), CLOSE)


@ranks(2)
def test_a_step_that_gives_some_of_the_merged_no_gradient_keeps_their_scale_right() -> None:
    run = boost(wire(stage=2, fp8_config=FUSED))
    train(run, steps=1)
    group = merged_layers(run.model.unwrap())[0]
    frozen = group.weights[1]
    before = masters(run)
    frozen.requires_grad_(False)
    train(run, steps=1)
    name = next(name for name, parameter in names(run).items() if parameter is frozen)
    assert torch.equal(masters(run)[name], before[name])
    data, _, inverse_scale = cast.reference(
        whole_masters(run, group),
        group.layers[0].fp8_config.weight_format,
        plain=True,
        transposed=False,
        power_of_two=False,
        amax=None,
    )
    found = group.fp8_weight.forward(group.weights, group.fp8_casts, transpose=True)
    assert torch.equal(found.data.view(torch.uint8), data.view(torch.uint8))
    assert torch.equal(found.inverse_scale, inverse_scale)


@ranks(2)
def test_weights_changed_by_hand_and_forgotten_are_cast_anew_until_the_next_step() -> None:
    run = boost(wire(stage=2, fp8_config=FUSED))
    train(run, steps=1)
    model = run.model.unwrap()
    groups = merged_layers(model)
    with torch.no_grad():
        for group in groups:
            for weight in group.weights:
                weight.data.mul_(2)
    assert all(group.fp8_weight.is_provided(group.weights) for group in groups)  # nobody saw it
    forget_weights(model)
    for group in groups:
        config = group.layers[0].fp8_config
        expected = Casts(config).quantize_weight(torch.cat(list(group.weights)), transposed=True)
        found = group.fp8_weight.forward(group.weights, group.fp8_casts, transpose=True)
        assert torch.equal(found.data.view(torch.uint8), expected.data.view(torch.uint8))
        assert torch.equal(found.transpose.view(torch.uint8), expected.transpose.view(torch.uint8))
        assert torch.equal(found.inverse_scale, expected.inverse_scale)
        for layer in group.layers:
            alone = layer.fp8_weight.forward([layer.weight], layer.fp8_casts, transpose=True)
            expected = Casts(config).quantize_weight(layer.weight, transposed=True)
            assert torch.equal(alone.inverse_scale, expected.inverse_scale)
    train(run, steps=1)
    assert all(group.fp8_weight.is_provided(group.weights) for group in groups)
