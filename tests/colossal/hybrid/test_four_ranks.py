"""Modes that need four ranks: two kinds of parallelism at once."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fp8booster import FP8Config
from fp8booster.nn.fused.decoder import FusedDecoderLayer
from fp8booster.nn.fused.self_attention import FusedAttention
from tests.colossal.hybrid.runs import MAKERS, batches, fp8, learn, native, ours, sizes, start
from tests.colossal.hybrid.test_census import assert_all_products_in_fp8
from tests.colossal.hybrid.test_learning import alone, assert_close_over_steps, assert_follows
from tests.colossal.hybrid.test_sharded_models import MODELS as SHARDED
from tests.colossal.hybrid.test_sharded_models import VOCABULARY
from tests.colossal.models import tiny_llama
from tests.distributed import ranks
from tests.plugins import test_learning
from tests.plugins.large_collectives import assert_large_collectives_are_compressed
from tests.plugins.norms import assert_clips_by_one_norm
from tests.plugins.test_large_collectives import gemini, tokens
from tests.plugins.test_large_collectives import start as start_large
from tests.plugins.training import assert_close

MODES: dict[str, dict[str, Any]] = {
    "TP2 x PP2": {"tp_size": 2, "pp_size": 2},
    "TP2 x DP2": {"tp_size": 2},
    "TP2 x DP2 ZeRO 1": {"tp_size": 2, "zero_stage": 1},
    "TP2 x DP2 ZeRO 2": {"tp_size": 2, "zero_stage": 2},
    "PP2 x DP2": {"pp_size": 2},
    "PP2 x DP2 ZeRO 1": {"pp_size": 2, "zero_stage": 1},
}

ALONG_A_SEQUENCE: dict[str, dict[str, Any]] = {
    f"{other} x {mode}": {"sp_size": 2, "sequence_parallelism_mode": mode} | arguments
    for mode in ("all_to_all", "ring_attn")
    for other, arguments in {"TP2": {"tp_size": 2}, "PP2": {"pp_size": 2}}.items()
}
"""Modes of sequence parallelism among ranks of their own."""


@ranks(4)
@pytest.mark.parametrize("mode", ["TP2 x PP2", "TP2 x DP2 ZeRO 1", "PP2 x DP2 ZeRO 1"])
def test_all_products_but_those_of_the_vocabulary_head_run_in_fp8(mode: str) -> None:
    assert_all_products_in_fp8(start(fp8(MODES[mode])))


@ranks(4)
@pytest.mark.parametrize("mode", ALONG_A_SEQUENCE)
def test_fused_layers_along_a_sequence_train_in_fp8_as_unfused_ones(mode: str) -> None:
    plain, run = (
        start(
            fp8(ALONG_A_SEQUENCE[mode], fp8_config=FP8Config(fused=fused)),
            tiny_llama(**sizes(num_key_value_heads=4)),  # for each rank one
        )
        for fused in (False, True)
    )
    layers = [module for module in run.model.modules() if isinstance(module, FusedDecoderLayer)]
    assert len(layers) == 2 // run.booster.plugin.pp_size
    assert all(isinstance(layer.self_attn, FusedAttention) for layer in layers)
    expected, losses = (learn(each, last=2) for each in (plain, run))
    assert_close(expected, losses, 1e-2)
    assert losses != expected
    assert losses[-1] < losses[0]
    assert_all_products_in_fp8(run)


@ranks(4)
@pytest.mark.parametrize("mode", ["TP2 x PP2", "TP2 x DP2 ZeRO 2", "Gemini with TP2"])
def test_large_collectives_are_compressed(mode: str) -> None:
    if "PP2" in mode:
        run, batch = start_large(MODES[mode] | {"num_microbatches": 2}), tokens(4, 1280)
    else:
        run = gemini(tp_size=2) if "Gemini" in mode else start_large(MODES[mode])
        batch = tokens(4, 640, rank=dist.get_rank() // 2)
    assert_large_collectives_are_compressed(lambda: run.step(batch))


@ranks(4)
@pytest.mark.parametrize("mode", ["TP2 x PP2", "TP2 x DP2 ZeRO 1", "Gemini with TP2"])
def test_the_loss_follows_one_process_in_fp8(mode: str) -> None:
    if "Gemini" in mode:
        run = test_learning.gemini(tp_size=2)
        assert_close_over_steps(test_learning.learn(run, tensor_parallel=2), alone(2))
        return
    micro_batches = {"num_microbatches": 2} if "PP2" in mode else {}
    assert_follows(fp8(MODES[mode] | micro_batches))


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_without_fp8_a_mode_trains_as_in_the_native_plugin(mode: str) -> None:
    assert learn(start(native(MODES[mode]))) == learn(start(ours(MODES[mode])))


@ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_native_plugin(mode: str) -> None:
    """In direction and size: three steps of Adam would hide a wrong divisor."""
    expected, losses = (learn(start(make(MODES[mode])), last=1) for make in (native, fp8))
    assert_close(expected, losses, 1e-2)
    assert losses != expected


def assert_same_over(group: dist.ProcessGroup, tensor: torch.Tensor) -> None:
    """Bit for bit on all ranks of a group."""
    own = tensor.detach().contiguous().view(torch.uint8)
    copies = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
    dist.all_gather(copies, own, group=group)
    assert all(torch.equal(copy, own) for copy in copies)


@ranks(4)
@pytest.mark.parametrize("mode", ["TP2 x DP2", "TP2 x DP2 ZeRO 1", "TP2 x DP2 ZeRO 2"])
def test_what_tensor_parallel_ranks_hold_alike_stays_alike(mode: str) -> None:
    from colossalai.tensor.d_tensor.api import is_distributed_tensor

    # sizes with which gradients of shards and of replicas would share blocks of 256
    run = start(fp8(MODES[mode]), tiny_llama(**sizes(hidden_size=80, num_hidden_layers=2)))
    learn(run)
    replicated = {
        name: value for name, value in run.model.unwrap().named_parameters() if not is_distributed_tensor(value)
    }
    assert len(replicated) == 5
    for value in replicated.values():
        assert_same_over(run.booster.plugin.tp_group, value)


@pytest.mark.skipif("GPT-2" not in SHARDED, reason="the installed transformers' GPT-2 is not sharded")
@ranks(4)
@pytest.mark.parametrize("mode", ["TP2 x DP2", "TP2 x DP2 ZeRO 1"])
def test_what_is_beside_shards_of_fused_layers_stays_alike(mode: str) -> None:
    """Of GPT-2, whose biases and norms lie between them."""
    run = start(fp8(MODES[mode]), SHARDED["GPT-2"][0]())
    for (text,) in batches(0, 3):
        run.step(text % VOCABULARY)
    biases = [value for name, value in run.model.unwrap().named_parameters() if re.search(r"ln_|c_proj.bias", name)]
    assert len(biases) == 2 * 6 + 2
    for value in biases:
        assert_same_over(run.booster.plugin.tp_group, value)


@ranks(4)
@pytest.mark.parametrize("mode", ["TP2 x PP2", "PP2 x DP2 ZeRO 1"])
def test_gradients_are_clipped_by_the_norm_that_native_finds(mode: str) -> None:
    run = start(fp8(MODES[mode]), tiny_llama(**sizes(tie_word_embeddings=True)))
    assert_clips_by_one_norm(run, batches(0, 1)[0][0])


ZERO_1 = {"pp_size": 2, "num_microbatches": 2, "zero_stage": 1}
ZERO_BUBBLE = {"pp_style": "zbv", "num_model_chunks": 2}


@functools.cache
def learn_in_pipelines(which: str, zero_bubble: bool, overlap: bool) -> list[float]:
    """Losses of a model of four layers, on two pipelines of two stages; trained once for all tests of these ranks."""
    model = tiny_llama(**sizes(num_hidden_layers=4))
    arguments = ZERO_1 | (ZERO_BUBBLE if zero_bubble else {})
    return learn(start(MAKERS[which](arguments, overlap_allgather=overlap), model))


@ranks(4)
@pytest.mark.parametrize("which", MAKERS)
def test_zero_bubble_with_zero_trains_like_1f1b(which: str) -> None:
    expected, losses = (learn_in_pipelines(which, zero_bubble, False) for zero_bubble in (False, True))
    assert_close(expected, losses, 5e-3, gradients=False)
    assert losses[-1] < losses[0]


@ranks(4)
@pytest.mark.parametrize("case", ["native, 1f1b", "ours, 1f1b", "fp8, 1f1b", "fp8, zero-bubble"])
def test_late_gathers_change_no_loss_of_a_pipeline(case: str) -> None:
    which, schedule = case.split(", ")
    on_time, late = (learn_in_pipelines(which, schedule == "zero-bubble", overlap) for overlap in (False, True))
    assert on_time == late


SHARED = {"model.embed_tokens.weight", "lm_head.weight"}
"""Names of the one weight, on the first and on the last stage."""


@ranks(4)
@pytest.mark.parametrize("mode", ["PP2 x DP2", "PP2 x DP2 ZeRO 1"])
def test_a_weight_that_two_stages_share_stays_the_same_on_both(mode: str) -> None:
    run = start(fp8(MODES[mode], num_microbatches=2), tiny_llama(**sizes(tie_word_embeddings=True)))
    before = {name: value.clone() for name, value in run.model.unwrap().named_parameters()}
    learn(run, accumulate=2)
    weights = dict(run.model.unwrap().named_parameters())
    ((name, value),) = [(name, weights[name]) for name in SHARED & weights.keys()]
    assert not torch.equal(before[name], value)
    assert_same_over(run.booster.plugin.pp_group, value)


@ranks(4)
@pytest.mark.parametrize("which", MAKERS)
def test_a_ring_in_a_pipeline_trains_like_a_pipeline(which: str) -> None:
    ring = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn"}
    expected, losses = (learn(start(MAKERS[which]({"pp_size": 2} | more))) for more in ({}, ring))
    assert_close(expected, losses, 1e-2, gradients=False)
    assert losses[-1] < losses[0]
