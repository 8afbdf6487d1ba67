"""The plugin's options with FP8 on the wire: stages 1 and 2 agree bit for bit and stay near 16 bits."""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config
from fp8booster.nn.linear import speed_model
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import CLOSE, Layers, batch, features, gathered, masters, own_gradients, step, wire
from tests.colossal.zero.test_weights import assert_is_cast_of_masters
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_lora import lora_config
from tests.plugins.test_low_level_zero_native import FP16, OVERFLOWING
from tests.plugins.training import (
    STAGES,
    Outcome,
    assert_close,
    assert_equal,
    assert_same_outcome,
    assert_trains_equally,
    boost,
    native,
    ours,
    outcome,
    train,
)

OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "no overlap": {"overlap_communication": False},
    "late weights": {"overlap_allgather": True},
    "masters on the host": {"cpu_offload": True},
    "no masters": {"master_weights": False},
    "FP32 before FP8": {"communication_dtype": torch.float32},
    "FP16 before FP8": {"communication_dtype": torch.float16},
    "clipping": {"max_norm": 0.1},
    "small buckets": {"reduce_bucket_size_in_m": 0.01},
    "fp16": FP16,
    "overflow": OVERFLOWING,
}
WITHOUT_EFFECT = ("no overlap", "late weights", "masters on the host", "FP32 before FP8")


@cache
def outcome_of(stage: int, option: str) -> tuple[Outcome, dict[str, torch.Tensor]]:
    """In FP8, with the master weights in the end; trained once for all tests of these ranks."""
    run = boost(wire(stage=stage, **OPTIONS[option]))
    return outcome(run), masters(run)


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_both_stages_train_alike_and_near_16_bits(option: str) -> None:
    (first, of_first), (second, of_second) = (outcome_of(stage, option) for stage in STAGES)
    assert_same_outcome(first, second)
    assert_equal(of_first, of_second)
    in_16_bits = train(boost(native(**OPTIONS[option])))
    assert_close(in_16_bits, first.losses, CLOSE)
    assert first.losses != in_16_bits


@ranks(2)
@pytest.mark.parametrize("option", WITHOUT_EFFECT)
def test_what_only_moves_work_changes_no_bit(option: str) -> None:
    for stage in STAGES:
        assert_same_outcome(outcome_of(stage, "defaults")[0], outcome_of(stage, option)[0])


@ranks(2)
def test_without_masters_small_updates_are_kept() -> None:
    run, plain = (boost(plugin(master_weights=False), lr=1e-4) for plugin in (wire, native))
    before = run.parameters()
    train(run, steps=8)
    train(plain, steps=8)
    name = "model.layers.0.mlp.up_proj.weight"
    moved, expected = (after.parameters()[name].float() - before[name].float() for after in (run, plain))
    # rounded to FP8, a weight of 0.02 moves by 0.001 or not at all
    assert (moved - expected).norm() < 0.5 * expected.norm()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_skips_the_step_on_every_rank(stage: int) -> None:
    run = boost(wire(stage=stage, **OVERFLOWING | {"backoff_factor": 2.0**-16}))
    before, weights = masters(run), run.parameters()
    run.booster.backward(run.loss(batch()), run.optimizer)
    run.optimizer.step()
    assert not own_gradients(run)  # the next backward adds to none that overflowed
    assert_equal(before, masters(run))
    assert_equal(weights, run.parameters())
    assert_close(train(boost(native(stage=stage, **FP16))), train(run), CLOSE)


@ranks(2)
def test_gradients_accumulate_by_no_sync_and_by_several_backwards() -> None:
    in_16_bits = train(boost(native(stage=1)), micro_batches=3, no_sync=True)
    for overlap in (True, False):
        run = boost(wire(stage=1, overlap_communication=overlap))
        assert_close(in_16_bits, train(run, micro_batches=3, no_sync=True), CLOSE)
    assert_trains_equally(*(boost(wire(stage=stage)) for stage in STAGES), micro_batches=3)
    assert_close(in_16_bits, train(boost(wire(stage=2)), micro_batches=3), CLOSE)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_reduced_gradient_is_bf16_and_those_of_more_micro_batches_are_added_in_fp32(stage: int) -> None:
    run, backwards = boost(wire(stage=stage)), 7
    for number in range(backwards):
        loss = run.model(input_ids=batch(), labels=batch()).loss
        run.booster.backward(loss, run.optimizer)
        if number == 0:
            first = [gradient.clone() for gradient in own_gradients(run)]
    total = own_gradients(run)
    assert {gradient.dtype for gradient in first} == {torch.bfloat16}
    assert {gradient.dtype for gradient in total} == {torch.float32}
    for one, all_of_them in zip(first, total, strict=True):
        # seven times eight bits of a mantissa need eleven, and FP32 holds them
        assert torch.equal(all_of_them, backwards * one.float())


@ranks(2)
def test_a_reduced_gradient_is_fp32_where_it_is_yet_to_be_divided_by_a_loss_scale() -> None:
    run = boost(wire(**FP16))
    run.booster.backward(run.model(input_ids=batch(), labels=batch()).loss, run.optimizer)
    assert {gradient.dtype for gradient in own_gradients(run)} == {torch.float32}


@ranks(2)
def test_backward_runs_in_the_thread_that_calls_it() -> None:
    run = boost(wire())
    loss, found = run.model(input_ids=batch(), labels=batch()).loss, []
    loss.register_hook(lambda gradient: found.append(torch.autograd.is_multithreading_enabled()))
    run.booster.backward(loss, run.optimizer)
    assert found == [False]
    assert torch.autograd.is_multithreading_enabled()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_that_come_after_boost_are_refused(stage: int) -> None:
    run = boost(wire(stage=stage))
    groups = len(run.optimizer.param_groups)
    with pytest.raises(ValueError, match="before boost"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(16))]})
    assert len(run.optimizer.param_groups) == groups


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_parameters_may_be_frozen_for_a_while_after_boost(stage: int) -> None:
    """One of three that are multiplied as one, and a whole layer."""
    run = boost(ours(stage=stage, use_fp8=True))
    frozen = {
        name: value
        for name, value in run.model.unwrap().named_parameters()
        if "layers.0." in name or name == "model.layers.1.self_attn.q_proj.weight"
    }
    weights = [masters(run)]
    for trains in (False, True):
        for value in frozen.values():
            value.requires_grad_(trains)
        train(run, steps=2)
        weights.append(masters(run))
    first, without, after = weights
    assert {name for name in first if torch.equal(first[name], without[name])} == frozen.keys()
    assert not any(torch.equal(without[name], after[name]) for name in first)


@ranks(2)
@pytest.mark.parametrize("overlap", [True, False])
def test_a_layer_that_only_the_first_micro_batch_used_is_trained(overlap: bool) -> None:
    run = boost(wire(stage=1, overlap_communication=overlap), Layers(64, 64, 64))
    before = masters(run)
    with run.booster.no_sync(run.model, run.optimizer):
        run.booster.backward(run.model(features()), run.optimizer)
    run.model.unwrap().dropped = {1}
    step(run, features())
    after = masters(run)
    assert not any(torch.equal(before[name], after[name]) for name in before)


@ranks(2)
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj"])
def test_what_a_backward_that_broke_off_held_back_is_forgotten(name: str) -> None:
    """Of q, k and v some gradients were there; in the next backward, in another order, all are to be waited for."""
    runs = [boost(ours(use_fp8=True, reduce_bucket_size_in_m=0.001)) for _ in range(2)]
    tokens = batch()
    loss = runs[1].loss(tokens)
    layer = getattr(runs[1].model.unwrap().model.layers[1].self_attn, name)
    stops = layer.weight.register_hook(mock.Mock(side_effect=RuntimeError("broke off")))
    with pytest.raises(RuntimeError, match="broke off"):
        runs[1].booster.backward(loss, runs[1].optimizer)
    stops.remove()
    runs[1].optimizer.zero_grad()
    shorter = tokens[:, : tokens.shape[1] // 2]
    with mock.patch.object(speed_model, "fp8_pays", return_value=False):  # so that the three run one by one
        losses = [run.step(shorter) for run in runs]
    assert losses[0] == losses[1]
    assert_equal(*map(masters, runs))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_dropped_layer_keeps_its_weight_and_trains_when_it_returns(stage: int) -> None:
    run = boost(wire(stage=stage), Layers(64, 64, 64, 64))
    network = run.model.unwrap()
    steps = [masters(run)]
    # other layers of the same number, and of the same ones again
    order = [set(), {1}, {2}, {2}, {0}, set(), {0, 1}, {1, 2}]
    for dropped in order:
        network.dropped = dropped
        step(run, features())
        steps.append(masters(run))
        assert_is_cast_of_masters(run)
    changed = [
        [not torch.equal(one[f"layers.{number}.weight"], other[f"layers.{number}.weight"]) for number in range(3)]
        for one, other in pairwise(steps)
    ]
    assert changed == [[number not in dropped for number in range(3)] for dropped in order]


class Repeated(Layers):
    """Runs its layers twice."""

    checkpoints = False
    """Each run is computed again in backward, which then reaches each weight twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            for layer in self.layers:
                x = x + (checkpoint(layer, x, use_reentrant=True) if self.checkpoints else layer(x)).tanh()
        return x.float().square().mean()


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_layers_that_checkpointed_segments_share_are_trained(stage: int) -> None:
    losses = []
    for checkpoints in (False, True):
        run = boost(wire(stage=stage, overlap_communication=False), Repeated(64, 64, 64))
        run.model.unwrap().checkpoints = checkpoints
        losses.append([step(run, features().requires_grad_()) for _ in range(3)])
    assert_close(*losses, within=CLOSE)
    assert losses[1][-1] < losses[1][0]


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_frozen_layer_stays_and_needs_no_gather(stage: int) -> None:
    model = Layers(64, 64, 64)
    model.layers[0].requires_grad_(False)
    frozen = model.layers[0].weight.detach().bfloat16()
    run = boost(wire(stage=stage), model)
    losses = [step(run, features()) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert torch.equal(frozen, run.model.unwrap().layers[0].weight)
    assert [name for name, _ in gathered(run)] == ["layers.1.weight"]


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_adapters_train_over_a_frozen_base(stage: int) -> None:
    runs = []
    for plugin in (wire(stage=stage), native(stage=stage)):
        torch.manual_seed(0)
        runs.append(boost(plugin, lora={"lora_config": lora_config()}))
    before = runs[0].parameters()
    losses, in_16_bits = map(train, runs)
    assert_close(in_16_bits, losses, CLOSE)
    after = runs[0].parameters()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if "lora_" in name}


BLOCKWISE = FP8Config(scaling="blockwise")
NOT_GATHERED = {
    "odd sizes": lambda: (wire(), Layers(64, 72, 64), "size no multiple of 16"),
    "rowwise": lambda: (wire(fp8_config=FP8Config(scaling="rowwise")), Layers(64, 64, 64), "rowwise scales"),
    "blockwise": lambda: (wire(fp8_config=BLOCKWISE), Layers(128, 256, 128), "blockwise scales"),
    "no masters": lambda: (wire(master_weights=False), Layers(64, 64, 64), "no master weights"),
}


@ranks(2)
@pytest.mark.parametrize("case", NOT_GATHERED)
def test_weights_that_are_not_sent_in_fp8_train_and_are_counted_with_the_reason(case: str) -> None:
    from fp8booster import comm, report

    plugin, model, reason = NOT_GATHERED[case]()
    run = boost(plugin, model)
    assert len(report(run.model).fp8) == 2
    assert len(run.optimizer.gathered_weights) == 0
    comm.reset_statistics()
    losses = [step(run, features(model.layers[0].in_features)) for _ in range(4)]
    row = comm.statistics()["weight gather"]
    assert row.uncompressed == {reason: 8, "not the weight of an FP8 layer": 8}
    assert row.wire_bytes == row.raw_bytes
    assert losses[-1] < losses[0]


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_layers_with_scales_by_channel_are_gathered_in_16_bits_and_losses_follow(stage: int) -> None:
    from fp8booster import comm

    run = boost(wire(stage=stage, fp8_config=FP8Config(scaling="smooth-swiglu")), tiny_llama())
    assert len(run.optimizer.gathered_weights) == 12
    comm.reset_statistics()
    losses = train(run)
    assert comm.statistics()["weight gather"].uncompressed["scales by channel"] == 2 * len(losses)
    assert_close(train(boost(native(stage=stage), tiny_llama())), losses, 3 * CLOSE)


@ranks(2)
def test_a_head_in_fp8_is_gathered_in_fp8_and_its_losses_follow() -> None:
    run = boost(wire(fp8_config=FP8Config(vocabulary_head=True)), tiny_llama())
    assert run.model.unwrap().lm_head.weight in run.optimizer.gathered_weights
    assert len(run.optimizer.gathered_weights) == 15
    assert_close(train(boost(native(), tiny_llama())), train(run), 3 * CLOSE)


@ranks(2)
def test_a_head_in_fp8_that_an_embedding_shares_is_gathered_in_16_bits() -> None:
    from fp8booster import comm

    def tied() -> nn.Module:
        return tiny_llama(tie_word_embeddings=True)

    for overlap in (False, True):
        run = boost(wire(fp8_config=FP8Config(vocabulary_head=True), overlap_allgather=overlap), tied())
        head = run.model.unwrap().lm_head
        assert head.weight is run.model.unwrap().model.embed_tokens.weight
        assert head.weight not in run.optimizer.gathered_weights
        assert len(run.optimizer.gathered_weights) == 14
        comm.reset_statistics()
        losses = train(run)
        assert comm.statistics()["weight gather"].uncompressed["shared with another module"] == 3
        assert_close(train(boost(native(), tied())), losses, 3 * CLOSE)
