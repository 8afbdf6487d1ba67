"""Weights that exist in FP8 alone between steps (`WeightCopies(high_precision=False)`)."""

from __future__ import annotations

import copy
import io
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fp8booster import FP8Config, forget_weights
from fp8booster.config import WeightCopies
from fp8booster.nn import report
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import CLOSE, batch, features, gathered, masters, step, wire
from tests.distributed import ranks, shared_folder
from tests.plugins.test_low_level_zero_fp8 import LAYERS
from tests.plugins.training import STAGES, Boosted, assert_close, assert_equal, boost, train


def alone(fused: bool = False, transposes: bool | None = None, **arguments: object) -> Boosted:
    """A run whose weights of FP8 layers have no value in 16 bits."""
    copies = WeightCopies(high_precision=False, transposes=transposes)
    return boost(wire(fp8_config=FP8Config(fused=fused, weight_copies=copies), **arguments))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_it_trains_bit_for_bit_as_with_16_bits(stage: int) -> None:
    for fused in (False, True):
        beside = boost(wire(stage=stage, max_norm=1.0, fp8_config=FP8Config(fused=fused)))
        run = alone(stage=stage, max_norm=1.0, fused=fused)
        assert train(beside, steps=4) == train(run, steps=4)
        assert_equal(masters(beside), masters(run))


@ranks(2)
def test_by_default_large_models_keep_their_weights_in_fp8_alone() -> None:
    from fp8booster.nn.weights import memory

    undisturbed, memory.gpu_memory = memory.gpu_memory, lambda: 1
    try:
        run = boost(wire())
        asked = boost(wire(fp8_config=FP8Config(fused=False, weight_copies=WeightCopies(high_precision=True))))
    finally:
        memory.gpu_memory = undisturbed
    beside = boost(wire())
    assert train(beside, steps=3) == train(run, steps=3)
    assert_equal(masters(beside), masters(run))
    assert gathered(run)
    for _, layer in gathered(run):
        assert layer.held_weight.isnan().all()
        assert layer.fp8_weight.forward([layer.held_weight], layer.fp8_casts, transpose=False).transpose.numel() == 0
    assert "without 16-bit copies and transposes of their weights" in report(run.model).summary()
    train(asked, steps=1)
    for kept in (beside, asked):
        for _, layer in gathered(kept):
            assert not layer.held_weight.isnan().any()


class Reader(nn.Module):
    """Multiplies by the weights of some of its layers without calling them, as Mamba and WavLM do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.called, self.both = (nn.Linear(64, 64) for _ in range(2))
        self.read = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.called(x).tanh()
        x = x + self.both(x) + x @ self.both.weight
        return (self.read.weight @ x.t()).float().square().mean()


class Bypassing(nn.Module):
    """Calls its layer in training alone, and multiplies by its weight in evaluation, as fast paths do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x) if self.training else F.linear(x, self.layer.weight, self.layer.bias)
        return y.float().square().mean()


def reader(weights_in_16_bits: bool) -> Boosted:
    options = FP8Config(weight_copies=WeightCopies(high_precision=weights_in_16_bits), always=True)
    return boost(wire(fp8_config=options, max_norm=1.0), Reader())


@ranks(2)
def test_what_reads_a_weight_without_its_layer_finds_its_values() -> None:
    beside, alone = reader(True), reader(False)
    for number in range(3):
        expected = step(beside, features())
        assert math.isfinite(expected)
        assert step(alone, features()) == expected, number
    assert_equal(masters(beside), masters(alone))
    started, trained = masters(reader(False)), masters(alone)
    assert not any(torch.equal(started[name], trained[name]) for name in ("both.weight", "read.weight"))
    model = alone.model.unwrap()
    assert model.called.held_weight.isnan().all()  # what nobody reads takes no memory
    notes = {row.name: (row.precision, row.notes) for row in report(model).rows}
    assert notes["called"] == ("FP8", "")
    assert notes["both"] == ("FP8", "its 16-bit copy is kept, for its weight is read without it")
    assert notes["read"] == ("BF16", "its weight is read without the layer, which has not run")


@ranks(2)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_what_reads_a_weight_in_evaluation_alone_finds_its_values(mode: str) -> None:
    runs, losses = [], []
    for weights_in_16_bits in (True, False):
        torch.manual_seed(0)
        options = FP8Config(weight_copies=WeightCopies(high_precision=weights_in_16_bits), always=True)
        run = boost(wire(fp8_config=options), Bypassing())
        losses += [step(run, features()) for _ in range(2)]
        run.model.eval()
        with getattr(torch, mode)():
            losses.append(run.model(features()).item())
        run.model.train()
        losses.append(step(run, features()))
        runs.append(run)
    assert all(map(math.isfinite, losses))
    assert losses[:4] == losses[4:]
    (row,) = report(runs[1].model).rows
    assert row.notes == "its 16-bit copy is kept, for its weight is read without it"


@ranks(2)
def test_an_evaluation_between_steps_leaves_merged_layers_merged() -> None:
    """Also where one of their weights has values in 16 bits because somebody looked at it."""
    run, undisturbed = alone(fused=True), alone(fused=True)
    assert train(run, steps=2) == train(undisturbed, steps=2)
    (attention, *_) = (module for module in run.model.modules() if hasattr(module, "q_proj"))
    assert attention.q_proj.weight.isfinite().all()
    for _ in range(2):
        run.model.eval()
        with torch.no_grad():
            assert run.loss(batch()).isfinite()
        run.model.train()
        assert train(run, steps=2) == train(undisturbed, steps=2)
    assert attention.k_proj.held_weight.isnan().all()
    merged = report(run.model).merged
    assert len(merged) == 4
    assert all(group.why_not_merged is None for group in merged)


@ranks(2)
def test_an_optimizer_that_reads_the_weights_finds_their_values() -> None:
    from colossalai.booster import Booster
    from colossalai.nn.optimizer import Lamb

    runs = []
    for weights_in_16_bits in (True, False):
        model = tiny_llama()
        booster = Booster(
            plugin=wire(fp8_config=FP8Config(weight_copies=WeightCopies(high_precision=weights_in_16_bits)))
        )
        model, optimizer, *_ = booster.boost(model, Lamb(model.parameters(), lr=1e-3))
        runs.append(Boosted(booster, model.train(), optimizer))
    assert train(runs[0], steps=3) == train(runs[1], steps=3)
    assert_equal(*map(masters, runs))


@ranks(2)
def test_it_trains_bit_for_bit_as_with_transposes_kept() -> None:
    for fused in (False, True):
        beside = alone(fused=fused)
        run = alone(fused=fused, transposes=False)
        assert all(
            layer.fp8_weight.forward([layer.held_weight], layer.fp8_casts, transpose=False).transpose.numel() == 0
            for _, layer in gathered(run)
        )
        assert train(beside, steps=3) == train(run, steps=3)
        assert_equal(masters(beside), masters(run))
        run.optimizer.gather_working_weights()  # a checkpoint reads them
        for name, layer in gathered(run):
            assert layer.held_weight.isfinite().all(), name


@ranks(2)
def test_compiled_code_leaves_layers_without_weights_to_eager_code() -> None:
    """Only on the layers: what is compiled around them takes other roundings."""
    expected, found = alone(), alone()
    for _, layer in list(gathered(found))[::5]:  # of each shape one; all of them are compiled below
        layer.compile(backend="eager")
    assert train(expected, steps=2) == train(found, steps=2)
    network = found.model.unwrap()
    network.forward = torch.compile(network.forward, backend="eager")
    assert_close(train(expected, steps=2), train(found, steps=2), CLOSE)


@ranks(2)
def test_moving_or_forgetting_weights_after_a_step_loses_none() -> None:
    expected, found = alone(), alone()
    for run in (expected, found):
        train(run, steps=1)
    found.model.to("cpu")
    forget_weights(found.model)
    # the first forward casts again what the FP8 weights were, rounded to BF16
    assert train(found, steps=3) == pytest.approx(train(expected, steps=3), rel=0.01)


@ranks(2)
def test_boosting_again_keeps_the_weights() -> None:
    run = alone()
    losses = train(run, steps=2)
    optimizer = torch.optim.AdamW(run.model.parameters(), lr=1e-3)
    model, optimizer, *_ = run.booster.boost(run.model, optimizer)
    assert train(Boosted(run.booster, model, optimizer), steps=2)[0] == pytest.approx(losses[-1], rel=0.2)


@ranks(2)
def test_a_step_between_a_forward_and_its_backward_is_refused_without_transposes() -> None:
    run = alone(transposes=False)
    loss = run.loss(batch())
    train(run, steps=1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@ranks(2)
def test_after_a_step_the_parameters_are_nan_and_take_no_memory() -> None:
    run = alone()
    assert all(layer.held_weight.isfinite().all() for _, layer in gathered(run))
    train(run, steps=1)
    layers = [layer for _, layer in gathered(run)]
    assert len(layers) == LAYERS
    for layer in layers:
        assert layer.held_weight.isnan().all()
        assert layer.held_weight.untyped_storage().nbytes() <= 16
    assert run.loss(batch()).isfinite()
    run.model.eval()
    with torch.no_grad():
        assert run.loss(batch()).isfinite()
        assert run.loss(batch()[:, :3]).isfinite()  # so few tokens that BF16 would be faster


@ranks(2)
@pytest.mark.parametrize("how", ["state dict", "checkpoint"])
def test_what_is_saved_holds_values_and_changes_nothing(how: str) -> None:
    run, undisturbed = alone(), alone()
    train(run), train(undisturbed)
    if how == "state dict":
        saved = run.model.unwrap().state_dict()
        for name, layer in gathered(run):
            copy = layer.fp8_weight.forward([layer.held_weight], layer.fp8_casts, transpose=True)
            assert torch.equal(saved[name], copy.dequantize(*layer.held_weight.shape).to(layer.held_weight.dtype))
    else:
        path = str(shared_folder("alone") / "model.bin")
        run.booster.save_model(run.model, path)
        dist.barrier()
        saved = torch.load(path, weights_only=True)
        assert_equal({name: value.bfloat16() for name, value in masters(run).items()}, saved)
    assert train(run) == train(undisturbed)
    assert all(layer.held_weight.isnan().all() for _, layer in gathered(run))


@ranks(2)
@pytest.mark.parametrize("what", ["model", "network", "fused model"])
def test_a_pickle_or_a_copy_holds_values_and_changes_nothing(what: str) -> None:
    run, undisturbed = (alone(fused="fused" in what) for _ in range(2))
    train(run), train(undisturbed)
    one = run.model.unwrap() if what == "network" else run.model
    file = io.BytesIO()
    torch.save(one, file)
    file.seek(0)
    tokens = batch()
    expected = run.loss(tokens)
    for other in (torch.load(file, weights_only=False), copy.deepcopy(one)):
        assert all(value.isfinite().all() for value in other.state_dict().values())
        loss = other(input_ids=tokens, labels=tokens).loss
        # cast from 16-bit weights, not from their masters
        assert_close([expected.item()], [loss.item()], CLOSE)
    assert train(run) == train(undisturbed)
    assert all(layer.held_weight.isnan().all() for _, layer in gathered(run))


@ranks(2)
def test_a_run_goes_on_from_its_checkpoint_bit_for_bit() -> None:
    from fp8booster.colossal.zero.rank_files import load_master_weights, save_master_weights

    writer, reader = alone(), alone()
    folder = shared_folder("alone resumed")
    path, optimizer = str(folder / "model.bin"), str(folder / "optimizer.bin")
    train(writer)
    train(reader, steps=1)  # it has released its weights
    writer.booster.save_model(writer.model, path)
    writer.booster.save_optimizer(writer.optimizer, optimizer)
    save_master_weights(writer.model.unwrap(), writer.optimizer, Path(folder))
    dist.barrier()
    reader.booster.load_model(reader.model, path)
    reader.booster.load_optimizer(reader.optimizer, optimizer)
    load_master_weights(reader.model.unwrap(), reader.optimizer, Path(folder))
    assert train(writer) == train(reader)
    assert_equal(masters(writer), masters(reader))


@ranks(2)
def test_data_that_weights_are_given_is_evaluated_and_kept_until_the_next_step() -> None:
    run, undisturbed = alone(), alone()
    assert train(run, steps=2) == train(undisturbed, steps=2)
    with torch.no_grad():
        run.model.eval()
        before = run.loss(batch()).item()
        for _, layer in gathered(run):
            layer._parameters["weight"].data = torch.zeros(layer.held_weight.shape, dtype=torch.bfloat16)
        run.model.eval()
        zeros = run.loss(batch()).item()
        saved = run.model.unwrap().state_dict()
        assert not any(saved[name].any() for name, _ in gathered(run))
        assert run.loss(batch()).item() == zeros != before
    plain = tiny_llama().bfloat16().eval()
    plain.load_state_dict(saved)
    assert_close([plain(input_ids=batch(), labels=batch()).loss.item()], [zeros], CLOSE)


@ranks(2)
def test_data_that_one_of_merged_weights_is_given_stays_when_the_others_get_their_values() -> None:
    run = alone(fused=True)
    train(run, steps=1)
    layer = dict(gathered(run))["model.layers.0.self_attn.q_proj.weight"]
    with torch.no_grad():
        run.model.eval()
        before = run.loss(batch()).item()
        layer._parameters["weight"].data = torch.full(layer.held_weight.shape, 0.25, dtype=torch.bfloat16)
        run.model.eval()
        changed = run.loss(batch()).item()
        run.model.unwrap().state_dict()
        assert run.loss(batch()).item() == changed != before
