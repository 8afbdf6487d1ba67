"""`TorchFSDPPlugin`: without `use_fp8` it is Colossal-AI's, with it products, weights and gradients are in FP8."""

from __future__ import annotations

import inspect
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.utils import parametrizations
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from fp8booster import FP8Config, FP8Linear, comm, convert_to_fp8, report
from fp8booster.comm import Encoding, FlatFSDPState, flat_fsdp_hook
from fp8booster.comm.links import ESTIMATED
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.fsdp.flat_weights import NAME
from fp8booster.nn.fsdp.handle import compress_flat_fsdp
from fp8booster.nn.linear.conv1d import FP8Conv1D
from fp8booster.nn.sharding import NOT_FP8
from fp8booster.optim import HybridAdam
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import Layers, features, step
from tests.distributed import ranks
from tests.nn.experts.families import batch_of, tiny_mixture
from tests.nn.models import tiny_gpt2
from tests.nn.reference import count_calls
from tests.plugins import test_torch_ddp
from tests.plugins.fsdp_runs import (
    BF16,
    BLOCKS,
    CLOSE,
    LAYERS,
    OPTIONS,
    QUICK,
    STRATEGIES,
    TRIED,
    UNFUSED,
    WRAPPINGS,
    FP8Weights,
    alone,
    assert_fsdp_trains_equally,
    boost_with,
    fp8,
    native,
    offloading,
    ours,
    plain_wire,
    wrapped,
)
from tests.plugins.test_low_level_zero_census import census, products
from tests.plugins.training import assert_close, assert_equal, boost, rank_batches, train
from tests.plugins.training import native as native_zero
from tests.plugins.training import ours as ours_zero

# ---- without use_fp8 ----


@ranks(2)
def test_fsdp_tries_every_argument_of_the_native_plugin() -> None:
    names = list(inspect.signature(type(native()).__init__).parameters)[1:]
    assert names == [*OPTIONS, "fp8_communication"]


@ranks(2)
@pytest.mark.parametrize("option", TRIED)
def test_fsdp_without_fp8_trains_as_the_native_plugin(option: str) -> None:
    with offloading():
        assert_fsdp_trains_equally(*(boost_with(make, option) for make in (native, ours)), micro_batches=2)


@ranks(2)
def test_fsdp_by_position_means_what_it_means_in_the_native_plugin() -> None:
    assert ours(*OPTIONS.values()).fsdp_kwargs == native(**OPTIONS).fsdp_kwargs
    assert ours(*OPTIONS.values(), True).fp8_communication
    assert not fp8(fp8_communication=True).fp8_communication  # Colossal-AI's hooks stay out
    assert not ours().support_no_sync()


@ranks(2)
def test_fsdp_names_an_unknown_option_and_refuses_a_wrong_configuration() -> None:
    with pytest.raises(TypeError, match=r"'sharding'; did you mean sharding_strategy"):
        ours(sharding=1)
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        fp8(fp8_config={"scaling": "amax"})
    with pytest.raises(ValueError, match=r"no linear layers"):
        boost(fp8(), nn.Sequential(nn.Embedding(8, 16), nn.LayerNorm(16)))


# ---- products ----


@ranks(2)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_fsdp_runs_all_products_but_those_of_the_vocabulary_head_in_fp8(wrapping: str) -> None:
    run = boost(fp8(fp8_config=FP8Config(fused=False), **WRAPPINGS[wrapping]))
    counted, rows = census(run)
    linears = [module for module in run.model.modules() if isinstance(module, nn.Linear)]
    eligible = [module for module in linears if isinstance(module, FP8Linear)]
    (head,) = set(linears) - set(eligible)
    assert len(eligible) == LAYERS
    assert counted.fp8 == sum(products(eligible, rows).values(), Counter())
    assert counted.other == sum(products([head], rows).values(), Counter())


@ranks(2)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_fsdp_in_fp8_stays_near_native(wrapping: str) -> None:
    expected, found, uncompressed = (train(boost(make(**WRAPPINGS[wrapping]))) for make in (native, fp8, plain_wire))
    assert_close(expected, found, CLOSE)
    assert len({tuple(losses) for losses in (expected, found, uncompressed)}) == 3


@ranks(2)
@pytest.mark.parametrize("option", TRIED)
def test_fsdp_options_go_with_fp8(option: str) -> None:
    with offloading():
        expected, found = (train(boost_with(make, option), micro_batches=2) for make in (native, fp8))
    assert_close(expected, found, CLOSE)


@ranks(2)
def test_fsdp_recomputes_activations_in_fp8() -> None:
    model = tiny_llama()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    arguments = {"auto_wrap_policy": BLOCKS, "mixed_precision": BF16}
    assert_fsdp_trains_equally(boost(fp8(**arguments)), boost(fp8(**arguments), model))


@ranks(2)
def test_fsdp_evaluates_with_the_weights_it_gathered() -> None:
    run = boost(fp8(fp8_config=UNFUSED, **WRAPPINGS["blocks in BF16"]))
    train(run, steps=1)
    batch = rank_batches(1)[0]
    with torch.no_grad():
        expected = run.loss(batch)
        run.model.eval()
        assert run.loss(batch) == expected


@ranks(2)
def test_fsdp_trains_weights_that_are_computed_for_each_forward() -> None:
    losses = []
    for make in (native, fp8):
        network = Layers(64, 64, 64, 64)
        nn.utils.spectral_norm(network.layers[0])
        parametrizations.weight_norm(network.layers[1])
        run = boost(make(), network.bfloat16())
        losses.append([step(run, features()) for _ in range(3)])
    assert_close(*losses, within=3 * CLOSE)


@ranks(2)
def test_fsdp_says_at_boost_what_is_in_fp8() -> None:
    sizes = f"; sizes from which FP8 is sent: {ESTIMATED.source}"
    for plugin, wire in (
        (fp8(fp8_config=FP8Config(fused=False)), "gradients are sent in FP8, and FP8 layers' weights" + sizes),
        (plain_wire(fp8_config=FP8Config(fused=False)), "gradients and weights are sent uncompressed"),
    ):
        with pytest.MonkeyPatch.context() as monkeypatch:
            lines = count_calls(monkeypatch, plugin.logger, "info")
            boost(plugin)
        assert [line for (line,) in lines] == [
            "FP8: 14 of 15 linear layers (90 % of the weights of matrix products); "
            f"1 in FP32 (FP8Config.layers leaves it out); {wire}"
        ]


# ---- weights ----


@ranks(2)
@pytest.mark.parametrize("case", [*(f"{strategy.name} {name}" for strategy in STRATEGIES[:2] for name in WRAPPINGS)])
def test_fsdp_gathers_in_fp8_the_bits_that_a_layer_would_cast(case: str) -> None:
    strategy, _, wrapping = case.partition(" ")
    arguments = {"strategy": ShardingStrategy[strategy], **WRAPPINGS[wrapping]}
    assert_fsdp_trains_equally(wrapped(gather=False, **arguments), wrapped(gather=True, **arguments))


@ranks(2)
def test_fsdp_units_with_original_parameters_gather_the_same_bits() -> None:
    curves = []
    for gather in (False, True):
        model = convert_to_fp8(tiny_llama(), QUICK)
        shapes = [row.shape for row in report(model).rows]
        unit = FullyShardedDataParallel(
            model, auto_wrap_policy=BLOCKS, mixed_precision=BF16, use_orig_params=True, device_id=torch.device("cpu")
        )
        compress_flat_fsdp(unit, gather=gather, reduce=False)
        assert [row.shape for row in report(unit).rows] == shapes
        optimizer = torch.optim.AdamW(unit.parameters(), lr=1e-2)
        curve = []
        for batch in rank_batches(3):
            loss = unit(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        assert "FP8: 14 of 15 linear layers" in report(unit).summary()
        curves.append(curve)
    assert curves[0] == curves[1]


@ranks(2)
@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_fsdp_trains_near_native_in_every_strategy(strategy: ShardingStrategy) -> None:
    arguments: dict[str, Any] = {"sharding_strategy": strategy, **WRAPPINGS["blocks in BF16"]}
    if strategy is ShardingStrategy.HYBRID_SHARD:
        arguments["process_group"] = (dist.group.WORLD, alone())
    comm.reset_statistics()
    found = train(boost(fp8(**arguments)))
    reduced = "all_reduce" if strategy is ShardingStrategy.NO_SHARD else "reduce_scatter_tensor"
    assert comm.statistics()[reduced].ratio < 0.6
    assert_close(train(boost(native(**arguments))), found, CLOSE)


@ranks(2)
@pytest.mark.parametrize("block_size", [256, 128, None])
def test_fsdp_scales_gradients_as_it_is_told(block_size: int | None) -> None:
    run = boost(fp8(fp8_config=FP8Config(messages=Encoding(block_size=block_size))))
    units = FullyShardedDataParallel.fsdp_modules(run.model.module)
    assert {unit._comm_hook_state.encoding.block_size for unit in units} == {block_size}


@ranks(2)
def test_fsdp_averages_shards_that_replicas_hold() -> None:
    gradient = torch.full((4096,), float(dist.get_rank()))
    shard = torch.empty(4096)
    flat_fsdp_hook(FlatFSDPState(group=alone(), replicas=dist.group.WORLD), gradient, shard)
    assert torch.equal(shard, torch.full((4096,), 0.5))


@ranks(2)
@pytest.mark.parametrize("wrapping", WRAPPINGS)
def test_fsdp_holds_no_fp8_weight_of_a_block_between_forward_and_backward(wrapping: str) -> None:
    for make in (fp8, plain_wire):
        with pytest.MonkeyPatch.context() as monkeypatch:
            weights = FP8Weights(monkeypatch)
            run = boost(make(fp8_config=UNFUSED, **WRAPPINGS[wrapping]))
            loss = run.loss(rank_batches(1)[0])
            assert weights.made() >= LAYERS
            if "one unit" in wrapping and make is fp8:
                assert weights.alive() == 2 * LAYERS  # FSDP leaves its outermost unit whole until backward
            else:
                assert weights.alive() == 0
            run.booster.backward(loss, run.optimizer)
            assert weights.made() >= 2 * LAYERS
            assert weights.alive() == 0


@ranks(2)
@pytest.mark.parametrize("wrapping", ["blocks in BF16", "one unit in BF16", "blocks"])
def test_fsdp_sends_at_most_0_52_of_the_bytes(wrapping: str) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 704, "vocab_size": 64}

    def traffic(plugin: Any) -> Any:
        run = boost(plugin, tiny_llama(**sizes))
        batch = rank_batches(1)[0] % 64
        run.step(batch)
        comm.reset_statistics()
        with count_traffic() as counted:
            run.step(batch)
        return counted

    expected = traffic(native(**WRAPPINGS[wrapping]))
    found = traffic(fp8(**WRAPPINGS[wrapping]))
    assert found.sent <= (0.52 if "BF16" in wrapping else 0.28) * expected.sent
    rows = comm.statistics().rows
    assert rows.keys() == {NAME, "reduce_scatter_tensor"}
    assert sum(row.wire_bytes for row in rows.values()) == found.sent
    assert sum(row.raw_bytes for row in rows.values()) == expected.sent
    assert not rows["reduce_scatter_tensor"].uncompressed
    assert rows[NAME].uncompressed.keys() == {NOT_FP8}


@ranks(2)
def test_fsdp_says_why_a_weight_is_sent_in_16_bits() -> None:
    for config, reason in (
        (FP8Config(scaling="rowwise", emulate=True), "rowwise scales"),
        (FP8Config(scaling="blockwise", emulate=True), "blockwise scales"),
        (QUICK, "size no multiple of 16"),
    ):
        model = tiny_llama(hidden_size=128, intermediate_size=250 if config is QUICK else 128)
        comm.reset_statistics()
        losses = train(boost(fp8(fp8_config=config, auto_wrap_policy=BLOCKS), model), steps=1)
        assert any(reason in text for text in comm.statistics()[NAME].uncompressed), reason
        assert all(torch.isfinite(torch.tensor(losses)))


@ranks(2)
def test_fsdp_loses_no_nan_on_the_way() -> None:
    run = boost(fp8(**WRAPPINGS["blocks in BF16"]))
    unit = run.model.module
    with FullyShardedDataParallel.summon_full_params(unit), torch.no_grad():
        dict(unit.named_parameters())["model.layers.0.mlp.up_proj.weight"][0, 0] = torch.nan
    assert torch.isnan(run.loss(rank_batches(1)[0]))


# ---- GPT-2, whose layers hold their weights transposed ----

GPT2_BLOCKS = ModuleWrapPolicy({GPT2Block})


@ranks(2)
@pytest.mark.parametrize("engine", ["FSDP", "ZeRO", "DDP"])
def test_gpt2_trains_in_fp8(engine: str) -> None:
    plain, in_fp8 = {
        "FSDP": (native(auto_wrap_policy=GPT2_BLOCKS), fp8(auto_wrap_policy=GPT2_BLOCKS)),
        "ZeRO": (native_zero(), ours_zero(use_fp8=True, fp8_config=QUICK)),
        "DDP": (test_torch_ddp.native(), test_torch_ddp.fp8(fp8_config=QUICK)),
    }[engine]
    run = boost(in_fp8, tiny_gpt2())
    assert sum(isinstance(module, FP8Conv1D) for module in run.model.modules()) == 8
    comm.reset_statistics()
    assert_close(train(boost(plain, tiny_gpt2())), train(run), CLOSE)
    row = comm.statistics()[{"FSDP": NAME, "ZeRO": "weight gather", "DDP": "all_reduce"}[engine]]
    assert row.ratio < 0.7  # the embeddings are half of the model


@ranks(2)
def test_gpt2_is_gathered_in_fp8_to_the_same_bits() -> None:
    runs = []
    for gather in (False, True):
        run = boost(plain_wire(auto_wrap_policy=GPT2_BLOCKS, mixed_precision=BF16), tiny_gpt2())
        compress_flat_fsdp(run.model, gather=gather, reduce=False)
        runs.append(run)
    assert_fsdp_trains_equally(*runs)


# ---- gradients ----


@ranks(2)
@pytest.mark.parametrize("wrapping", ["blocks", "blocks in BF16"])
def test_fsdp_accumulates_without_synchronization(wrapping: str) -> None:
    expected, found = (
        train(boost(fp8(**WRAPPINGS[wrapping])), micro_batches=3, no_sync=no_sync) for no_sync in (False, True)
    )
    assert_close(expected, found, CLOSE)
    run = boost(fp8(**WRAPPINGS[wrapping]))
    comm.reset_statistics()
    run.step(*rank_batches(3), no_sync=True)
    assert comm.statistics()["reduce_scatter_tensor"].calls == 3  # two blocks and the root, once


@ranks(2)
def test_fsdp_clips_by_the_norm_that_ddp_finds() -> None:
    norms = []
    for plugin in (test_torch_ddp.native(), native(), fp8(auto_wrap_policy=BLOCKS)):
        run = boost(plugin)
        run.booster.backward(run.loss(rank_batches(1)[0]), run.optimizer)
        norms.append(float(run.optimizer.clip_grad_by_norm(0.1)))
        assert float(run.optimizer.clip_grad_by_norm(1e9)) == pytest.approx(0.1, rel=1e-3)
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert norms[2] == pytest.approx(norms[0], rel=0.02)  # FP8 rounds the gradients


def trained_by_groups(
    plugin: Any, folder: Path
) -> tuple[list[float], list[tuple[float, ...]], dict[str, torch.Tensor]]:
    """Losses, learning rates and whole weights of a run by groups and Colossal-AI's schedule, resumed in a folder.

    Norms do not decay, and the head stays.
    """
    from colossalai.booster import Booster
    from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR

    def boosted() -> tuple[Booster, Any, Any, Any]:
        model, booster = tiny_llama(), Booster(plugin=plugin)
        names = {
            name: "head" if "lm_head" in name else "norm" if "norm" in name else "rest"
            for name, _ in model.named_parameters()
        }
        options = {"head": {"lr": 0.0}, "norm": {"weight_decay": 0.0}, "rest": {}}
        groups = [
            {"params": [each for name, each in model.named_parameters() if names[name] == kind], **others}
            for kind, others in options.items()
        ]
        optimizer = HybridAdam(groups, lr=1e-2, weight_decay=0.1, adamw_mode=True)
        schedule = CosineAnnealingWarmupLR(optimizer, total_steps=6, warmup_steps=2)
        model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
        return booster, model, optimizer, schedule

    booster, model, optimizer, schedule = boosted()
    losses, rates = [], []
    for number, tokens in enumerate(rank_batches(6)):
        if number == 3 and folder is not None:
            booster.save_model(model, str(folder / "model"), shard=True)
            booster.save_optimizer(optimizer, str(folder / "optimizer"), shard=True)
            booster.save_lr_scheduler(schedule, str(folder / "schedule"))
            dist.barrier()
            booster, model, optimizer, schedule = boosted()
            booster.load_model(model, str(folder / "model"))
            booster.load_optimizer(optimizer, str(folder / "optimizer"))
            booster.load_lr_scheduler(schedule, str(folder / "schedule"))
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        loss = model(input_ids=tokens, labels=tokens).loss
        booster.backward(loss, optimizer)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with FullyShardedDataParallel.summon_full_params(model.module, writeback=False):
        weights = {name: each.detach().clone() for name, each in model.unwrap().named_parameters()}
    return losses, rates, weights


@pytest.mark.parametrize("wrapping", ["one unit in BF16", "blocks in BF16"])
@pytest.mark.parametrize("family", ["Mixtral", "Qwen3-MoE", "DeepSeek V3"])
@ranks(2)
def test_fsdp_trains_mixtures_as_colossalai_does(family: str, wrapping: str) -> None:
    losses, told = [], ()
    for make in (native, fp8):
        model = tiny_mixture(family)
        layers = ModuleWrapPolicy({type(model.model.layers[0])}) if wrapping.startswith("blocks") else None
        run = boost(make(auto_wrap_policy=layers, mixed_precision=BF16), model)
        batch = batch_of(dist.get_rank())
        losses.append([run.step(batch)[0] for _ in range(3)])
        told = report(run.model).grouped
    assert losses[1] == pytest.approx(losses[0], rel=3e-2)
    assert {block.why_one_by_one for block in told} <= {None}


@ranks(2)
def test_fsdp_trains_groups_by_a_schedule_and_resumes(tmp_path: Path) -> None:
    expected = trained_by_groups(native(auto_wrap_policy=BLOCKS), None)
    found, resumed = (trained_by_groups(fp8(auto_wrap_policy=BLOCKS), folder) for folder in (None, tmp_path))
    assert_close(expected[0], found[0], CLOSE)
    assert expected[0] != found[0]
    assert expected[1] == found[1]
    assert len(set(found[1])) > 3
    start = tiny_llama().state_dict()
    moved = {name for name, weight in found[2].items() if not torch.equal(weight, start[name])}
    assert moved == found[2].keys() - {"lm_head.weight"}
    assert found[:2] == resumed[:2]
    assert_equal(found[2], resumed[2])
