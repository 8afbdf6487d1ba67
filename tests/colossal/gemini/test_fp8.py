"""Gemini with FP8: all products, the bytes on the wire, the weights in chunks of bytes."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, comm, report
from fp8booster.colossal.gemini.chunks import ReducedChunk
from fp8booster.comm.transport import agree_on_amax
from fp8booster.config import Formats
from fp8booster.monitor.traffic import bytes_sent, count_traffic
from fp8booster.nn import sharding
from fp8booster.nn.linear import speed_model
from fp8booster.optim import hybrid_adam
from tests.colossal.gemini.observations import LAYERS, OPTIONS, assert_are_casts_of_masters, census
from tests.colossal.gemini.runs import boost, config, fp8_chunks, layers, native, wire
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import Layers, batch, features, step
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_census import products
from tests.plugins.training import rank_batches, train


@ranks(2)
def test_all_products_but_those_of_the_vocabulary_head_run_in_fp8() -> None:
    for options in ({}, {"fp8_communication": False}, {"min_chunk_size_m": 32}):
        run = boost(wire(fp8_config=FP8Config(fused=False), **options))
        tokens = batch()
        for _ in range(2):
            counted = census(run, tokens)
        network = run.model.unwrap()
        eligible = [layer for _, layer in layers(run)]
        assert len(eligible) == LAYERS
        assert len(report(run.model).fp8) == LAYERS
        assert counted.fp8 == sum(products(eligible, tokens.numel()).values(), Counter())
        assert counted.other == sum(products([network.lm_head], tokens.numel()).values(), Counter())
        assert set(counted.batched) == {torch.float32}  # the angles of the rotary embedding


@ranks(2)
def test_ranks_choose_fp8_alike_for_any_number_of_tokens() -> None:
    """Chunks are sent in the order in which layers run, which a choice by a rank's own tokens would change."""
    for communication in (True, False):
        run = boost(wire(fp8_config=FP8Config(fused=False), fp8_communication=communication))
        tokens = batch()
        with mock.patch.object(speed_model, "fp8_pays", return_value=False):
            counted = census(run, tokens)
        eligible = [layer for _, layer in layers(run)]
        assert counted.fp8 == sum(products(eligible, tokens.numel()).values(), Counter())


LARGE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 64}


def _traffic(plugin: Any, model: nn.Module) -> Any:
    run = boost(plugin, model)
    tokens = batch() % 64
    run.step(tokens)
    comm.reset_statistics()
    with count_traffic() as counted:
        run.step(tokens)
    return run, counted


@ranks(2)
@pytest.mark.parametrize("option", ["defaults", "clipping"])
def test_a_step_sends_at_most_0_52_of_the_bytes_of_16_bits(option: str) -> None:
    options = {"clipping": {"max_norm": 1.0}}.get(option, {})
    large = {"min_chunk_size_m": 2**-4}
    run, in_fp8 = _traffic(wire(**large, **options), tiny_llama(**LARGE))
    found, ranks = comm.statistics(), dist.get_world_size()
    # native gathers 16-bit chunks that hold norms beside matrices again and again
    _, in_16_bits = _traffic(native(**large, **options), tiny_llama(**LARGE))
    assert in_fp8.sent <= 0.52 * in_16_bits.sent
    # each collective of FP8 weights and of gradients, against the same one in 16 bits
    for name in ("reduce_scatter_tensor", "all_reduce"):
        row = found[name]
        assert not row.uncompressed
        assert row.wire_bytes <= 0.52 * row.raw_bytes, name
    gathers = found["chunk gather"]
    sharded = [chunk for chunk in run.model.chunk_manager.get_chunks(run.model.fp16_params) if not chunk.keep_gathered]
    sixteen = [chunk for chunk in sharded if chunk not in fp8_chunks(run)]
    assert set(gathers.uncompressed) == {"not the weight of an FP8 layer"}
    once = sum(chunk.shard_size for chunk in fp8_chunks(run)) * (ranks - 1)
    plain = bytes_sent("all_gather_into_tensor", sum(chunk.shard_mem for chunk in sixteen), ranks)
    # forward and backward gather each chunk; one at the end of forward is there when backward begins
    assert once < gathers.wire_bytes - 2 * plain <= 2 * once
    # every byte is in the statistics, but for the norm
    norm = 2 * bytes_sent("all_reduce", 4, ranks) if options else 0
    assert sum(row.wire_bytes for row in found.rows.values()) == in_fp8.sent - norm
    assert found["amax of weights"].calls == 1


@ranks(2)
@pytest.mark.parametrize("option", ["defaults", "kept gathered", "all on the host", "powers of two", "E5M2"])
def test_a_weight_is_the_cast_of_its_whole_master(option: str) -> None:
    formats = {
        "powers of two": {"scaling": "amax"},
        "E5M2": {"formats": Formats(weight=torch.float8_e5m2, gradient=torch.float8_e4m3fn)},
    }.get(option, {})
    run = boost(wire(fp8_config=config(fused=False, **formats), **OPTIONS.get(option, {})))
    for _ in range(2):
        assert_are_casts_of_masters(run, power_of_two="scaling" in formats)
        train(run, steps=1)


@ranks(2)
@pytest.mark.parametrize("option", ["defaults", "kept gathered"])
def test_casts_take_the_amax_that_the_optimizer_tells(option: str) -> None:
    """As it does on a GPU; one with hooks, which may change the masters, tells none."""
    batches = rank_batches(4)
    plain = boost(wire(max_norm=1e-3, **OPTIONS[option]))
    expected = [plain.step(batch) for batch in batches]
    known = []

    def observed(shards: Any, group: Any, amaxes: Any) -> torch.Tensor:
        known.append([amax is not None for amax in amaxes])
        assert [amax is not None for amax in amaxes] == [told and shard.numel() > 0 for shard in shards]
        return agree_on_amax(shards, group, amaxes)

    with (
        mock.patch.object(hybrid_adam, "_in_one_pass", return_value=True),
        mock.patch.object(sharding, "agree_on_amax", observed),
    ):
        told = False
        run = boost(wire(max_norm=1e-3, **OPTIONS[option]))
        told = True
        found = [run.step(batch) for batch in batches[:2]]
        told = False
        run.optimizer.unwrap().register_step_post_hook(lambda *_: None)
        found += [run.step(batch) for batch in batches[2:]]
    assert [any(of_step) for of_step in known] == [False, True, True, False, False]
    assert found == expected


@ranks(2)
def test_a_check_before_the_update_knows_the_norm_and_hides_no_amax() -> None:
    known, norms = [], []

    def observed(shards: Any, group: Any, amaxes: Any) -> torch.Tensor:
        known.append(any(amax is not None for amax in amaxes))
        return agree_on_amax(shards, group, amaxes)

    with (
        mock.patch.object(hybrid_adam, "_in_one_pass", return_value=True),
        mock.patch.object(sharding, "agree_on_amax", observed),
    ):
        run = boost(wire(max_norm=1e-3))
        run.optimizer.before_update = lambda: norms.append(run.optimizer.get_grad_norm())
        for each in rank_batches(2):
            run.step(each)
    assert known == [False, True, True]
    assert min(norms) > 1e-3
    assert len(norms) == 2


@ranks(2)
@pytest.mark.parametrize("option", ["defaults", "kept gathered", "accumulation", "accumulation on the host"])
def test_a_check_before_the_update_ends_that_step_alone(option: str) -> None:
    batches = rank_batches(4)
    plain, run = boost(wire(**OPTIONS[option])), boost(wire(**OPTIONS[option]))
    expected = [plain.step(batch) for batch in (batches[0], *batches[2:])]

    def refuse() -> None:
        raise ArithmeticError("enough")

    found = [run.step(batches[0])]
    run.optimizer.before_update = refuse
    with pytest.raises(ArithmeticError, match="enough"):
        run.step(batches[1])
    run.optimizer.before_update = None
    found += [run.step(batch) for batch in batches[2:]]
    assert found == expected


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_gradients_that_are_forgotten_change_nothing(option: str) -> None:
    batches = rank_batches(4)
    plain, run = (boost(wire(max_norm=1.0, **OPTIONS[option])) for _ in range(2))
    expected = [plain.step(batch) for batch in (batches[0], *batches[2:])]
    found = [run.step(batches[0])]
    run.booster.backward(run.loss(batches[1]) * torch.nan, run.optimizer)
    run.optimizer.zero_grad()
    found += [run.step(batch) for batch in batches[2:]]
    assert found == expected


@ranks(2)
def test_what_lies_behind_a_chunks_last_gradient_does_not_count() -> None:
    tails, reduce = [], ReducedChunk.reduce

    def reduce_with_tail(chunk: ReducedChunk, **options: Any) -> None:
        tail = chunk.cuda_global_chunk[chunk.utilized_size :].fill_(1e4)
        tails.append(tail.numel())
        reduce(chunk, **options)

    def losses() -> list[float]:
        run = boost(wire(), Layers(64, 64, 616, 72))  # 752 biases in a chunk of 768, of which some share a scale
        return [step(run, features()) for _ in range(3)]

    expected = losses()
    with mock.patch.object(ReducedChunk, "reduce", reduce_with_tail):
        assert losses() == expected
    assert 16 in tails


@ranks(2)
def test_no_weight_of_an_fp8_layer_exists_in_16_bits() -> None:
    run = boost(wire(), Layers(64, 272, 304, 64))  # sizes that no other check has
    seen = []

    def look(*_: Any) -> None:
        gc.collect()
        sizes = {layer.weight.shape for _, layer in layers(run)}
        sizes |= {torch.Size([shape.numel()]) for shape in sizes}
        with torch._C.DisableTorchFunction():  # to look is to read, for Gemini
            found = [
                tensor
                for tensor in gc.get_objects()
                if issubclass(type(tensor), torch.Tensor)
                and tensor.dtype is torch.bfloat16
                and tensor.shape in sizes
                and tensor.untyped_storage().nbytes() > 2
            ]
        seen.append(len(found))

    for layer in run.model.unwrap().layers:
        layer.register_forward_hook(look)
    run.model(features())
    assert seen == [0, 0, 0]
    chunks = fp8_chunks(run)
    assert all(chunk.cuda_global_chunk.dtype is torch.uint8 for chunk in chunks)
    assert run.model.chunk_manager.total_mem["cuda"] > 0


@ranks(2)
def test_what_lies_between_steps_is_one_byte_a_weight() -> None:
    for options in (
        {"enable_async_reduce": False},
        {"enable_async_reduce": False, "enable_gradient_accumulation": True},
    ):
        run = boost(wire(**options))
        train(run, steps=2)
        manager = run.model.chunk_manager
        assert not manager.accessed_chunks
        for chunk in fp8_chunks(run):
            assert not chunk.is_gathered
            assert chunk.memory_usage == {"cuda": chunk.shard_size, "cpu": 0}
            assert chunk.grad_chunk.memory_usage == {"cuda": 0, "cpu": 0}
        counted = {"cuda": 0, "cpu": 0}
        for group in manager.chunk_groups.values():
            for chunk in group:
                for one in filter(None, (chunk, chunk.grad_chunk)):
                    for place, size in one.memory_usage.items():
                        counted[place] += size
        states = sum(
            value.nbytes
            for state in run.optimizer.optim.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        )
        assert manager.total_mem["cuda"] == counted["cuda"]
        assert manager.total_mem["cpu"] == counted["cpu"] + states
