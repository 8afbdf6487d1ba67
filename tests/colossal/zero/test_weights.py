"""A weight that is sent in FP8 is the cast of its whole master, on every rank, and is what the layer multiplies by."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from fp8booster import FP8Config
from fp8booster.config import Formats
from fp8booster.kernels.cast import cast
from fp8booster.nn.weights.casting import Casts
from tests.colossal.zero.runs import Layers, assert_same_on_all_ranks, batch, features, gathered, masters, step, wire
from tests.distributed import ranks, shared_folder
from tests.nn.reference import count_calls
from tests.plugins.test_low_level_zero_fp8 import LAYERS
from tests.plugins.training import STAGES, Boosted, assert_close, assert_equal, boost, native, ours, rank_batches, train

CONFIGS = {
    "defaults": {},
    "powers of two": {"scaling": "amax"},
    "E5M2": {"formats": Formats(weight=torch.float8_e5m2, gradient=torch.float8_e4m3fn)},
}


def assert_is_cast_of_masters(run: Boosted) -> None:
    """Bytes, transpose and scale of every gathered weight, and the value of its working weight."""
    whole = masters(run)
    for name, layer in gathered(run):
        config, weight = layer.fp8_config, layer.weight
        found = layer.fp8_weight.forward([weight], layer.fp8_casts, transpose=True)
        data, transpose, inverse_scale = cast.reference(
            whole[name], config.weight_format, plain=True, transposed=True, power_of_two=config.power_of_two, amax=None
        )
        assert torch.equal(found.data.view(torch.uint8), data.view(torch.uint8)), name
        assert torch.equal(found.transpose.view(torch.uint8), transpose.view(torch.uint8)), name
        assert torch.equal(found.inverse_scale, inverse_scale), name
        assert torch.equal(weight, found.dequantize(*weight.shape).to(weight.dtype)), name
        assert_same_on_all_ranks(found.data)
        assert_same_on_all_ranks(weight)


@ranks(2)
@pytest.mark.parametrize("config", CONFIGS)
def test_a_gathered_weight_is_the_cast_of_the_whole_master(config: str) -> None:
    for stage in STAGES:
        run = boost(wire(stage=stage, fp8_config=FP8Config(**CONFIGS[config], fused=False)))
        assert len(list(gathered(run))) == LAYERS
        for number in range(3):
            train(run, steps=1 + number)
            assert_is_cast_of_masters(run)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_no_weight_is_cast_after_the_first_step(stage: int) -> None:
    run = boost(wire(stage=stage))
    with pytest.MonkeyPatch.context() as monkeypatch:
        casts = count_calls(monkeypatch, Casts, "quantize_weight")
        products = count_calls(monkeypatch, torch, "_scaled_mm")
        run.step(batch())
        assert len(casts) == LAYERS
        products.clear()
        for tokens in rank_batches(3):
            run.step(tokens)
        assert len(casts) == LAYERS
        multiplied = {operand.data_ptr() for pair in products for operand in pair}
        for _, layer in gathered(run):
            kept = layer.fp8_weight.forward([layer.weight], layer.fp8_casts, transpose=True)
            assert {kept.data.data_ptr(), kept.transpose.data_ptr()} <= multiplied
        run.model.eval()
        with torch.no_grad():
            run.loss(batch())
        assert len(casts) == LAYERS


def saved(run: Boosted, name: str) -> tuple[str, dict[str, torch.Tensor]]:
    """Path and tensors of a checkpoint."""
    path = shared_folder(name) / "model.safetensors"
    run.booster.save_model(run.model, str(path), use_safetensors=True)
    run.booster.checkpoint_io._sync_io()
    dist.barrier()
    return str(path), load_file(path)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_holds_the_masters_in_16_bits(stage: int) -> None:
    run = boost(wire(stage=stage))
    train(run)
    name, layer = next(gathered(run))
    in_fp8 = layer.weight.detach().clone()
    path, tensors = saved(run, f"masters {stage}")
    expected = {key: value.bfloat16() for key, value in masters(run).items()}
    assert_equal(expected, tensors)
    assert not torch.equal(in_fp8, tensors[name])
    # saving changes nothing that training sees
    undisturbed = boost(wire(stage=stage))
    train(undisturbed)
    assert train(undisturbed) == train(run)
    for plugin in (native(stage=stage), ours(stage=stage), wire(stage=stage)):
        reader = boost(plugin)
        train(reader, steps=1)
        reader.booster.load_model(reader.model, path)
        assert_equal(expected, reader.parameters())
        assert_equal({key: value.float() for key, value in expected.items()}, masters(reader))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_loaded_weight_is_what_the_next_forward_uses(stage: int) -> None:
    writer, reader, fresh = (boost(wire(stage=stage)) for _ in range(3))
    train(writer)
    path, _ = saved(writer, f"loaded {stage}")
    train(reader, steps=2)
    stale = reader.loss(batch()).item()
    for run in (reader, fresh):
        run.booster.load_model(run.model, path)
    assert reader.loss(batch()).item() == fresh.loss(batch()).item() != stale
    train(reader, steps=1)
    assert_is_cast_of_masters(reader)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_resumed_from_its_masters_goes_on_bit_for_bit(stage: int) -> None:
    from fp8booster.colossal.zero.rank_files import load_master_weights, save_master_weights

    runs = [boost(wire(stage=stage, overlap_allgather=late)) for late in (False, True)]
    folder = shared_folder(f"resumed {stage}")
    path = str(folder / "model.bin")
    optimizer = str(folder / "optimizer.bin")
    train(runs[0])
    runs[0].booster.save_model(runs[0].model, path)
    runs[0].booster.save_optimizer(runs[0].optimizer, optimizer)
    save_master_weights(runs[0].model.unwrap(), runs[0].optimizer, Path(folder))
    dist.barrier()
    runs[1].booster.load_model(runs[1].model, path)
    runs[1].booster.load_optimizer(runs[1].optimizer, optimizer)
    load_master_weights(runs[1].model.unwrap(), runs[1].optimizer, Path(folder))
    assert_is_cast_of_masters(runs[1])
    assert train(runs[0]) == train(runs[1])
    assert_equal(*map(masters, runs))


@ranks(2)
def test_masters_of_another_rank_or_model_are_refused() -> None:
    from fp8booster.colossal.zero.rank_files import load_master_weights, save_master_weights

    run, other = boost(wire()), boost(wire(), Layers(64, 64, 64))
    folder = shared_folder("swapped masters")
    save_master_weights(run.model.unwrap(), run.optimizer, folder)
    dist.barrier()
    with pytest.raises(ValueError, match=r"belongs to another model or run: .* is missing there and"):
        load_master_weights(other.model.unwrap(), other.optimizer, folder)
    with pytest.raises(ValueError, match="is damaged or no file of tensors; copy the checkpoint again"):
        load_with(run, folder, lambda first, second: second.write_bytes(second.read_bytes()[:100]))
    save_master_weights(run.model.unwrap(), run.optimizer, folder)
    dist.barrier()
    with pytest.raises(ValueError, match="holds the master weights of rank 1 of 2: files were renamed"):
        load_with(run, folder, swap)
    with pytest.raises(FileNotFoundError, match="holds 1 of 2 files of master weights; copy the whole"):
        load_with(run, folder, lambda first, second: second.unlink())


def swap(first: Path, second: Path) -> None:
    aside = first.rename(first.with_suffix(".aside"))
    second.rename(first)
    aside.rename(second)


def load_with(run: Boosted, folder: Path, change: Callable[[Path, Path], object]) -> None:
    """Load masters after rank 0 has changed the files of ranks 0 and 1."""
    from fp8booster.colossal.zero.rank_files import load_master_weights

    dist.barrier()  # no rank still reads them
    if dist.get_rank() == 0:
        change(*sorted(folder.glob("rank-*-of-00002.safetensors")))
    dist.barrier()
    try:
        load_master_weights(run.model.unwrap(), run.optimizer, folder)
    finally:
        dist.barrier()


@ranks(2)
def test_a_change_of_a_weight_by_hand_is_seen() -> None:
    run = boost(wire())
    train(run)
    before = run.loss(batch()).item()
    with torch.no_grad():
        for _, layer in gathered(run):
            layer.weight.mul_(0.5)
    assert_close([before], [run.loss(batch()).item()], 0.5)
    assert run.loss(batch()).item() != before


@ranks(2)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_master_that_is_not_finite_makes_its_weight_nan_on_every_rank(value: str) -> None:
    for spoiled_rank in range(dist.get_world_size()):
        run = boost(wire())
        train(run, steps=1)
        name, layer = next(gathered(run))
        if dist.get_rank() == spoiled_rank:
            run.optimizer.get_working_to_master_map()[id(layer.weight)][3] = float(value)
        run.optimizer.publish_masters()
        assert layer.weight.isnan().all()
        others = [other.weight for other_name, other in gathered(run) if other_name != name]
        assert all(weight.isfinite().all() for weight in others)
        assert run.loss(batch()).isnan()


@ranks(2)
@pytest.mark.parametrize("which", ["first", "second"])
def test_backward_through_a_graph_from_before_a_step_is_refused(which: str) -> None:
    for only_fp8_layers in (True, False):
        run = boost(wire(), Layers(64, 64, 64) if only_fp8_layers else None)
        forward = run.model if only_fp8_layers else run.loss
        x = features() if only_fp8_layers else batch()
        if which == "second":
            step(run, x, forward=forward)
        loss = forward(x)
        step(run, x, forward=forward)
        if only_fp8_layers and which == "first":
            continue  # each layer holds a copy of its own, which no step overwrites
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run.booster.backward(loss, run.optimizer)


@ranks(2)
def test_so_is_one_through_a_graph_that_reads_a_16_bit_weight_itself() -> None:
    run = boost(wire(), Layers(64, 64, 64))
    step(run, features())
    product = nn.functional.linear(features().requires_grad_(), run.model.unwrap().layers[0].weight)
    step(run, features())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


@ranks(2)
def test_a_graph_of_copies_from_before_the_first_step_goes_backward_right() -> None:
    gradients = []
    for between in (False, True):
        run = boost(wire(stage=1), Layers(64, 64, 64))
        run.model.unwrap().layers[0].weight.register_hook(lambda gradient: gradients.append(gradient.clone()))
        loss = run.model(features())
        if between:
            step(run, features())
            gradients.pop()
        run.booster.backward(loss, run.optimizer)
    assert torch.equal(*gradients)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_nan_gradient_of_one_rank_reaches_the_norm_of_all(stage: int) -> None:
    run = boost(wire(stage=stage, max_norm=1.0))
    _, layer = next(gathered(run))

    def spoil(gradient: torch.Tensor) -> torch.Tensor:
        spoiled = gradient.clone()
        spoiled[0, 0] = torch.nan
        return spoiled

    if dist.get_rank() == 1:
        layer.weight.register_hook(spoil)
    run.step(batch())
    assert torch.tensor(run.optimizer.get_grad_norm()).isnan()
