"""Options of `HybridParallelPlugin` with FP8: precision, accumulation, clipping, ZeRO's, LoRA, what is sent."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, comm, report
from fp8booster.colossal.hybrid.model import FP8HybridParallelModule
from fp8booster.comm import Encoding
from fp8booster.nn.linear.layer import FP8Layer
from tests.colossal.hybrid.runs import (
    MAKERS,
    MODES,
    HybridRun,
    fp8,
    learn,
    losses_of,
    native,
    norm_gradients,
    sizes,
    start,
)
from tests.colossal.hybrid.test_native import OPTIONS
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_lora import lora_config
from tests.plugins.training import assert_close, assert_equal

ENCODINGS = (Encoding(block_size=None), Encoding(automatic_scaling=True))

CLOSE = 1e-2
"""How far a loss may lie from that in 16 bits, in the first steps."""


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "DP2 ZeRO 2", "TP2", "PP2 1f1b ZeRO 1"])
def test_fp16_trains_near_native(mode: str) -> None:
    scaling = {"precision": "fp16", "initial_scale": 2.0**8}
    expected, losses = (learn(start(plugin(mode, **scaling))) for plugin in (native, fp8))
    assert_close(expected, losses, CLOSE)
    assert losses != expected


@ranks(2)
@pytest.mark.parametrize("which", ["native", "fp8"])
@pytest.mark.parametrize("mode", ["TP2 split_gather", "SP2 all_to_all"])
def test_sequence_parallelism_without_a_mode_has_a_default(mode: str, which: str) -> None:
    sizes_alone = {name: value for name, value in MODES[mode].items() if name.endswith("size")}
    run = start(MAKERS[which](sizes_alone, enable_sequence_parallelism=True))
    assert learn(run) == losses_of(which, mode)


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "TP2 ZeRO 1"])
def test_parameters_that_come_after_boost_are_refused(mode: str) -> None:
    run = start(fp8(mode))
    groups = len(run.optimizer.param_groups)
    with pytest.raises(ValueError, match="before boost"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(16))]})
    assert len(run.optimizer.param_groups) == groups


def learn_and_count(run: HybridRun, first: int, last: int) -> tuple[list[float], dict[str, int]]:
    """As `learn`, and how often it called each collective of `fp8booster.comm`."""
    comm.reset_statistics()
    losses = learn(run, first, last)
    return losses, {name: row.calls for name, row in comm.statistics().rows.items()}


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "DP2 ZeRO 1", "TP2 split_gather"])
def test_a_model_that_is_boosted_again_trains_on_as_native_does(mode: str) -> None:
    losses = []
    for plugin in (native, fp8):
        run = start(plugin(mode))
        _, calls = learn_and_count(run, 0, 2)
        model, optimizer, *_ = run.booster.boost(run.model, torch.optim.AdamW(run.model.parameters(), lr=1e-3))
        assert model is run.model
        again, calls_again = learn_and_count(HybridRun(run.booster, model, optimizer), 2, 4)
        assert calls_again == calls  # no gradient is sent twice
        losses.append(again)
    assert_close(*losses, CLOSE)
    assert losses[0] != losses[1]
    assert calls


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "TP2 ZeRO 1"])
def test_an_overflow_skips_the_step(mode: str) -> None:
    run = start(fp8(mode, precision="fp16", initial_scale=2.0**40, max_scale=2.0**41, hysteresis=1))
    before = run.parameters()
    learn(run, last=1)
    assert_equal(before, run.parameters())


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "DP2 ZeRO 1", "TP2 ZeRO 1", "PP2 1f1b"])
def test_gradients_are_clipped_by_the_norm_over_all_ranks(mode: str) -> None:
    runs = [start(plugin(mode, max_norm=0.05)) for plugin in (native, fp8)]
    assert_close(*(learn(run) for run in runs), CLOSE)
    expected, found = (run.optimizer.get_grad_norm() for run in runs)
    assert expected > 0.5
    assert abs(found / expected - 1) < 0.1, (expected, found)


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "DP2 ZeRO 1", "DP2 ZeRO 2", "PP2 1f1b ZeRO 1"])
def test_accumulation_gives_what_one_batch_gives(mode: str) -> None:
    at_once = losses_of("fp8", mode)
    assert_close(at_once, learn(start(fp8(mode)), accumulate=2), CLOSE)
    if mode != "DP2 ZeRO 2":
        assert_close(at_once, learn(start(fp8(mode)), accumulate=2, no_sync=True), CLOSE)


@ranks(2)
@pytest.mark.parametrize("case", ["TP2 split_gather", "TP2 split_gather ZeRO 1"])
def test_parts_of_a_gradient_are_added_once_however_many_micro_batches(case: str) -> None:
    mode, zero = case.removesuffix(" ZeRO 1"), "ZeRO" in case
    found = [norm_gradients(start(fp8(mode, zero_stage=int(zero))), no_sync) for no_sync in (True, False)]
    assert len(found[0]) == 5
    for name, expected in found[0].items():
        # what is added in FP8 is rounded; a micro-batch counted twice would be half of it off
        assert (found[1][name] - expected).norm() < 0.1 * expected.norm(), name


@functools.cache
def _zero_without_options() -> tuple[list[float], dict[str, torch.Tensor]]:
    run = start(fp8("DP2 ZeRO 1"))
    return learn(run), run.parameters()


@ranks(2)
@pytest.mark.parametrize(
    "options",
    [
        {"zero_stage": 1, "overlap_communication": False},
        {"zero_stage": 2, "overlap_communication": False},
        {"zero_stage": 2},
        {"zero_stage": 1, "overlap_allgather": True},
        {"zero_stage": 1, "cpu_offload": True},
    ],
    ids=str,
)
def test_options_of_zero_do_not_change_a_bit(options: dict[str, Any]) -> None:
    expected, parameters = _zero_without_options()
    run = start(fp8("DP2", **options))
    assert expected == learn(run)
    assert_equal(parameters, run.parameters())


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2 ZeRO 1"])
def test_late_gathers_reach_sharded_layers(mode: str) -> None:
    run = start(fp8(mode, overlap_allgather=True))
    assert learn(run) == losses_of("fp8", mode)
    assert not any(hasattr(value, "_all_gather_handle") for value in run.model.parameters()) or run.parameters()


@ranks(2)
@pytest.mark.parametrize("messages", ENCODINGS, ids=["tensor", "automatic"])
def test_gradient_scalings_train_under_zero(messages: Encoding) -> None:
    config = FP8Config(messages=messages)
    losses = learn(start(fp8("DP2 ZeRO 1", fp8_config=config)))
    assert_close(losses_of("native", "DP2 ZeRO 1"), losses, CLOSE)
    assert losses != losses_of("fp8", "DP2 ZeRO 1")


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2 ZeRO 1", "TP2", "SP2 all_to_all"])
def test_without_fp8_communication_nothing_is_sent_in_fp8(mode: str) -> None:
    run = start(fp8(mode, fp8_communication=False))
    comm.reset_statistics()
    losses = learn(run)
    rows = comm.statistics().rows
    assert sum(row.calls - sum(row.uncompressed.values()) for row in rows.values()) == 0, rows
    assert any(isinstance(module, FP8Layer) for module in run.model.modules())
    off = start(fp8(mode, fp8_config=FP8Config(messages=None)))
    assert learn(off) == losses


@ranks(2)
@pytest.mark.parametrize("mode", ["DP2", "DP2 ZeRO 1"])
def test_adapters_train_over_a_frozen_fp8_base(mode: str) -> None:
    runs = [start(plugin(mode), tiny_llama(**sizes()), lora={"lora_config": lora_config()}) for plugin in (native, fp8)]
    assert_close(*(learn(run) for run in runs), CLOSE)
    rows = {row.name: row for row in report(runs[1].model).rows}
    base = {name for name in rows if name.endswith("base_layer")}
    assert len(base) == 14
    assert {rows[name].precision for name in base} == {"FP8"}


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "PP2 1f1b"])
def test_gradient_checkpointing_changes_no_bit(mode: str) -> None:
    model = tiny_llama(**sizes())
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert learn(start(fp8(mode), model)) == losses_of("fp8", mode)


@ranks(2)
@pytest.mark.parametrize(("mode", "layers"), [("PP2 1f1b", 2), ("PP2 1f1b ZeRO 1", 4), ("PP2 interleaved", 5)])
def test_layers_at_both_ends_of_a_pipeline_stay_in_16_bits(mode: str, layers: int) -> None:
    config = FP8Config(high_precision_ends=1)
    if layers == 2:  # one stage for each
        with pytest.raises(ValueError, match="no layer of the model would compute in FP8"):
            start(fp8(mode, fp8_config=config), tiny_llama(num_hidden_layers=layers))
        return
    run = start(fp8(mode, fp8_config=config), tiny_llama(num_hidden_layers=layers))
    here = {name.split("layers.")[1][0] for name, layer in run.model.named_modules() if isinstance(layer, FP8Layer)}
    all_ranks: list[Any] = [None, None]
    dist.all_gather_object(all_ranks, here)
    assert set.union(*all_ranks) == {str(layer) for layer in range(1, layers - 1)}
    losses = learn(run)
    assert losses[-1] < losses[0]


@functools.cache
def learn_large(mode: str, **options: Any) -> list[float]:
    """Of a model with blocks of 128 values in each of its weights, trained once for all tests of these ranks."""
    large = {"hidden_size": 256, "intermediate_size": 512}
    return learn(start(fp8(mode, fp8_config=FP8Config(**options)), tiny_llama(**large)), last=4)


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2 ZeRO 1", "TP2 split_gather", "PP2 1f1b"])
@pytest.mark.parametrize("options", [{"scaling": "smooth-swiglu"}, {"scaling": "blockwise"}], ids=["smooth", "blocks"])
def test_other_scales_train_as_those_of_tensors(mode: str, options: dict[str, Any]) -> None:
    expected, losses = learn_large(mode), learn_large(mode, **options)
    assert_close(expected, losses, CLOSE)
    assert losses != expected


@ranks(2)
@pytest.mark.parametrize("case", ["no layer", "a stage without layers"])
def test_a_model_without_layers_for_fp8_is_refused_unless_another_stage_has_some(case: str) -> None:
    first = dist.get_rank() == 0

    def layers(name: str, module: nn.Module) -> bool:
        return case != "no layer" and not first

    plugin = fp8("PP2 1f1b", fp8_config=FP8Config(layers=layers))
    if case == "no layer":
        with pytest.raises(ValueError, match=r"FP8Config.layers leaves it out"):
            start(plugin)
    else:
        run = start(plugin)
        learn(run, last=1)
        assert len(report(run.model).fp8) == (0 if first else 8)  # the head too


@ranks(2)
@pytest.mark.parametrize("which", MAKERS)
def test_a_ring_without_a_mask_trains_as_with_one_of_ones(which: str) -> None:
    with_mask, without = (start(MAKERS[which]("SP2 ring_attn")) for _ in range(2))
    without.loss = lambda tokens: without.model(input_ids=tokens, labels=tokens).loss
    assert learn(with_mask) == learn(without)
    assert_equal(with_mask.parameters(), without.parameters())


@ranks(2)
@pytest.mark.parametrize("group", ["DDP", "sharding", "optimizations", "pipeline"])
def test_options_of_native_go_with_fp8(group: str) -> None:
    mode, arguments = OPTIONS[group]
    arguments = {name: value for name, value in arguments.items() if name != "use_fp8"}
    layers = sum(arguments.get("num_layers_per_stage", (2,)))
    runs = [start(make(mode, **arguments), tiny_llama(**sizes(num_hidden_layers=layers))) for make in (native, fp8)]
    assert_close(*(learn(run, last=2) for run in runs), CLOSE)
    assert all(row.name.endswith("lm_head") for row in report(runs[1].model).other)
    assert report(runs[1].model).fp8


@ranks(2)
def test_gradients_that_tensor_parallel_ranks_hold_alike_share_no_scale_with_those_of_shards() -> None:
    """In a pipeline without ZeRO, where the wrapper averages gradients over data parallel ranks."""
    found = []
    for size in (1.0, 1000.0):  # of a shard's gradient: another tensor parallel rank holds another
        torch.manual_seed(dist.get_rank())
        network = nn.ParameterDict({name: nn.Parameter(torch.zeros(300)) for name in ("whole", "shard")})
        network["shard"].dist_layout = object()
        for name, parameter in network.items():
            parameter.grad = torch.randn(300) * (size if name == "shard" else 1.0)
        comm.reset_statistics()
        FP8HybridParallelModule.sync_dp_grads(
            SimpleNamespace(dp_group=dist.group.WORLD, module=network, stage_sums=(), encoding=Encoding())
        )
        assert not comm.statistics()["all_reduce"].uncompressed
        found.append(network["whole"].grad)
    assert torch.equal(*found)
