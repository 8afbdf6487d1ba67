"""FSDP with fused decoder layers: merged weights in flat parameters, and what they train to, gather and save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from fp8booster import FP8Config, FP8Linear, comm, convert_to_fp8, report
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.fsdp.flat_weights import NAME
from fp8booster.nn.fsdp.handle import compress_flat_fsdp
from fp8booster.nn.fuse import fuse
from fp8booster.nn.fused import fused_summary
from fp8booster.nn.fused.merged_layers import merged_layers
from tests.colossal.models import tiny_llama
from tests.distributed import ranks, shared_folder
from tests.nn.fused.models import build
from tests.nn.reference import count_calls
from tests.plugins import test_torch_ddp
from tests.plugins.fsdp_runs import (
    BF16,
    BLOCKS,
    CLOSE,
    LAYERS,
    STRATEGIES,
    UNFUSED,
    WRAPPINGS,
    FP8Weights,
    assert_fsdp_trains_equally,
    boost_with,
    fp8,
    offloading,
    plain_wire,
    whole,
    wrapped,
)
from tests.plugins.test_low_level_zero_census import census, products
from tests.plugins.training import assert_close, assert_equal, boost, rank_batches, train

FUSED = FP8Config(emulate=True, fused=True)
MERGED = "10 of them merged to 4 products"


def fused(**arguments: Any) -> Any:
    """The plugin with fused decoder layers."""
    return fp8(**{"fp8_config": FUSED} | arguments)


def unfused(**arguments: Any) -> Any:
    """The plugin with layers that run one by one."""
    return fp8(fp8_config=UNFUSED, **arguments)


@ranks(2)
@pytest.mark.parametrize("wrapping", ["one unit", "blocks in BF16", "blocks in FP16"])
def test_fsdp_gathers_merged_weights_to_the_bits_that_their_layers_would_cast(wrapping: str) -> None:
    arguments = {"strategy": ShardingStrategy.FULL_SHARD, "fp8_config": FUSED, **WRAPPINGS[wrapping]}
    assert_fsdp_trains_equally(wrapped(gather=False, **arguments), wrapped(gather=True, **arguments))


@ranks(2)
@pytest.mark.parametrize("wrapping", ["blocks", "blocks in FP16"])
def test_fsdp_trains_a_fused_model_as_an_unfused_one(wrapping: str) -> None:
    run = boost(fused(**WRAPPINGS[wrapping]))
    assert MERGED in report(run.model).summary()
    assert_close(train(boost(unfused(**WRAPPINGS[wrapping])), steps=4), train(run, steps=4), CLOSE)
    assert MERGED in report(run.model).summary()


@ranks(2)
@pytest.mark.parametrize("option", [*STRATEGIES[1:3], "16 bits on the wire", "head in FP8"], ids=str)
def test_fsdp_options_go_with_fused_layers(option: ShardingStrategy | str) -> None:
    arguments: dict[str, Any] = dict(WRAPPINGS["blocks in BF16"])
    make: Callable[..., Any] = fp8
    layers = FP8Config().layers
    if option == "16 bits on the wire":
        make = plain_wire
    elif option == "head in FP8":
        layers = _all_layers
    else:
        arguments["sharding_strategy"] = option
    curves = []
    for setting in (FP8Config(emulate=True, layers=layers), FP8Config(emulate=True, fused=True, layers=layers)):
        run = boost(make(**{**arguments, "fp8_config": setting}))
        curves.append(train(run, micro_batches=2))
    assert_close(*curves, CLOSE)
    assert MERGED in report(run.model).summary()


def _all_layers(name: str, module: nn.Module) -> bool:
    return True


@ranks(2)
def test_fsdp_recomputes_fused_layers_to_the_same_bits() -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    arguments = WRAPPINGS["blocks in BF16"]
    assert_fsdp_trains_equally(boost(fused(**arguments)), boost(fused(**arguments), model))


@ranks(2)
def test_fsdp_trains_a_fused_model_with_biases_between_its_weights() -> None:
    blocks = ModuleWrapPolicy({type(build("qwen2").model.layers[0])})
    found, expected = (
        train(boost(make(auto_wrap_policy=blocks, mixed_precision=BF16), build("qwen2", torch.float32)))
        for make in (fused, unfused)
    )
    assert_close(expected, found, CLOSE)


@ranks(2)
def test_fsdp_trains_a_fused_model_whose_head_is_its_embedding() -> None:
    arguments = WRAPPINGS["blocks in BF16"]
    found, expected = (boost(make(**arguments), tiny_llama(tie_word_embeddings=True)) for make in (fused, unfused))
    assert fused_summary(found.model) == "2 decoder layers fused, loss over chunks of logits"
    # to predict a token from itself is easy at once: only the first steps compare
    assert_close(train(expected, steps=2), train(found, steps=2), CLOSE)


@ranks(2)
def test_fsdp_units_with_original_parameters_run_merged_layers() -> None:
    curves = []
    for config in (UNFUSED, FUSED):
        model = convert_to_fp8(tiny_llama(), config)
        if config.fused:
            fuse(model)
        unit = FullyShardedDataParallel(
            model, auto_wrap_policy=BLOCKS, mixed_precision=BF16, use_orig_params=True, device_id=torch.device("cpu")
        )
        compress_flat_fsdp(unit, reduce=False)
        optimizer = torch.optim.AdamW(unit.parameters(), lr=1e-2)
        curve = []
        for batch in rank_batches(3):
            loss = unit(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
    assert_close(*curves, CLOSE)
    assert [merged.why_not_merged for merged in merged_layers(unit)] == 4 * [None]


@ranks(2)
def test_fsdp_runs_all_products_of_a_fused_model_in_fp8() -> None:
    run = boost(fp8(fp8_config=FP8Config(fused=True), **WRAPPINGS["blocks in BF16"]))
    counted, rows = census(run)
    merged = merged_layers(run.model)
    together = {layer for group in merged for layer in group.layers}
    linears = [module for module in run.model.modules() if isinstance(module, nn.Linear)]
    eligible = [module for module in linears if isinstance(module, FP8Linear) and module not in together]
    assert (len(together), len(eligible)) == (10, LAYERS - 10)
    for group in merged:
        outputs = sum(layer.out_features for layer in group.layers)
        eligible.append(nn.Linear(group.layers[0].in_features, outputs, device="meta"))
    (head,) = (module for module in linears if not isinstance(module, FP8Linear))
    assert counted.fp8 == sum(products(eligible, rows).values(), Counter())
    assert counted.other == sum(products([head], rows).values(), Counter())


@ranks(2)
def test_fsdp_sends_for_a_fused_model_the_bytes_of_an_unfused_one() -> None:
    sent = []
    for make in (unfused, fused):
        run = boost(make(**WRAPPINGS["blocks in BF16"]))
        batch = rank_batches(1)[0]
        run.step(batch)
        comm.reset_statistics()
        with count_traffic() as counted:
            run.step(batch)
        sent.append((counted.sent, comm.statistics()[NAME].wire_bytes))
    assert sent[0] == sent[1]


@ranks(2)
@pytest.mark.parametrize("wrapping", ["blocks in BF16", "blocks"])
def test_fsdp_holds_no_merged_weight_between_forward_and_backward(wrapping: str) -> None:
    for make in (fused, lambda **arguments: plain_wire(fp8_config=FUSED, **arguments)):
        with pytest.MonkeyPatch.context() as monkeypatch:
            weights = FP8Weights(monkeypatch)
            run = boost(make(**WRAPPINGS[wrapping]))
            loss = run.loss(rank_batches(1)[0])
            made = weights.made()
            assert made >= LAYERS - 10 + 4
            assert weights.alive() == 0
            run.booster.backward(loss, run.optimizer)
            assert weights.made() >= 2 * made
            assert weights.alive() == 0


@ranks(2)
def test_fsdp_offloads_a_fused_model() -> None:

    with offloading():
        expected, found = (
            train(boost_with(make, "cpu_offload", auto_wrap_policy=BLOCKS), micro_batches=2)
            for make in (unfused, fused)
        )
    assert_close(expected, found, CLOSE)


@ranks(2)
def test_fsdp_runs_one_by_one_what_is_gathered_in_different_units_and_shows_it() -> None:
    each_layer = ModuleWrapPolicy({LlamaDecoderLayer, FP8Linear})
    plugin = fused(auto_wrap_policy=each_layer, mixed_precision=BF16)
    with pytest.MonkeyPatch.context() as monkeypatch:
        lines = count_calls(monkeypatch, plugin.logger, "info")
        run = boost(plugin)
    said = "4 groups of layers not merged (the weights are gathered in different units)"
    assert [said in line for (line,) in lines] == [True]
    expected = train(boost(unfused(auto_wrap_policy=each_layer, mixed_precision=BF16)))
    assert_close(expected, train(run), CLOSE)


@ranks(2)
def test_fsdp_says_at_boost_what_is_fused() -> None:
    for model, said in (
        (tiny_llama(), f"(90 % of the weights of matrix products), 14 emulated in FP32, {MERGED}"),
        (tiny_llama(), "2 decoder layers fused, loss over chunks of logits"),
        (nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "nothing is fused"),
    ):
        plugin = fused()
        with pytest.MonkeyPatch.context() as monkeypatch:
            lines = count_calls(monkeypatch, plugin.logger, "info")
            boost(plugin, model)
        assert [said in line for (line,) in lines] == [True]


@ranks(2)
def test_fsdp_evaluates_a_fused_model_with_the_weights_it_gathered() -> None:
    run = boost(fused(**WRAPPINGS["blocks in BF16"]))
    train(run, steps=1)
    batch = rank_batches(1)[0]
    with torch.no_grad():
        expected = run.loss(batch).item()
        run.model.eval()
        assert_close([expected], [run.loss(batch).item()], 1e-3)


@ranks(2)
def test_fsdp_checkpoints_of_a_fused_model_cross() -> None:
    writer = boost(fused(auto_wrap_policy=BLOCKS))
    train(writer, steps=2)
    writer.loss(rank_batches(1)[0])  # the root unit is whole now
    expected = whole(writer)
    assert list(whole(boost(unfused(auto_wrap_policy=BLOCKS)))) == list(expected)
    for name, form in test_torch_ddp.FORMS.items():
        model, optimizer = test_torch_ddp._save(writer, form, shared_folder(f"fsdp fused/{name}"))
        for make in (fused, unfused):
            reader = boost(make(auto_wrap_policy=BLOCKS))
            train(reader, steps=1)
            reader.booster.load_model(reader.model, model)
            reader.booster.load_optimizer(reader.optimizer, optimizer)
            assert_equal(expected, whole(reader))
