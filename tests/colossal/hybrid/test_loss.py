"""The loss over chunks of logits under `HybridParallelPlugin` is that of whole logits in FP32."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from fp8booster import FP8Config, comm
from fp8booster.monitor.traffic import count_traffic
from fp8booster.nn.fused import fused_summary, linear_cross_entropy, use_fused_loss, use_native_loss, why_not_fused
from fp8booster.nn.fused import loss as loss_module
from fp8booster.nn.fused.loss import SPREAD_LOSS, SPREAD_LOSS_REASON, VocabularyPart
from fp8booster.nn.weights.casting import Casts
from tests.colossal.hybrid.runs import LENGTH, MODES, HybridRun, fp8, parts, sizes, start
from tests.colossal.hybrid.test_sharded_models import MODELS
from tests.colossal.models import tiny_llama
from tests.distributed import TEST_SECONDS, ranks
from tests.nn.fused.models import build
from tests.nn.reference import signal_to_noise
from tests.plugins.test_low_level_zero_census import Census

ROWS, FEATURES, TOKENS = 64, 32, 50
"""Of a head on each rank, and of hidden states."""

WITHIN = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Of gradients, by norm, against those in double precision."""


def whole_head(vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Hidden states, head and bias, the latter with rows of padding, and targets: the same on all ranks."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, FEATURES), 0.3 * torch.randn(2 * ROWS, FEATURES)
    targets = torch.randint(0, vocabulary, (TOKENS,))
    targets[:3] = targets[::7] = -100
    return hidden, weight, torch.randn(2 * ROWS), targets


def own_part(vocabulary: int) -> tuple[slice, VocabularyPart]:
    """This rank's rows, and what they are."""
    first = dist.get_rank() * ROWS
    columns = min(max(vocabulary - first, 0), ROWS)
    return slice(first, first + ROWS), VocabularyPart(vocabulary, columns, first, dist.group.WORLD)


@ranks(2)
@pytest.mark.parametrize("case", [*((vocabulary, dtype) for vocabulary in (128, 100, 60) for dtype in WITHIN)], ids=str)
def test_a_head_spread_over_ranks_has_the_loss_and_gradients_of_a_whole_one(case: tuple[int, torch.dtype]) -> None:
    vocabulary, dtype = case
    *whole, targets = whole_head(vocabulary)
    hidden, weight, bias = (value.to(dtype).double().requires_grad_() for value in whole)
    rows, part = own_part(vocabulary)
    for reduction in ("mean", "sum"):
        logits = F.linear(hidden, weight, bias)[:, :vocabulary]
        right = F.cross_entropy(logits, targets, reduction=reduction)
        exact = torch.autograd.grad(right, (hidden, weight, bias))
        for chunk in (None, 16):
            leaves = [value.detach().to(dtype).requires_grad_() for value in (hidden, weight[rows], bias[rows])]
            found = linear_cross_entropy(
                *leaves[:2], targets, bias=leaves[2], reduction=reduction, chunk_tokens=chunk, vocabulary=part
            )
            found.backward()
            torch.testing.assert_close(found.double(), right, rtol=WITHIN[dtype], atol=0)
            gradients = [leaf.grad.double() for leaf in leaves]
            dist.all_reduce(gradients[0])
            for gradient, other in zip(gradients, (exact[0], exact[1][rows], exact[2][rows]), strict=True):
                assert (gradient - other).norm() <= WITHIN[dtype] * other.norm()
            assert not leaves[1].grad[part.columns :].any()  # padding


@ranks(2)
def test_statistics_have_what_a_spread_loss_sends() -> None:
    hidden, weight, _, targets = whole_head(128)
    rows, part = own_part(128)
    comm.reset_statistics()
    with count_traffic() as counted:
        linear_cross_entropy(
            hidden, weight[rows].requires_grad_(), targets, chunk_tokens=16, vocabulary=part
        ).backward()
    row = comm.statistics()[SPREAD_LOSS]
    chunks = -(-TOKENS // 16)
    assert row.uncompressed == {SPREAD_LOSS_REASON: chunks}
    assert row.wire_bytes == row.raw_bytes == counted.sent == TOKENS * 2 * 4  # to the one other rank


@ranks(2)
def test_a_target_that_is_no_token_makes_its_row_nan_and_ignored_rows_do_not_count() -> None:
    hidden, weight, _, targets = whole_head(100)
    rows, part = own_part(100)
    targets = torch.where(targets == -100, -100, 7)
    hidden[targets == -100] = torch.nan
    logits = hidden @ weight[rows].t()
    targets[1], targets[4] = 100, 5  # a row of padding, and what ignore_index may be
    kept = (targets != 5) & (targets != -100)
    targets[targets == -100] = 5
    hidden[1] = 1.0
    logits = hidden @ weight[rows].t()
    losses, _ = part.cross_entropy(logits, targets, ignore_index=5, factor=torch.ones(()))
    assert losses[1].isnan()
    assert logits[1, : part.columns].isnan().all()
    kept[1] = False
    right = F.cross_entropy(hidden[kept] @ weight[:100].t(), targets[kept], reduction="none")
    torch.testing.assert_close(losses[kept], right)
    assert not losses[targets == 5].any()
    assert not logits[targets == 5].any()


@ranks(2)
def test_in_fp8_too_a_head_spread_over_ranks_computes_what_a_whole_one_does() -> None:
    config = FP8Config()
    hidden, weight, _, targets = whole_head(128)
    rows, part = own_part(128)
    found = []
    for own, vocabulary in ((slice(None), None), (rows, part)):
        leaves = [value.bfloat16().requires_grad_() for value in (hidden, weight[own])]
        loss = linear_cross_entropy(*leaves, targets, vocabulary=vocabulary, casts=Casts(config))
        loss.backward()
        found.append((loss, leaves[0].grad.float(), leaves[1].grad.float()))
    (loss, of_hidden, of_weight), (own_loss, own_hidden, own_weight) = found
    dist.all_reduce(own_hidden)
    torch.testing.assert_close(own_loss, loss, rtol=1e-2, atol=0)  # scales are those of each shard
    assert signal_to_noise(own_hidden, of_hidden) > 12
    assert signal_to_noise(own_weight, of_weight[rows]) > 12


CASES = {
    f"{name} {mode}": (name, mode)
    for name, modes in {
        "LLaMA": (
            "DP2",
            "TP2",
            "TP2 split_gather",
            "SP2 all_to_all",
            "SP2 ring_attn",
            "PP2 1f1b",
            "PP2 interleaved",
            "PP2 zbv",
        ),
        "Mistral": ("TP2", "PP2 1f1b"),
        "Qwen2": ("TP2", "PP2 1f1b"),
    }.items()
    for mode in modes
}

VOCABULARY = 250
"""Of LLaMA: of 256 rows of the head, 6 are padding."""


def boosted(name: str, mode: str, config: FP8Config | None = None, **arguments: Any) -> HybridRun:
    plugin = fp8(MODES[mode], fp8_config=config, **arguments)
    if name == "LLaMA":
        layers = max(2, parts(plugin))
        model = tiny_llama(**sizes(vocab_size=VOCABULARY, num_hidden_layers=layers, num_key_value_heads=4))
    else:
        torch.manual_seed(0)
        model = MODELS[name][0]()
    return start(plugin, model)


def batch_of(run: HybridRun) -> dict[str, torch.Tensor]:
    """As `batch_of_tokens`, for a run's model."""
    return batch_of_tokens(run.model.unwrap().config.vocab_size)


def batch_of_tokens(vocabulary: int) -> dict[str, torch.Tensor]:
    """Tokens of which one half and some of the other half have no label."""
    tokens = torch.randint(1, vocabulary, (8, LENGTH), generator=torch.Generator().manual_seed(1))
    labels = tokens.clone()
    labels[: len(labels) // 2, : LENGTH // 2] = labels[:, ::5] = -100
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def backward(run: HybridRun, batch: dict[str, torch.Tensor]) -> tuple[float, Any]:
    """Loss, which one rank of a pipeline has, and the output where there is no pipeline."""
    outputs = None
    if run.booster.plugin.pp_size > 1:
        batch = {key: value for key, value in batch.items() if key != "attention_mask"}
        loss = run.booster.execute_pipeline(
            iter([batch]), run.model, lambda output, _: output.loss, run.optimizer, return_loss=True
        )["loss"]
    else:
        outputs = run.model(**batch)
        loss = outputs.loss
        run.booster.backward(loss, run.optimizer)
    loss = torch.zeros(()) if loss is None else loss.detach().float().reshape(()).clone()
    dist.all_reduce(loss, group=run.booster.plugin.pp_group)
    return loss.item(), outputs


def taken_gradients(run: HybridRun) -> dict[str, torch.Tensor]:
    """Those of this rank, which are gone then."""
    found = {}
    for name, value in run.model.unwrap().named_parameters():
        if run.booster.plugin.zero_stage:
            gradient = run.optimizer.get_working_grad_by_param_id(id(value))
        else:
            gradient = value.grad
        if gradient is not None:
            found[name] = gradient.detach().float().clone()
    run.optimizer.zero_grad()
    return found


@contextmanager
def native_loss_in_fp32(model: nn.Module) -> Iterator[None]:
    """Shardformer's own loss, of logits in FP32."""
    use_native_loss(model)
    hook = model.lm_head.register_forward_hook(lambda module, args, logits: logits.float())
    try:
        yield
    finally:
        hook.remove()
        assert use_fused_loss(model)


def assert_exact(name: str, mode: str) -> None:
    """Loss and gradients are those of whole logits in FP32."""
    run = boosted(name, mode)
    model = run.model.unwrap()
    assert fused_summary(model).endswith(", loss over chunks of logits")
    batch = batch_of(run)
    loss, outputs = backward(run, batch)
    gradients = taken_gradients(run)
    with native_loss_in_fp32(model):
        right, native_outputs = backward(run, batch)
    exact = taken_gradients(run)
    if outputs is not None:
        assert outputs.logits is None
        assert native_outputs.logits.dtype is torch.float32
    assert abs(loss - right) <= 1e-5 * right, (loss, right)
    apart = {
        name: signal_to_noise(gradient, exact[name])
        for name, gradient in gradients.items()
        if exact[name].any() or gradient.any()
    }
    assert gradients.keys() == exact.keys()
    for name, decibels in apart.items():
        assert decibels > at_least(name, run), apart


def at_least(name: str, run: HybridRun) -> float:
    """How near a gradient is to that of the exact loss, in dB."""
    plugin = run.booster.plugin
    if name == "lm_head.weight" and plugin.sp_size == plugin.dp_size == 1:
        return 45  # rounded to BF16 once more
    # what FP8 makes of hidden states' gradients that differ so, in products or in what ranks add up
    return 25 if name in ("lm_head.weight", "model.norm.weight") else 15


@ranks(2)
@pytest.mark.parametrize("case", CASES)
def test_loss_and_gradients_are_those_of_whole_logits_in_fp32(case: str) -> None:
    assert_exact(*CASES[case])


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "PP2 1f1b"])
def test_whole_logits_are_there_where_something_reads_them(mode: str) -> None:
    run = boosted("LLaMA", mode)
    model = run.model.unwrap()
    batch = batch_of(run)
    if run.booster.plugin.pp_size > 1:
        backward(run, batch)  # stages learn what they exchange
        run.optimizer.zero_grad()
        with torch.no_grad():
            outputs = run.booster.execute_pipeline(
                iter([{key: value for key, value in batch.items() if key != "attention_mask"}]),
                run.model.eval(),
                lambda output, _: output.loss,
                return_loss=True,
                return_outputs=True,
            )["outputs"]
        assert (outputs is not None) == run.booster.plugin.stage_manager.is_last_stage()
        assert outputs is None or outputs["logits"].shape == (8, LENGTH, VOCABULARY)
        return
    loss = run.model(**batch).loss.item()
    as_tuple = run.model(**batch, return_dict=False)
    assert as_tuple[1].shape[:2] == (8, LENGTH)
    assert abs(as_tuple[0].item() - loss) <= 1e-2 * loss
    assert run.model(**batch, logits_to_keep=LENGTH).logits.shape == as_tuple[1].shape
    unlabelled = {key: value for key, value in batch.items() if key != "labels"}
    assert run.model(**unlabelled).logits.shape == as_tuple[1].shape
    run.model.eval()
    evaluated = run.model(**batch)
    assert evaluated.logits.shape == as_tuple[1].shape
    assert abs(evaluated.loss.item() - loss) <= 1e-2 * loss
    run.model.train()
    use_native_loss(model)
    assert fused_summary(model).endswith("loss as it was (use_fused_loss changes that)")
    assert run.model(**batch).logits.shape == as_tuple[1].shape
    assert use_fused_loss(model)
    with torch.no_grad():
        assert run.model(**batch).loss.item() == loss


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "SP2 all_to_all", "PP2 1f1b"])
def test_it_trains_like_the_native_loss(mode: str) -> None:
    losses = []
    for native in (False, True):
        run = boosted("LLaMA", mode)
        batch = batch_of(run)
        if native:
            use_native_loss(run.model.unwrap())
        losses.append([])
        for _ in range(4):
            losses[-1].append(backward(run, batch)[0])
            run.optimizer.step()
            run.optimizer.zero_grad()
    fused, whole = losses
    assert fused[-1] < fused[0]
    for one, other in zip(fused, whole, strict=True):
        assert abs(one - other) <= 1e-2 * other, losses  # in Colossal-AI there are losses in BF16


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "PP2 1f1b"])
def test_a_head_in_fp8_has_its_three_products_in_fp8(mode: str) -> None:
    run = boosted("LLaMA", mode, FP8Config(vocabulary_head=True))
    batch = batch_of(run)
    with Census() as counted:
        loss, _ = backward(run, batch)
    assert not counted.other, counted.other
    run.optimizer.zero_grad()
    with native_loss_in_fp32(run.model.unwrap()):
        right, _ = backward(run, batch)
    assert abs(loss - right) <= 1e-3 * right, (loss, right)


@ranks(2)
def test_many_chunks_give_the_loss_of_one() -> None:
    run = boosted("LLaMA", "TP2 split_gather")
    batch = batch_of(run)
    loss, _ = backward(run, batch)
    gradients = taken_gradients(run)
    with mock.patch.object(loss_module, "CHUNK_BYTES", 1), Census() as counted:
        again, _ = backward(run, batch)
    assert sum(counted.other.values()) == 3 * 2  # of 128 tokens each
    assert abs(loss - again) <= 1e-6 * loss
    assert signal_to_noise(taken_gradients(run)["lm_head.weight"], gradients["lm_head.weight"]) > 45


@ranks(2)
def test_models_that_train_in_two_threads_keep_their_losses() -> None:
    runs = [boosted("LLaMA", "TP2") for _ in range(2)]
    models = [run.model.unwrap() for run in runs]
    for parameter in models[1].parameters():
        parameter.data.mul_(1.1)
    batch = batch_of_tokens(VOCABULARY)
    expected = [model(**batch).loss.item() for model in models]
    first_is_within, first_may_end = threading.Event(), threading.Event()
    found: dict[int, float] = {}

    def wait_within(*_: Any) -> None:
        first_is_within.set()
        first_may_end.wait()

    def let_first_end(*_: Any) -> None:
        first_may_end.set()
        thread.join()

    def forward(number: int) -> None:
        found[number] = models[number](**batch).loss.item()

    thread = threading.Thread(target=forward, args=(0,))
    for model, hook in zip(models, (wait_within, let_first_end), strict=True):
        model.model.embed_tokens.register_forward_pre_hook(hook)
    thread.start()
    assert first_is_within.wait(TEST_SECONDS)
    forward(1)
    assert [found[number] for number in range(2)] == expected
    assert expected[0] != expected[1]


@ranks(2)
def test_what_stays_native_says_why() -> None:
    model = boosted("LLaMA", "TP2", parallel_output=False).model.unwrap()
    assert why_not_fused(model) == "parallel_output=False gathers its logits"
    model = boosted("LLaMA", "TP2", FP8Config(fused=False)).model.unwrap()
    assert "its forward was replaced" in why_not_fused(model)
    assert not use_fused_loss(model)
    model = boosted("Qwen2", "TP2").model.unwrap()
    reason = "the zero-bubble schedule computes the weight gradient of its lm_head in a pass of its own"
    with mock.patch.object(model.lm_head, "use_zbv", True):
        assert why_not_fused(model) == reason
    for name, value, reason in (
        ("skip_bias_add", True, "its lm_head has skip_bias_add"),
        ("gather_output", True, "parallel_output=False gathers its logits"),
        ("seq_parallel_mode", "split_gather", "its lm_head reads a sequence that is spread over ranks"),
    ):
        with mock.patch.object(model.lm_head, name, value):
            assert why_not_fused(model) == reason
    assert why_not_fused(model) is None
    model = boosted("LLaMA", "SP2 all_to_all").model.unwrap()
    hook = model.lm_head.register_forward_hook(lambda *_: None)
    assert why_not_fused(model) == "its lm_head has hooks, which would not run"
    hook.remove()
    assert why_not_fused(model) is None


def test_a_forward_that_scales_its_logits_stays_as_shardformer_wrote_it() -> None:
    from colossalai.shardformer.modeling.command import get_lm_forward_with_dist_cross_entropy
    from colossalai.shardformer.shard import ShardConfig

    from fp8booster.colossal.tensor.loss import use_sharded_loss

    model, config = build("cohere"), ShardConfig(enable_tensor_parallelism=False)
    forward = model.forward = types.MethodType(get_lm_forward_with_dist_cross_entropy(config), model)
    use_sharded_loss(model, config)
    assert model.__dict__["forward"] is forward
    assert "forward was replaced" in why_not_fused(model)
