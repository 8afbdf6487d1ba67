"""Gemini with fused decoder layers: merged weights in FP8 chunks, and what they train to, gather and save."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, comm, report
from fp8booster.config import Formats
from fp8booster.kernels.cast import cast
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.fused.merged_layers import MergedLayers, merged_layers
from tests.colossal.gemini.observations import FP16, LAYERS, OPTIONS, census
from tests.colossal.gemini.runs import boost, config, fp8_chunks, layers, masters, native, wire
from tests.colossal.gemini.test_checkpoints import FORMS, moments, save, whole
from tests.colossal.gemini.test_fp8 import LARGE
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import CLOSE, Layers, assert_same_on_all_ranks, batch, features, step
from tests.distributed import ranks, shared_folder
from tests.nn.fused.models import build
from tests.nn.reference import count_calls
from tests.plugins.test_low_level_zero_census import products
from tests.plugins.training import Boosted, assert_close, assert_equal, train

MERGED = "10 of them merged to 4 products"


def fused(**arguments: Any) -> Any:
    """The plugin with fused decoder layers."""
    options = arguments.pop("options", {})
    return wire(fp8_config=config(fused=True, **options), **arguments)


def unfused(**arguments: Any) -> Any:
    """The plugin with layers that run one by one."""
    options = arguments.pop("options", {})
    return wire(fp8_config=config(fused=False, **options), **arguments)


def merged_of(run: Boosted) -> list[MergedLayers]:
    """Those that run as one."""
    return [merged for merged in merged_layers(run.model.unwrap()) if merged.why_not_merged is None]


@ranks(2)
@pytest.mark.parametrize("option", ["defaults", "kept gathered", "all on the host"])
def test_merged_weights_are_the_cast_of_their_masters_under_one_scale(option: str) -> None:
    run = boost(fused(**OPTIONS[option]))
    manager = run.model.chunk_manager
    name_of = {id(layer): name for name, layer in layers(run)}
    for _ in range(2):
        of_all = masters(run)
        assert len(merged_of(run)) == 4
        for merged in merged_of(run):
            weights, setting = merged.weights, merged.layers[0].fp8_config
            chunk = manager.get_chunk(weights[0])
            manager.access_chunk(chunk)
            found = merged.fp8_weight.forward(weights, merged.fp8_casts, transpose=True)
            begin = chunk.tensors_info[weights[0]].offset
            assert found.data.data_ptr() == chunk.cuda_global_chunk.data_ptr() + begin  # no copy
            assert found.inverse_scale.data_ptr() % 16 == 0
            data, transpose, inverse_scale = cast.reference(
                torch.cat([of_all[f"{name_of[id(layer)]}.weight"] for layer in merged.layers]),
                setting.weight_format,
                plain=True,
                transposed=True,
                power_of_two=False,
                amax=None,
            )
            late_transpose, late_scale = merged.fp8_weight.backward(weights, merged.fp8_casts)()
            assert torch.equal(found.data.view(torch.uint8), data.view(torch.uint8))
            assert torch.equal(late_transpose.view(torch.uint8), transpose.view(torch.uint8))
            assert torch.equal(found.inverse_scale, inverse_scale)
            assert torch.equal(late_scale, inverse_scale)
            assert_same_on_all_ranks(found.data)
            parts = data.split([len(weight) for weight in weights])
            for layer, part in zip(merged.layers, parts, strict=True):  # one by one they read the same
                alone = layer.fp8_weight.forward([layer.weight], layer.fp8_casts, transpose=True)
                assert torch.equal(alone.data.view(torch.uint8), part.view(torch.uint8))
                assert torch.equal(alone.inverse_scale, inverse_scale)
            (manager.fake_release_chunk if chunk.keep_gathered else manager.release_chunk)(chunk)
        train(run, steps=1)


@ranks(2)
def test_all_products_run_in_fp8_and_merged_ones_once() -> None:
    for options in ({}, {"fp8_communication": False}):
        run = boost(wire(fp8_config=FP8Config(fused=True), **options))
        tokens = batch()
        run.step(tokens)
        counted = census(run, tokens)
        merged = merged_of(run)
        together = {layer for group in merged for layer in group.layers}
        eligible = [layer for _, layer in layers(run) if layer not in together]
        assert (len(together), len(eligible)) == (10, 4)
        for group in merged:
            outputs = sum(layer.out_features for layer in group.layers)
            eligible.append(nn.Linear(group.layers[0].in_features, outputs, device="meta"))
        assert len(report(run.model).fp8) == LAYERS
        assert counted.fp8 == sum(products(eligible, tokens.numel()).values(), Counter())
        head = run.model.unwrap().lm_head
        assert counted.other == sum(products([head], tokens.numel()).values(), Counter())


@ranks(2)
@pytest.mark.parametrize("option", ["defaults", "16 bits on the wire", "no masters", "fp16", "E5M2", "head in FP8"])
def test_a_fused_model_learns_as_an_unfused_one(option: str) -> None:
    arguments, setting = {
        "defaults": ({}, {}),
        "16 bits on the wire": ({"fp8_communication": False}, {}),
        "no masters": ({"master_weights": False}, {}),
        "fp16": (FP16, {}),
        "E5M2": ({}, {"formats": Formats(weight=torch.float8_e5m2, gradient=torch.float8_e4m3fn)}),
        "head in FP8": ({}, {"layers": _all_layers}),
    }[option]
    run = boost(fused(**arguments, options=setting))
    assert MERGED in report(run.model).summary()
    expected = train(boost(unfused(options=setting, **arguments)), steps=4)
    assert_close(expected, train(run, steps=4), CLOSE)
    assert MERGED in report(run.model).summary()


def _all_layers(name: str, module: nn.Module) -> bool:
    return True


@ranks(2)
@pytest.mark.parametrize("option", ["all on the host", "prefetch", "auto with prefetch", "accumulation on the host"])
def test_what_only_moves_work_changes_no_bit_of_a_fused_model(option: str) -> None:
    expected, found = boost(fused()), boost(fused(**OPTIONS[option]))
    assert train(expected) == train(found)
    assert_equal(masters(expected), masters(found))


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activations_that_are_computed_again_change_no_bit_of_a_fused_model(reentrant: bool) -> None:
    runs = [boost(fused()), boost(fused())]
    runs[1].model.unwrap().gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        runs[1].model.unwrap().enable_input_require_grads()
    assert train(runs[0]) == train(runs[1])


@ranks(2)
def test_accumulated_gradients_of_a_fused_model_are_those_of_one_large_batch() -> None:
    options = {"enable_gradient_accumulation": True}
    runs = boost(native(**options)), boost(fused(**options))
    expected, losses = (train(one, steps=2, micro_batches=3) for one in runs)
    assert_close(expected, losses, CLOSE)


@ranks(2)
@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_models_with_and_without_biases_learn_fused(family: str) -> None:
    expected, found = (train(boost(plugin, build(family)), steps=3) for plugin in (unfused(), fused()))
    assert_close(expected, found, CLOSE)


@ranks(2)
def test_a_fused_model_evaluates_with_the_weights_that_it_trains() -> None:
    run = boost(fused())
    train(run, steps=1)
    run.model.eval()
    with torch.no_grad():
        evaluated = run.loss(batch()).item()
    run.model.train()
    again = run.loss(batch())
    run.booster.backward(again, run.optimizer)
    run.optimizer.step()
    assert_close([evaluated], [again.item()], 1e-3)


@ranks(2)
def test_casts_take_the_amax_that_the_kernels_deliver() -> None:
    run = boost(fused())
    run.step(batch())
    given: list[bool] = []
    reference = cast.reference

    def counting(*args: Any, amax: torch.Tensor | None, **options: Any) -> Any:
        given.append(amax is not None)
        return reference(*args, amax=amax, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cast, "reference", counting)
        run.step(batch())
    # as without an engine: attention's output, and the gradient that it gets, come from torch
    assert (len(given), given.count(False)) == (2 * 8, 2 * 1)


@ranks(2)
def test_a_fused_model_sends_no_more_than_an_unfused_one() -> None:
    sent = []
    for plugin in (unfused, fused):
        run = boost(plugin(min_chunk_size_m=2**-4), tiny_llama(**LARGE))
        tokens = batch() % 64
        run.step(tokens)
        comm.reset_statistics()
        with count_traffic() as counted:
            run.step(tokens)
        rows = comm.statistics().rows
        assert sum(row.wire_bytes for row in rows.values()) == counted.sent
        assert set(rows["chunk gather"].uncompressed) == {"not the weight of an FP8 layer"}
        sent.append({name: row.wire_bytes for name, row in rows.items()})
    of_unfused, of_fused = sent
    assert of_unfused.keys() == of_fused.keys()
    # chunks that end where merged weights do hold no padding
    assert all(of_fused[name] <= of_unfused[name] for name in of_unfused), sent
    values = sum(parameter.numel() for parameter in tiny_llama(**LARGE).parameters())
    assert of_fused["reduce_scatter_tensor"] + of_fused["all_reduce"] < 1.05 * values / 2


@ranks(2)
def test_chunks_hold_merged_weights_whole_and_nothing_else() -> None:
    run = boost(fused(), tiny_llama(num_hidden_layers=3, intermediate_size=272))
    assert "15 of them merged to 6 products" in report(run.model).summary()
    assert len(fp8_chunks(run)) > 3
    for chunk in fp8_chunks(run):
        used = sum(parameter.numel() for parameter in chunk.tensors_info)
        assert chunk.chunk_size - used < 16 * torch.distributed.get_world_size()
        assert chunk.paired_chunk.chunk_size == chunk.chunk_size


@ranks(2)
def test_what_cannot_be_merged_runs_one_by_one_and_is_shown() -> None:
    def model() -> nn.Module:
        made = tiny_llama()
        made.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
        made.model.layers[1].mlp.requires_grad_(False)
        return made

    plugin = fused()
    with pytest.MonkeyPatch.context() as monkeypatch:
        lines = count_calls(monkeypatch, plugin.logger, "info")
        run = boost(plugin, model())
    said = "7 of them merged to 3 products, 1 group of layers not merged (only some of the weights are trained)"
    assert any(said in line and "2 decoder layers fused, loss over chunks of logits" in line for (line,) in lines)
    notes = {row.name: row.notes for row in report(run.model).rows}
    assert "not merged: only some" in notes["model.layers.0.self_attn.q_proj"]
    assert "not merged" not in notes["model.layers.1.self_attn.q_proj"]
    assert_close(train(boost(unfused(), model())), train(run), CLOSE)


@ranks(2)
def test_a_model_without_decoder_layers_is_left_alone() -> None:
    plugin = fused()
    with pytest.MonkeyPatch.context() as monkeypatch:
        lines = count_calls(monkeypatch, plugin.logger, "info")
        run = boost(plugin, Layers(64, 64, 64))
    assert any("nothing is fused" in line for (line,) in lines)
    reference = boost(unfused(), Layers(64, 64, 64))
    assert [step(run, features()) for _ in range(2)] == [step(reference, features()) for _ in range(2)]


@ranks(2)
def test_backward_through_merged_weights_from_before_a_step_is_refused() -> None:
    run = boost(fused())
    stale = run.loss(batch())
    run.model.chunk_manager.accessed_chunks.clear()
    run.model.publish_masters()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.booster.backward(stale, run.optimizer)


@ranks(2)
def test_checkpoints_of_a_fused_model_cross() -> None:
    writer = boost(fused())
    train(writer, steps=2)
    expected, states = whole(writer), moments(writer)
    assert expected.keys() == tiny_llama().state_dict().keys()
    assert_equal({name: value.bfloat16() for name, value in masters(writer).items()}, expected)
    for name, plugins in (("safetensors shards", (fused(), unfused())), ("one file", (native(),))):
        model, optimizer = save(writer, FORMS[name], shared_folder(f"fused/{name}"))
        for plugin in plugins:
            reader = boost(plugin)
            train(reader, steps=1)
            reader.booster.load_model(reader.model, model)
            reader.booster.load_optimizer(reader.optimizer, optimizer)
            assert_equal(expected, whole(reader))
            assert_equal(states, moments(reader))
    assert_close(train(writer, steps=2), train(reader, steps=2), 2e-2)
