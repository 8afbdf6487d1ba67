"""Gemini with FP8: all products, the bytes on the wire, the weights in chunks of bytes, and every option."""

from __future__ import annotations

import copy
import gc
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fp8booster import FP8Config, comm, report
from fp8booster.kernels.cast import cast_reference
from fp8booster.monitor.traffic import bytes_sent, count_traffic
from fp8booster.nn import FP8Linear
from fp8booster.optim import HybridAdam
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import CLOSE, Layers, assert_same_on_all_ranks, batch, features, step
from tests.plugins.census_checks import Census, products
from tests.plugins.gemini_runs import (
    OFFLOADED,
    boost,
    config,
    fp8_chunks,
    layers,
    masters,
    native,
    ours,
    weights,
    wire,
)
from tests.plugins.registry import check, check_each
from tests.plugins.training import Boosted, assert_close, assert_equal, train

FP16 = {"precision": "fp16", "initial_scale": 2.0**8}
LAYERS = 14

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "kept gathered": {"min_chunk_size_m": 32},
    "no overlap": {"enable_async_reduce": False},
    "ZeRO stage 2": {"shard_param_frac": 0.0},
    "half the optimizer on the host": {"offload_optim_frac": 0.5},
    "optimizer on the host": {"offload_optim_frac": 1.0},
    "all on the host": OFFLOADED,
    "auto": {"placement_policy": "auto"},
    "auto, masters back on the GPU": {"placement_policy": "auto", "gpu_margin_mem_ratio": 0.9},
    "prefetch": {"max_prefetch": 2},
    "auto with prefetch": {"placement_policy": "auto", "max_prefetch": 2},
    "accumulation": {"enable_gradient_accumulation": True},
    "accumulation on the host": {"enable_gradient_accumulation": True, **OFFLOADED},
    "outputs in FP32": {"force_outputs_fp32": True},
}
"""What only moves work."""


def census(run: Boosted, tokens: torch.Tensor) -> Census:
    """What one step multiplies."""
    with Census() as counted:
        loss = run.loss(tokens)
        with torch._C.DisableTorchFunction():  # Gemini's own class of tensors cannot go backward under a mode
            loss = loss.as_subclass(torch.Tensor)
        run.booster.backward(loss, run.optimizer)
        run.optimizer.step()
    return counted


@check
def all_products_but_those_of_the_vocabulary_head_run_in_fp8() -> None:
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


LARGE = {"hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "vocab_size": 64}


def _traffic(plugin: Any, model: nn.Module) -> Any:
    run = boost(plugin, model)
    tokens = batch() % 64
    run.step(tokens)
    comm.reset_statistics()
    with count_traffic() as counted:
        run.step(tokens)
    return run, counted


@check_each("defaults", "clipping")
def a_step_sends_at_most_0_52_of_the_bytes_of_16_bits(option: str) -> None:
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
    sharded = [
        chunk
        for chunk in run.model.chunk_manager.get_chunks(run.model.fp16_params)
        if not chunk.keep_gathered
    ]
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


def assert_are_casts_of_masters(run: Any, power_of_two: bool = False) -> None:
    """The bytes and the scale of every FP8 weight, read as its layer reads them, on all ranks."""
    whole, manager = masters(run), run.model.chunk_manager
    for name, layer in layers(run):
        chunk, config = manager.get_chunk(layer.weight), layer.fp8_config
        manager.access_chunk(chunk)
        found = layer.fp8_weight.get(layer.weight, config, transposed=True)
        transpose, _ = layer.fp8_weight.in_backward(layer.weight, config)()
        data, expected_transpose, inverse_scale = cast_reference(
            whole[f"{name}.weight"],
            config.weight_format,
            plain=True,
            transposed=True,
            power_of_two=power_of_two,
            amax=None,
        )
        assert torch.equal(found.data.view(torch.uint8), data.view(torch.uint8)), name
        assert torch.equal(transpose.view(torch.uint8), expected_transpose.view(torch.uint8)), name
        assert torch.equal(found.inverse_scale, inverse_scale), name
        assert_same_on_all_ranks(found.data)
        if not chunk.keep_gathered:
            manager.release_chunk(chunk)
        else:
            manager.fake_release_chunk(chunk)


@check_each("defaults", "kept gathered", "all on the host", "powers of two", "E5M2")
def a_weight_is_the_cast_of_its_whole_master(option: str) -> None:
    formats = {
        "powers of two": {"power_of_two": True},
        "E5M2": {"weight_format": torch.float8_e5m2, "gradient_format": torch.float8_e4m3fn},
    }.get(option, {})
    run = boost(wire(fp8_config=config(fused=False, **formats), **OPTIONS.get(option, {})))
    for _ in range(2):
        assert_are_casts_of_masters(run, power_of_two="power_of_two" in formats)
        train(run, steps=1)


@check
def no_weight_of_an_fp8_layer_exists_in_16_bits() -> None:
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


@check
def what_lies_between_steps_is_one_byte_a_weight() -> None:
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


@check_each(*OPTIONS)
def what_only_moves_work_changes_no_bit(option: str) -> None:
    """But for sums over gradients of other chunks: blocks that share a scale differ where chunks do."""
    expected, found = boost(wire()), boost(wire(**OPTIONS[option]))
    losses, others = train(expected), train(found)
    if option == "kept gathered":  # all-reduced in place of reduce-scattered
        assert_close(losses, others, CLOSE)
        return
    assert losses == others
    assert_equal(masters(expected), masters(found))


@check_each(
    "defaults",
    "16 bits on the wire",
    "no masters",
    "rowwise",
    "fp16",
    "one scale a message",
    "all on the host",
)
def it_trains_near_native(option: str) -> None:
    options = {
        "defaults": {"fp8_config": FP8Config()},
        "16 bits on the wire": {"fp8_communication": False},
        "no masters": {"master_weights": False},
        "rowwise": {"fp8_config": config(granularity="rowwise")},
        "fp16": FP16,
        "one scale a message": {"fp8_config": config(gradient_scaling="tensor")},
        "all on the host": OFFLOADED,
    }[option]
    theirs = {
        name: value for name, value in options.items() if name not in ("fp8_config", "fp8_communication")
    }
    in_16_bits, losses = train(boost(native(**theirs))), train(boost(wire(**options)))
    assert_close(in_16_bits, losses, CLOSE)
    assert losses != in_16_bits


@check_each(*({}, OFFLOADED, {"min_chunk_size_m": 32}), "auto")
def gradients_are_clipped(options: Any) -> None:
    options = {"placement_policy": "auto"} if options == "auto" else options
    free, clipped, reference = (
        boost(plugin)
        for plugin in (wire(**options), wire(max_norm=1e-3, **options), native(max_norm=1e-3, **options))
    )
    for run in (free, clipped, reference):
        train(run, steps=1)
    assert_close([reference.optimizer.get_grad_norm()], [clipped.optimizer.get_grad_norm()], 0.02)

    def moment(run: Any) -> float:
        total = torch.zeros(1)
        for state in run.optimizer.optim.state.values():
            total += state["exp_avg"].square().sum()
        return total.item() ** 0.5

    scale = clipped.optimizer.get_grad_norm() / 1e-3
    assert scale > 10
    assert_close([moment(free)], [moment(clipped) * scale], 0.01)


@check_each("defaults", "kept gathered", "accumulation on the host")
def accumulated_gradients_are_those_of_one_large_batch(option: str) -> None:
    options = {"enable_gradient_accumulation": True} | OPTIONS[option]
    run, reference = boost(wire(**options)), boost(native(**options))
    losses, expected = (train(one, steps=2, micro_batches=3) for one in (run, reference))
    assert_close(expected, losses, CLOSE)
    found, moments = ([], [])
    for one, into in ((run, found), (reference, moments)):
        into += [
            state["exp_avg"].abs().sum().item() for state in one.optimizer.state_dict(False)["state"].values()
        ]
    assert_close(moments, found, 0.1)


@check
def an_overflow_skips_the_step_and_the_next_one_is_taken() -> None:
    for options in ({}, {"enable_gradient_accumulation": True}):
        overflowing = FP16 | {"initial_scale": 2.0**30, "hysteresis": 1, "backoff_factor": 2.0**-20}
        run = boost(wire(fp8_config=config(fused=False), **overflowing, **options))
        before = masters(run)
        train(run, steps=1)
        assert_equal(before, masters(run))
        assert_are_casts_of_masters(run)
        train(run, steps=1)
        after = masters(run)
        assert not any(torch.equal(before[name], after[name]) for name in before)


@check
def activations_that_are_computed_again_change_no_bit() -> None:
    for reentrant in (True, False):
        runs = [boost(wire()), boost(wire())]
        runs[1].model.unwrap().gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            runs[1].model.unwrap().enable_input_require_grads()
        assert train(runs[0]) == train(runs[1])


@check
def evaluation_and_inference_read_the_same_weights() -> None:
    run = boost(wire(fp8_config=config(fused=False)))
    train(run, steps=1)
    run.model.eval()
    losses = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            losses.append(run.loss(batch()).item())
    run.model.train()
    again = run.loss(batch())
    run.booster.backward(again, run.optimizer)
    assert losses == [again.item()] * 2
    run.optimizer.step()
    network = boost(wire(), Layers(64, 64, 64))
    step(network, features())
    with torch.inference_mode():
        found = network.model(features())
    assert found == network.model(features())


class Penalised(Layers):
    """Adds the norm of a weight to the loss, and multiplies by it outside its layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layers[0].weight
        return super().forward(x) + weight.square().mean() + F.linear(x, weight).float().square().mean()


@check
def a_weight_that_is_read_outside_its_layer_has_its_values() -> None:
    for options in ({}, {"min_chunk_size_m": 32}, {"shard_param_frac": 0.0}):
        runs = [boost(plugin, Penalised(64, 64, 64)) for plugin in (wire(**options), native(**options))]
        losses = [[step(run, features()) for _ in range(4)] for run in runs]
        assert_close(losses[1], losses[0], 2 * CLOSE)
        moments = [run.optimizer.state_dict(False)["state"][0]["exp_avg"] for run in runs]
        assert (moments[0] - moments[1]).norm() < 0.1 * moments[1].norm()


@check
def a_weight_read_where_gemini_does_not_see_it_is_nan() -> None:
    run = boost(wire(), Layers(64, 64))
    layer = run.model.unwrap().layers[0]
    with torch._C.DisableTorchFunction():
        assert torch.Tensor(layer.weight.detach()).isnan().all()


@check
def backward_through_a_graph_from_before_a_step_is_refused() -> None:
    run = boost(wire(), Layers(64, 64, 64))
    stale = run.model(features())
    run.model.chunk_manager.accessed_chunks.clear()
    run.model.publish_masters()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run.booster.backward(stale, run.optimizer)


@check_each("nan", "inf")
def a_master_that_is_not_finite_makes_its_weight_nan_on_every_rank(value: str) -> None:
    for spoiled_rank in range(dist.get_world_size()):
        run = boost(wire(), Layers(64, 64, 64))
        step(run, features())
        chunk = fp8_chunks(run)[0]
        if dist.get_rank() == spoiled_rank:
            chunk.paired_chunk.payload[3] = float(value)
        run.model.publish_masters()
        assert chunk.inverse_scales.isnan().sum() == 1
        assert run.model(features()).isnan()


@check
def a_nan_gradient_of_one_rank_reaches_the_norm_of_all() -> None:
    run = boost(wire(max_norm=1.0), Layers(64, 64, 64))
    loss = run.model(features())
    run.booster.backward(loss * (torch.nan if dist.get_rank() == 1 else 1.0), run.optimizer)
    run.optimizer.step()
    assert torch.tensor(run.optimizer.get_grad_norm()).isnan()


@check
def a_frozen_layer_stays_in_fp8_and_needs_no_gather() -> None:
    model = Layers(64, 64, 64)
    model.layers[0].requires_grad_(False)
    frozen = model.layers[0].weight.detach().bfloat16()
    run = boost(wire(), model)
    losses = [step(run, features()) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert len(report(run.model).fp8) == 2
    assert torch.equal(frozen, weights(run)["layers.0.weight"])
    assert len(fp8_chunks(run)[0].tensors_info) == 1


NOT_GATHERED = {
    "size no multiple of 16": lambda: (wire(), Layers(64, 72, 64)),
    "rowwise scales": lambda: (wire(fp8_config=config(granularity="rowwise")), Layers(64, 64, 64)),
    "no master weights": lambda: (wire(master_weights=False), Layers(64, 64, 64)),
}


@check_each(*NOT_GATHERED)
def weights_that_do_not_travel_in_fp8_train_and_are_counted_with_the_reason(reason: str) -> None:
    plugin, model = NOT_GATHERED[reason]()
    reference = boost(native(master_weights=reason != "no master weights"), copy.deepcopy(model))
    run = boost(plugin, model)
    assert len(report(run.model).fp8) == 2
    assert not fp8_chunks(run)
    comm.reset_statistics()
    losses = [step(run, features()) for _ in range(4)]
    assert_close([step(reference, features()) for _ in range(4)], losses, 2 * CLOSE)
    row = comm.statistics()["chunk gather"]
    assert set(row.uncompressed) == {reason}
    assert row.wire_bytes == row.raw_bytes
    # no FP8 copy of the model outlives its use
    assert all(layer.fp8_weight._quantized is None for _, layer in layers(run))


@check
def a_head_in_fp8_that_an_embedding_shares_is_gathered_in_16_bits() -> None:
    everything = config(layers=lambda name, module: True)
    run = boost(wire(fp8_config=everything), tiny_llama(tie_word_embeddings=True))
    comm.reset_statistics()
    losses = train(run)
    assert set(comm.statistics()["chunk gather"].uncompressed) == {"shared with another module"}
    assert sum(len(chunk.tensors_info) for chunk in fp8_chunks(run)) == LAYERS
    assert len(report(run.model).fp8) == LAYERS + 1
    assert_close(train(boost(native(), tiny_llama(tie_word_embeddings=True))), losses, 3 * CLOSE)


@check
def biases_and_empty_batches_are_taken() -> None:
    run = boost(wire(), Layers(64, 64, 64))
    assert all(type(layer).__mro__[2] is FP8Linear for _, layer in layers(run))
    assert run.model.unwrap().layers[0](torch.zeros(0, 64, dtype=torch.bfloat16)).shape == (0, 64)
    before = masters(run)
    step(run, features())
    after = masters(run)
    assert not any(torch.equal(before[name], after[name]) for name in before)


@check
def torchs_adamw_turns_into_ours_and_other_optimizers_are_refused() -> None:
    from colossalai.booster import Booster

    losses = []
    for make in (
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        lambda parameters: HybridAdam(parameters, lr=1e-2, weight_decay=0.01),
    ):
        for plugin in (wire(), ours()):
            model = Layers(64, 64, 64)
            optimizer = make(model.parameters())
            booster = Booster(plugin=plugin)
            model, wrapped, *_ = booster.boost(model, optimizer)
            assert type(optimizer) is HybridAdam
            for _ in range(2):
                loss = model(features())
                booster.backward(loss, wrapped)
                wrapped.step()
            losses.append(loss.item())
    assert losses[:2] == losses[2:]
    model = Layers(64, 64)
    with pytest.raises(TypeError, match=r"SGD cannot train shards .* give torch.optim.AdamW"):
        Booster(plugin=wire()).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


@check
def wrong_values_are_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"'max_prefetchs'; did you mean max_prefetch"):
        ours(max_prefetchs=2)
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        wire(fp8_config={"power_of_two": True})
    with pytest.raises(ValueError, match=r"'bf16' or 'fp16', not 'fp32'"):
        wire(precision="fp32")
    with pytest.raises(ValueError, match=r"no layer of the model would compute in FP8"):
        boost(wire(), nn.Sequential(nn.LayerNorm(64)))
