"""Training in FP8: every option and habit of Colossal-AI's plugin, with FP8 products beneath."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, FP8Linear, convert_to_fp8, report
from fp8booster.nn.weights.casting import Casts
from tests.colossal.models import VOCABULARY, tiny_llama
from tests.distributed import ranks
from tests.nn.reference import count_calls
from tests.plugins.test_low_level_zero_native import FP16, OPTIONS, OVERFLOWING
from tests.plugins.training import (
    STAGES,
    Boosted,
    Outcome,
    assert_close,
    assert_equal,
    assert_same_outcome,
    assert_trains_equally,
    boost,
    fp8,
    native,
    outcome,
    rank_batches,
    train,
)

LAYERS = 14
"""Linear layers of `tiny_llama` beside the vocabulary head."""

CLOSE = 1e-2
"""How far a loss in FP8 may lie from that in 16 bits, in the first steps of `tiny_llama`."""

WITHOUT_EFFECT = (
    "norm_type",
    "reduce_bucket_size_in_m",
    "overlap_communication",
    "overlap_allgather",
    "cpu_offload",
    "verbose",
    "cast_inputs",
    "fp8_communication",
)
"""Options that may change where and when things are computed, but not a bit of the result."""


def options_for_fp8(option: str) -> list[dict[str, Any]]:
    """The cases of an option that FP8 takes, FP8 communication left off."""
    off = {"fp8_communication": False, "use_fp8": True}
    return [case | off for case in OPTIONS[option] if case.get("precision") != "fp32"]


@functools.cache
def outcome_of(**case: Any) -> Outcome:
    """In FP8, trained once for all tests of these ranks."""
    return outcome(boost(fp8(**case)))


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_trains_in_fp8(option: str) -> None:
    for case in options_for_fp8(option):
        first, second = (outcome_of(stage=stage, **case) for stage in STAGES)
        assert_same_outcome(first, second)
        in_16_bits = train(boost(native(**case | {"use_fp8": False})))
        assert_close(in_16_bits, first.losses, CLOSE)
        assert first.losses != in_16_bits


@ranks(2)
@pytest.mark.parametrize("option", WITHOUT_EFFECT)
def test_options_about_place_and_time_change_no_bit(option: str) -> None:
    for case in options_for_fp8(option):
        for stage in STAGES:
            assert_same_outcome(outcome_of(stage=stage), outcome_of(stage=stage, **case))


@ranks(2)
def test_a_bucket_size_that_is_given_is_kept_and_the_default_is_larger() -> None:
    def size(plugin: Any) -> int:
        return plugin.zero_optim_kwargs["reduce_bucket_size"]

    given, default = {"reduce_bucket_size_in_m": 3}, {"fp8_communication": True}
    assert size(fp8(**given | default)) == size(fp8(**given)) == size(native(**given))
    assert size(fp8(**default)) > size(native()) == size(fp8())


@ranks(2)
def test_fp8_by_name_and_by_position_are_the_same() -> None:
    by_position = type(fp8())(2, "bf16", use_fp8=True, fp8_communication=False, fp8_config=FP8Config())
    assert_trains_equally(boost(fp8(stage=2, fp8_config=None)), boost(by_position))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_weight_is_cast_once_for_all_micro_batches_of_a_step(stage: int) -> None:
    run = boost(fp8(stage=stage))
    with pytest.MonkeyPatch.context() as monkeypatch:
        casts = count_calls(monkeypatch, Casts, "quantize_weight")
        for step in range(1, 4):
            run.step(*rank_batches(3), no_sync=stage == 1)
            assert len(casts) == step * LAYERS
            assert len({weight.data_ptr() for _, weight in casts}) == LAYERS


@ranks(2)
def test_gradients_accumulate_as_in_16_bits() -> None:
    for arguments, no_sync in (({"stage": 1}, True), ({"stage": 1}, False), ({"stage": 2}, False)):
        in_16_bits = train(boost(native(**arguments)), micro_batches=3, no_sync=no_sync)
        losses = train(boost(fp8(**arguments)), micro_batches=3, no_sync=no_sync)
        assert_close(in_16_bits, losses, CLOSE)
    reduced_each_time = [boost(fp8(stage=stage)) for stage in STAGES]
    assert_trains_equally(*reduced_each_time, micro_batches=3)


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_the_gradient_norm_is_near_that_of_16_bits_and_clips(stage: int) -> None:
    norms = []
    for plugin in (native(stage=stage), fp8(stage=stage)):
        run = boost(plugin)
        train(run, steps=1)
        norms.append(run.optimizer.get_grad_norm())
    assert_close(norms[:1], norms[1:], 0.02)
    # SGD without momentum: a step is as long as the gradient
    limit = norms[0] / 10
    before, after = _sgd_step(fp8(stage=stage, max_norm=limit, precision="fp16", initial_scale=2.0**10))
    moved = torch.cat([(after[name] - before[name]).flatten() for name in before]).norm().item()
    assert_close([limit], [moved], 0.02)


def _sgd_step(plugin: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Master weights before and after one step at learning rate 1, whole, by number."""
    from colossalai.booster import Booster

    model = tiny_llama()
    booster = Booster(plugin=plugin)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    run = Boosted(booster, model.train(), optimizer)
    before = _masters(run)
    run.step(*rank_batches(1))
    return before, _masters(run)


def _masters(run: Boosted) -> dict[str, torch.Tensor]:
    whole = {}
    for number, shard in enumerate(run.optimizer.get_working_to_master_map().values()):
        shards = [torch.empty_like(shard) for _ in range(dist.get_world_size())]
        dist.all_gather(shards, shard)
        whole[str(number)] = torch.cat(shards)
    return whole


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_an_overflow_in_fp16_reaches_the_gradients_and_the_step_is_skipped(stage: int) -> None:
    run = boost(fp8(stage=stage, **OVERFLOWING | {"backoff_factor": 2.0**-16}))
    gradient_is_finite = []
    layer = next(module for module in run.model.modules() if isinstance(module, FP8Linear))
    layer.weight.register_hook(lambda gradient: gradient_is_finite.append(gradient.isfinite().all().item()))
    before = run.parameters()
    run.step(*rank_batches(1))
    assert_equal(before, run.parameters())
    losses = train(run)
    assert gradient_is_finite == [False, True, True, True]
    assert_close(train(boost(native(stage=stage, **FP16))), losses, CLOSE)


@ranks(2)
@pytest.mark.parametrize("how", ["reentrant", "not reentrant", "native reduction after it"])
def test_checkpointing_activations_changes_no_bit(how: str) -> None:
    for stage in STAGES:
        model = tiny_llama()
        model.gradient_checkpointing_enable({"use_reentrant": how == "reentrant"})
        arguments = {"stage": stage, "overlap_communication": how != "native reduction after it"}
        with pytest.MonkeyPatch.context() as monkeypatch:
            casts = count_calls(monkeypatch, Casts, "quantize_weight")
            products = count_calls(monkeypatch, torch, "_scaled_mm")
            run = boost(fp8(**arguments), model)
            run.step(*rank_batches(1))
            assert len(casts) == LAYERS
            assert len(products) == 4 * LAYERS  # fprop runs again in the backward pass
        plain = boost(fp8(**arguments))
        plain.step(*rank_batches(1))
        assert_trains_equally(plain, run)


@ranks(2)
@pytest.mark.parametrize("head", ["head in BF16", "head in FP8"])
def test_tied_embeddings_train(head: str) -> None:
    everything = FP8Config(layers=lambda name, module: True)
    config = {"fp8_config": everything} if head == "head in FP8" else {}
    for overlap in (False, True):
        arguments = {"stage": 2, "overlap_allgather": overlap}
        run = boost(fp8(**arguments, **config), _tied_llama())
        losses = train(run)
        network = run.model.unwrap()
        assert network.lm_head.weight is network.model.embed_tokens.weight
        assert len(report(run.model).fp8) == LAYERS + (head == "head in FP8")
        assert_close(train(boost(native(**arguments), _tied_llama())), losses, 3 * CLOSE)


def _tied_llama() -> nn.Module:
    return tiny_llama(tie_word_embeddings=True)


class LateGather:
    """The handle of a gather that does not begin before it is waited for."""

    def __init__(self, gather: Callable[..., object], *args: Any) -> None:
        self._gather, self._args = gather, args

    def wait(self) -> None:
        self._gather(*self._args)


@ranks(2)
@pytest.mark.parametrize("head", ["own head", "tied head"])
def test_weights_that_are_gathered_late_are_waited_for(head: str) -> None:
    from colossalai.zero.low_level import low_level_optim

    gather = low_level_optim.all_gather_into_flat_tensor_nd

    def gather_late(output: torch.Tensor, shard: torch.Tensor, group: Any, async_op: bool = False) -> LateGather:
        assert async_op
        return LateGather(gather, output, shard, group)

    arguments = {"fp8_config": FP8Config(layers=lambda name, module: True)}
    for stage in STAGES:
        expected = boost(fp8(stage=stage, **arguments), tiny_llama(tie_word_embeddings=head == "tied head"))
        late = boost(
            fp8(stage=stage, overlap_allgather=True, **arguments), tiny_llama(tie_word_embeddings=head == "tied head")
        )
        losses = train(expected)
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setattr(low_level_optim, "all_gather_into_flat_tensor_nd", gather_late)
            assert train(late) == losses
        assert_equal(expected.parameters(), late.parameters())


@ranks(2)
def test_a_model_without_linear_layers_is_refused_unchanged() -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Embedding(8, 16), nn.LayerNorm(16))

    refused = model()
    optimizer = torch.optim.AdamW(refused.parameters())
    groups = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(ValueError, match=r"no linear layers"):
        fp8().configure(refused, optimizer)
    assert [vars(module).keys() for module in refused.modules()] == [
        vars(module).keys() for module in model().modules()
    ]
    assert_equal(dict(model().named_parameters()), dict(refused.named_parameters()))
    assert [dict(group) for group in optimizer.param_groups] == groups


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_a_learning_rate_scheduler_drives_it(stage: int) -> None:
    from colossalai.booster import Booster

    model = tiny_llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: float(step < 2))
    booster = Booster(plugin=fp8(stage=stage))
    model, optimizer, _, _, schedule = booster.boost(model, optimizer, lr_scheduler=schedule)
    run = Boosted(booster, model, optimizer)
    weights = [run.parameters()]
    for batch in rank_batches(3):
        run.step(batch)
        schedule.step()
        weights.append(run.parameters())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.equal(weights[1][name], weights[2][name])
    assert_equal(weights[2], weights[3])  # the rate was zero


@ranks(2)
def test_nan_in_the_input_reaches_the_loss() -> None:
    run = boost(fp8())
    tokens = rank_batches(1)[0]
    embeddings = run.model.unwrap().model.embed_tokens(tokens).detach()
    assert run.model(inputs_embeds=embeddings, labels=tokens).loss.isfinite()
    embeddings[0, 0, 0] = torch.nan
    assert run.model(inputs_embeds=embeddings, labels=tokens).loss.isnan()


@ranks(2)
def test_evaluation_computes_in_fp8_and_leaves_training_alone() -> None:
    run, undisturbed = boost(fp8()), boost(fp8())
    batch = rank_batches(1)[0]
    run.step(batch)
    undisturbed.step(batch)
    expected = convert_to_fp8(tiny_llama().bfloat16())
    expected.load_state_dict(run.parameters(), strict=False)
    for model in (run.model, expected):
        model.eval()
    with torch.no_grad():
        loss = run.loss(batch)
        assert not loss.requires_grad
        assert loss == expected(input_ids=batch, labels=batch).loss
    run.model.train()
    assert_trains_equally(undisturbed, run)


@ranks(2)
@pytest.mark.parametrize("fp8_communication", [True, False])
def test_evaluation_multiplies_by_the_weights_that_training_has(
    fp8_communication: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    casts = count_calls(monkeypatch, Casts, "quantize_weight")
    run = boost(fp8(fp8_config=FP8Config(fused=False), fp8_communication=fp8_communication))
    first, second = rank_batches(2)
    for _ in range(2):
        run.step(first)
        casts.clear()
        run.model.eval()
        with torch.no_grad():
            losses = [run.loss(batch) for batch in (first, second, first)]
        # those that ZeRO gathered in FP8 were cast by it
        assert len(casts) == (0 if fp8_communication else LAYERS)
        run.model.train()
        with torch.no_grad():
            assert run.loss(first) == losses[0] == losses[2]
            assert run.loss(second) == losses[1]


@ranks(2)
def test_a_model_is_boosted_without_an_optimizer() -> None:
    from colossalai.booster import Booster

    model, *_ = Booster(plugin=fp8()).boost(tiny_llama())
    trained = boost(fp8())
    batch = rank_batches(1)[0]
    with torch.no_grad():
        assert Boosted(trained.booster, model.train(), trained.optimizer).loss(batch) == trained.loss(batch)


@ranks(2)
def test_odd_sizes_are_padded_and_reported() -> None:
    everything = FP8Config(layers=lambda name, module: True)
    sizes = {"batch": 3, "length": 31}
    run = boost(fp8(fp8_config=everything), tiny_llama(vocab_size=VOCABULARY + 3))
    plain = boost(native(), tiny_llama(vocab_size=VOCABULARY + 3))
    batches = rank_batches(3, **sizes)
    assert_close([plain.step(batch)[0] for batch in batches], [run.step(batch)[0] for batch in batches], CLOSE)
    rows = {row.name: row for row in report(run.model).rows}
    assert {row.precision for row in rows.values()} == {"FP8"}
    head = rows.pop("module.lm_head")
    assert head.notes == "padded: out 131->144, tokens 93->96"
    assert {row.notes for row in rows.values()} == {"padded: tokens 93->96"}
    assert "15 padded to multiples of 16" in report(run.model).summary()
