"""The plugin's options with FP8 on the wire: stages 1 and 2 agree bit for bit and stay near 16 bits."""

from __future__ import annotations

from functools import cache, partial
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fp8booster import FP8Config
from fp8booster.colossal.zero import gathered_weights
from fp8booster.comm.amax import agree_on_amax
from fp8booster.nn.linear import speed_model
from fp8booster.optim import HybridAdam, one_pass
from tests.colossal.models import tiny_llama
from tests.colossal.zero.runs import CLOSE, Layers, batch, features, gathered, masters, step, wire
from tests.distributed import ranks
from tests.plugins.test_low_level_zero_lora import lora_config
from tests.plugins.test_low_level_zero_native import FP16, OVERFLOWING
from tests.plugins.training import (
    STAGES,
    Boosted,
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


def own_gradients(run: Boosted) -> list[torch.Tensor]:
    """This rank's part of each gradient, as reduced up to now."""
    (store,) = run.optimizer.pg_to_grad_store.values()
    return store.get_working_grads_by_group_id(0)


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
@pytest.mark.parametrize("stage", STAGES)
def test_the_norm_that_clips_is_near_that_of_16_bits(stage: int) -> None:
    norms = []
    for plugin in (native(stage=stage), wire(stage=stage)):
        run = boost(plugin)
        train(run, steps=1)
        norms.append(run.optimizer.get_grad_norm())
    assert_close(norms[:1], norms[1:], 0.02)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_clipping_divides_by_the_norm_over_all_ranks(stage: int) -> None:
    runs = [boost(wire(stage=stage, max_norm=limit)) for limit in (0.0, 1e-3, 1e3)]
    gradients = []
    for run in runs:

        def keep(optimizer: torch.optim.Optimizer, *_: object) -> None:
            gradients.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])

        run.optimizer.unwrap().register_step_pre_hook(keep)
        run.step(batch())
    whole, clipped, free = gradients
    norm = runs[0].optimizer.get_grad_norm()
    squares = sum(gradient.double().square().sum() for gradient in whole)
    dist.all_reduce(squares)
    assert norm == pytest.approx(squares.sqrt().item(), rel=1e-5)
    assert all(run.optimizer.get_grad_norm() == norm for run in runs)
    for before, after, unchanged in zip(whole, clipped, free, strict=True):
        torch.testing.assert_close(after, before * (1e-3 / (norm + 1e-6)), rtol=1e-5, atol=0)
        assert torch.equal(unchanged, before)


@ranks(2)
@pytest.mark.parametrize("in_one_pass", [True, False])
@pytest.mark.parametrize("stage", STAGES)
def test_after_a_step_no_gradient_takes_memory(stage: int, in_one_pass: bool) -> None:
    adam = partial(torch.optim.AdamW, fused=in_one_pass, foreach=False)
    run = boost(wire(stage=stage), Layers(64, 64, 64), optimizer=adam)
    step(run, features(), features())
    assert (run.optimizer._why_by_itself is None) == in_one_pass
    of_masters = [p for group in run.optimizer.param_groups for p in group["params"]]
    assert len(of_masters) == 4
    assert all(each.grad is None for each in (*of_masters, *run.model.parameters()))
    assert not own_gradients(run)


@ranks(2)
@pytest.mark.parametrize("option", ["clipping", "fp16", "fp16 without clipping"])
def test_a_fused_optimizer_divides_the_gradients_itself(option: str) -> None:
    options = {"max_norm": 1e-3} if option == "clipping" else FP16
    if option == "fp16 without clipping":
        options = options | {"max_norm": 0.0}
    runs = [boost(wire(**options)) for _ in range(2)]
    fused = runs[1].optimizer.unwrap()
    for group in fused.param_groups:
        group["fused"] = True
    divisors, step_group = [], one_pass.step_group

    def observed(optimizer: Any, group: Any, gradients: Any, divisor: torch.Tensor) -> Any:
        divisors.append(float(divisor))
        return step_group(optimizer, group, gradients, divisor)

    with mock.patch.object(one_pass, "step_group", observed):
        losses = [train(run) for run in runs]
    assert min(divisors) > 1
    assert all(group["params"] for group in fused.param_groups)
    assert_close(*losses, 1e-3)
    for name, before in masters(runs[0]).items():
        torch.testing.assert_close(masters(runs[1])[name], before, rtol=1e-3, atol=1e-4)


@ranks(2)
@pytest.mark.parametrize("case", ["AdamW", "offloaded", "Adam"])
def test_a_hybrid_adam_steps_in_one_pass_as_torchs_optimizer_does(case: str) -> None:
    options = {"max_norm": 1e-3, "cpu_offload": case == "offloaded"}
    kind = torch.optim.Adam if case == "Adam" else torch.optim.AdamW
    runs = [
        boost(wire(**options), optimizer=partial(kind, weight_decay=0.1, fused=True)),
        boost(wire(**options), optimizer=partial(HybridAdam, weight_decay=0.1, adamw_mode=case != "Adam")),
    ]
    assert_trains_equally(*runs)
    assert_equal(*map(masters, runs))
    assert [run.optimizer._why_by_itself for run in runs] == [None, None]


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
def test_a_step_in_one_pass_is_the_optimizers_own_and_tells_the_amax() -> None:
    """A hook makes the optimizer step by itself, and the amaxes are found by reading the masters again."""
    runs = [boost(wire(max_norm=1e-3)) for _ in range(2)]
    for run in runs:
        for group in run.optimizer.unwrap().param_groups:
            group["fused"] = True
    seen = []
    runs[1].optimizer.unwrap().register_step_pre_hook(
        lambda optimizer, *_: seen.append(len(optimizer.param_groups[0]["params"]))
    )
    known = [], []
    for run, of_run in zip(runs, known, strict=True):

        def observed(shards: Any, group: Any, amaxes: Any, of_run: list[Any] = of_run) -> torch.Tensor:
            of_run.extend(amaxes)
            return agree_on_amax(shards, group, amaxes)

        with mock.patch.object(gathered_weights, "agree_on_amax", observed):
            train(run)
    assert min(seen) > 0
    assert [run.optimizer._why_by_itself for run in runs] == [None, "hooks are called before or after its step"]
    for name, before in masters(runs[0]).items():
        # a divided gradient is rounded, one that is divided while it is read is not
        torch.testing.assert_close(masters(runs[1])[name], before, rtol=1e-4, atol=1e-5)
    assert known[0]
    assert all(amax is not None for amax in known[0])
    assert set(known[1]) == {None}


@ranks(2)
@pytest.mark.parametrize("option", ["one pass", "by itself"])
def test_a_check_before_the_update_knows_the_norm_and_loses_nothing(option: str) -> None:
    run = boost(wire(max_norm=1e-3))
    for group in run.optimizer.unwrap().param_groups:
        group["fused"] = option == "one pass"
    train(run, steps=1)
    norms = []
    run.optimizer.before_update = lambda: norms.append(run.optimizer.get_grad_norm())
    train(run, steps=1)
    assert (run.optimizer._why_by_itself is None) == (option == "one pass")
    before = {name: value.clone() for name, value in masters(run).items()}

    def refuse() -> None:
        raise ArithmeticError("enough")

    run.optimizer.before_update = refuse
    with pytest.raises(ArithmeticError, match="enough"):
        run.step(batch())
    for name, value in masters(run).items():
        assert torch.equal(value, before[name])
    assert norms == [pytest.approx(norms[0])]
    assert norms[0] > 1e-3


@ranks(2)
def test_a_check_that_ends_a_step_leaves_every_parameter_to_the_optimizer() -> None:
    run = boost(wire(), Layers(64, 64, 64, 64))
    step(run, features())
    expected = run.optimizer.state_dict()

    def refuse() -> None:
        raise ArithmeticError("enough")

    run.optimizer.before_update = refuse
    run.model.unwrap().dropped = {1}  # without a gradient it takes no part in a step
    with pytest.raises(ArithmeticError, match="enough"):
        step(run, features())
    found = run.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert found["state"].keys() == expected["state"].keys()


@ranks(2)
def test_each_parameter_group_keeps_its_own_rate() -> None:
    from colossalai.booster import Booster

    runs = []
    for plugin in (*(wire(stage=stage) for stage in STAGES), native()):
        model = tiny_llama()
        matrices = [value for value in model.parameters() if value.dim() > 1]
        vectors = [value for value in model.parameters() if value.dim() == 1]
        groups = [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 0.0}]
        booster = Booster(plugin=plugin)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(groups))
        runs.append(Boosted(booster, model.train(), optimizer))
    before = masters(runs[0])
    assert_trains_equally(*runs[:2])
    after = masters(runs[0])
    for run in runs:  # between steps the optimizer knows every master, as schedules and checkpoints read it
        for number, group in enumerate(run.optimizer.optim.param_groups):
            expected = run.optimizer._master_param_groups_of_current_rank[number]
            assert list(map(id, group["params"])) == list(map(id, expected)) != []
    for name in before:
        assert torch.equal(before[name], after[name]) == (before[name].dim() == 1), name
    losses = train(boost(wire()))
    assert_close(train(runs[2]), losses, 3 * CLOSE, gradients=False)  # another order of parameters


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_dropped_layer_keeps_its_weight_and_trains_when_it_returns(stage: int) -> None:
    run = boost(wire(stage=stage), Layers(64, 64, 64, 64))
    network = run.model.unwrap()
    steps = [masters(run)]
    for dropped in (set(), {1}, set()):
        network.dropped = dropped
        step(run, features())
        steps.append(masters(run))
    changed = [
        [not torch.equal(one[f"layers.{number}.weight"], other[f"layers.{number}.weight"]) for number in range(3)]
        for one, other in pairwise(steps)
    ]
    assert changed == [[True] * 3, [True, False, True], [True] * 3]


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


BLOCKWISE = FP8Config(granularity="blockwise")
NOT_GATHERED = {
    "odd sizes": lambda: (wire(), Layers(64, 72, 64), "size no multiple of 16"),
    "rowwise": lambda: (wire(fp8_config=FP8Config(granularity="rowwise")), Layers(64, 64, 64), "rowwise scales"),
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

    run = boost(wire(stage=stage, fp8_config=FP8Config(smooth_swiglu=True)), tiny_llama())
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
