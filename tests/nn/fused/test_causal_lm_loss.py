"""transformers' causal language models with their loss over chunks of logits, beside their native forward."""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import pytest
import torch
from torch import nn

import fp8booster.colossal  # noqa: F401  (mends colossalai before it is imported)
from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.config import WeightCopies
from fp8booster.kernels.scales import amax_of
from fp8booster.nn.fused import loss as loss_module
from fp8booster.nn.fused.causal_lm_loss import _with_transpose, use_fused_loss, use_native_loss, why_not_fused
from fp8booster.nn.linear import speed_model
from fp8booster.nn.weights.delivered import deliver_amax
from tests.colossal.moe.models import tiny_mixtral
from tests.distributed import run_ranks
from tests.nn.fsdp.resharding import follow_resharding
from tests.nn.fused.models import FAMILIES, INSTALLED, VOCABULARY, batch, build


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that even these batches take several."""
    monkeypatch.setattr(loss_module, "ROWS", 1)
    monkeypatch.setattr(loss_module, "CHUNK_BYTES", 20 * VOCABULARY * 4)


def pair(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> list[nn.Module]:
    """A model, and one equal to it that computes its loss over chunks."""
    native = build(family, dtype, **changes)
    model = copy.deepcopy(native)
    assert use_fused_loss(model)
    return [native, model]


def labelled(**more: Any) -> dict[str, Any]:
    """A batch whose first tokens do not count."""
    ids = batch()
    labels = ids.clone()
    labels[:, :5] = -100
    return {"input_ids": ids, "labels": labels} | more


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_trains_as_natively(models: list[nn.Module], arguments: dict[str, Any]) -> None:
    """The same loss and gradients in FP32, and no logits."""
    native, model = models
    right, output = native(**arguments), model(**arguments)
    assert type(output) is type(right)
    assert right.logits is not None
    assert output.logits is None
    torch.testing.assert_close(output.loss, right.loss, rtol=1e-6, atol=1e-6)
    (right.loss.sum() * 3).backward()
    (output.loss.sum() * 3).backward()
    torch.testing.assert_close(gradients(model), gradients(native), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [False, True])
def test_loss_and_gradients_are_the_native_ones(tied, family, small_chunks) -> None:
    assert_trains_as_natively(pair(family, tie_word_embeddings=tied), labelled())


ADJUSTED = {
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
    "gemma2": {"final_logit_softcapping": 0.5},
}


@pytest.mark.parametrize("family", INSTALLED)
def test_loss_and_gradients_of_all_families_are_the_native_ones(family, small_chunks) -> None:
    assert_trains_as_natively(pair(family, **ADJUSTED.get(family, {})), labelled(num_items_in_batch=17))


@pytest.mark.parametrize("routers", [False, True])
def test_loss_and_gradients_of_a_mixtral_are_the_native_ones(routers, small_chunks) -> None:
    native = tiny_mixtral(router_aux_loss_coef=0.5).train()
    model = copy.deepcopy(native)
    assert use_fused_loss(model)
    arguments = labelled(output_router_logits=routers, attention_mask=torch.ones(2, 32, dtype=torch.int64))
    assert_trains_as_natively([native, model], arguments)
    right, output = native(**arguments), model(**arguments)
    assert (output.aux_loss is None) is (output.router_logits is None) is not routers
    if routers:
        assert torch.equal(output.aux_loss, right.aux_loss)


def test_a_head_with_a_bias_and_checkpointed_layers(small_chunks) -> None:
    models = pair()
    for model in models:
        model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_trains_as_natively(models, labelled())


@pytest.mark.parametrize(
    "more",
    [
        {"num_items_in_batch": 17},
        {"num_items_in_batch": torch.tensor(11)},
        {"num_items_in_batch": torch.tensor([11])},
        {"shift_labels": torch.arange(64).view(2, 32)},
        {"ignore_index": 7, "labels": batch()},
        {"attention_mask": torch.ones(2, 32, dtype=torch.int64), "output_hidden_states": True},
        {"labels": torch.where(torch.arange(32) < 31, -100, batch())},
    ],
    ids=["items", "tensor of items", "vector of items", "shifted", "ignored", "mask", "one token"],
)
def test_arguments_of_the_loss_mean_what_they_do_natively(more, small_chunks) -> None:
    assert_trains_as_natively(pair(), labelled(**more))


def test_other_outputs_are_there() -> None:
    native, model = pair()
    arguments = labelled(output_hidden_states=True, use_cache=True)
    right, output = native(**arguments), model(**arguments)
    assert len(output.hidden_states) == len(right.hidden_states) == 3
    for one, other in zip(output.hidden_states, right.hidden_states, strict=True):
        assert torch.equal(one, other)
    assert output.past_key_values.get_seq_length() == 32


def test_logits_are_there_for_who_asks() -> None:
    native, model = pair()
    arguments = labelled()
    for asking in ({"logits_to_keep": 32}, {"num_logits_to_keep": 32}, {"return_dict": False}, {"labels": None}):
        right, output = native(**arguments | asking), model(**arguments | asking)
        for index in range(2 if asking.get("labels", 0) is not None else 1):
            assert torch.equal(output[index], right[index])
    native.config.return_dict = model.config.return_dict = False
    try:
        right = native(**arguments)[1]
    except AttributeError:  # transformers 5's own forwards cannot
        with pytest.raises(AttributeError):
            model(**arguments)
    else:
        assert torch.equal(model(**arguments)[1], right)
    native.config.return_dict = model.config.return_dict = True
    assert model(**arguments).logits is None
    native.config.torchscript = model.config.torchscript = True
    assert torch.equal(model(**arguments)[1], native(**arguments)[1])
    native.config.torchscript = model.config.torchscript = False
    native.eval(), model.eval()
    right, output = native(**arguments), model(**arguments)
    assert torch.equal(output.loss, right.loss)
    assert torch.equal(output.logits, right.logits)
    ids = batch()[:, :4]
    assert torch.equal(
        model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0),
        native.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0),
    )


def test_a_loss_function_of_ones_own_is_called() -> None:
    _, model = pair()
    model.loss_function = lambda logits, labels, **_: logits.sum() * 0 + 5
    output = model(**labelled())
    assert output.loss.item() == 5
    assert output.logits is not None


def test_the_model_stays_what_it_was() -> None:
    native, model = pair()
    assert type(model) is type(native)
    assert model.state_dict().keys() == native.state_dict().keys()
    assert inspect.signature(model.forward) == inspect.signature(native.forward)
    twin = copy.deepcopy(model)
    assert twin.forward.__self__ is twin
    assert twin(**labelled()).logits is None
    assert use_fused_loss(model)
    use_native_loss(model)
    assert "forward" not in model.__dict__
    assert model(**labelled()).logits is not None


def test_a_hook_of_the_head_runs_though_it_came_later() -> None:
    _, model = pair()
    seen = []
    handle = model.lm_head.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert model(**labelled()).logits is not None
    assert seen == [(2, 32, VOCABULARY)]
    handle.remove()
    assert model(**labelled()).logits is None


def replaced_forward(model: nn.Module) -> None:
    model.forward = lambda **arguments: None


def other_head(model: nn.Module) -> None:
    model.lm_head = nn.Sequential(model.lm_head)


class Sharded(nn.Parameter):
    """As Gemini, and ZeRO that gathers late, mark their parameters."""


def other_parameter(model: nn.Module) -> None:
    model.lm_head.weight.__class__ = Sharded


def head_hook(model: nn.Module) -> None:
    model.lm_head.register_forward_pre_hook(lambda module, args: None)


def own_head_forward(model: nn.Module) -> None:
    model.lm_head.forward = lambda hidden: hidden


def larger_vocabulary(model: nn.Module) -> None:
    model.config.vocab_size += 1


def resharded_head(model: nn.Module) -> None:
    convert_to_fp8(model, FP8Config(layers=lambda name, module: True))
    follow_resharding(model)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced_forward, "forward was replaced"),
        (other_head, "lm_head is a Sequential"),
        (other_parameter, "is a Sharded"),
        (head_hook, "has hooks"),
        (own_head_forward, "the forward of its lm_head was replaced"),
        (larger_vocabulary, "vocab_size of 129"),
        (resharded_head, "whole only while the layer runs"),
        (lambda model: model.double(), "is torch.float64"),
    ],
)
def test_what_would_not_be_right_is_declined(change, reason) -> None:
    model = build(dtype=torch.float32)
    change(model)
    forward = model.__dict__.get("forward")
    assert not use_fused_loss(model)
    assert reason in why_not_fused(model)
    assert model.__dict__.get("forward") is forward


def test_other_models_are_declined() -> None:
    assert not use_fused_loss(nn.Linear(3, 4))
    assert "Linear is none of transformers' language models" in why_not_fused(nn.Linear(3, 4))
    model = build()
    model.__class__ = type("Own", (type(model),), {"forward": lambda self: None})
    assert not use_fused_loss(model)


def test_inside_a_peft_model_with_a_frozen_head(small_chunks) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> nn.Module:
        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        return peft.get_peft_model(build(dtype=torch.float32), lora).train()

    models = [adapted(), adapted()]
    assert use_fused_loss(models[1])
    assert_trains_as_natively(models, labelled())
    assert models[1].base_model.model.lm_head.weight.grad is None


def test_a_head_in_fp8_is_counted_and_reported(products, small_chunks, monkeypatch) -> None:
    native = build()
    convert_to_fp8(native, FP8Config(layers=lambda name, module: name == "lm_head", always=True))
    model = copy.deepcopy(native)
    assert use_fused_loss(model)
    torch.optim.SGD(model.parameters()).step()  # until the first, each backward counts as one
    right = native(**labelled())
    right.loss.backward()
    products.clear()
    output = model(**labelled())
    assert len(products) == 2 * 3  # 64 tokens of 128 16-bit logits in chunks of 40
    output.loss.backward()
    assert len(products) == 2 * 3
    assert output.logits is None
    torch.testing.assert_close(output.loss, right.loss, rtol=2e-3, atol=0)
    for name, gradient in gradients(native).items():
        noise = (gradients(model)[name].double() - gradient.double()).norm()
        assert noise < 0.05 * gradient.double().norm(), name
    assert "lm_head" in [row.name for row in report(model).fp8]
    assert model.lm_head.in_fp8 == {64: True}
    weight = model.lm_head.fp8_weight.held
    model(**labelled())
    assert model.lm_head.fp8_weight.held is weight  # one cast until an optimizer steps
    model.lm_head.fp8_casts = model.lm_head.fp8_casts.under(FP8Config())
    monkeypatch.setattr(speed_model, "fp8_pays", lambda *sizes: False)
    products.clear()
    assert model(**labelled()).logits is None
    assert products == []
    assert "lm_head" in [row.name for row in report(model).other]
    model.lm_head.fp8_casts = model.lm_head.fp8_casts.under(FP8Config(weight_copies=WeightCopies(high_precision=False)))
    model(**labelled())
    assert len(products) == 2 * 3  # there may be no 16-bit weight to compute with


def head_in_fp8(**config: Any) -> nn.Module:
    model = build()
    convert_to_fp8(model, FP8Config(layers=lambda name, module: name == "lm_head", **config))
    assert use_fused_loss(model)
    return model


def test_what_a_head_casts_in_inference_mode_is_not_kept_for_training() -> None:
    model = head_in_fp8()
    with torch.inference_mode():
        right = model(**labelled()).loss
    assert model.lm_head.fp8_weight.held is None
    torch.testing.assert_close(model(**labelled()).loss.detach(), right.clone(), rtol=1e-3, atol=0)


@pytest.mark.parametrize("kept", ["kept", "made in backward", "made by nobody"])
def test_a_head_has_its_weight_in_both_layouts_as_products_read_them(kept: str, monkeypatch) -> None:
    head = head_in_fp8(weight_copies=WeightCopies(transposes=kept == "kept")).lm_head
    if kept == "made by nobody":
        monkeypatch.setattr(type(head.fp8_weight), "backward", lambda *_, **__: None)
    found = _with_transpose(head, head.fp8_casts)
    assert found.transpose.is_contiguous()
    assert torch.equal(found.transpose.float(), found.data.float().t())
    assert torch.equal(found.scale_of_transpose(), found.inverse_scale)


@pytest.mark.parametrize("training", [True, False])
def test_a_head_that_evaluates_alone_notes_no_amaxes(training, monkeypatch) -> None:
    """Its model trains: delayed scales are learned where the head does."""
    model = head_in_fp8(emulate=True)
    asked, cast = [], model.lm_head.fp8_casts.quantize
    monkeypatch.setattr(
        model.lm_head.fp8_casts, "quantize", lambda role, *of, **how: asked.append(role) or cast(role, *of, **how)
    )
    model.lm_head.train(training)
    output = model(**labelled())
    assert output.logits is None
    assert output.loss.isfinite()
    assert bool(asked) == training


def test_a_head_in_fp8_takes_the_amax_that_came_with_its_input(small_chunks) -> None:
    model = build()
    convert_to_fp8(model, FP8Config(layers=lambda name, module: name == "lm_head"))
    assert use_fused_loss(model)
    right = model(**labelled()).loss
    amax = torch.zeros(())
    model.model.norm.register_forward_hook(lambda module, args, output: deliver_amax(output, amax))
    amax.fill_(math.nan)
    assert model(**labelled()).loss.isnan()  # it was not computed again
    hidden = model.model(labelled()["input_ids"]).last_hidden_state
    amax.copy_(amax_of(hidden))
    torch.testing.assert_close(model(**labelled()).loss, right, rtol=1e-3, atol=0)


@pytest.mark.parametrize("tied", [False, True])
def test_training_with_a_head_in_fp8_follows_that_in_high_precision(tied, small_chunks) -> None:
    losses = {}
    for in_fp8 in (False, True):
        model = build(dtype=torch.float32, tie_word_embeddings=tied)
        convert_to_fp8(model, FP8Config(emulate=True, always=True, vocabulary_head=in_fp8))
        assert use_fused_loss(model)
        assert report(model).head_in_fp8 == in_fp8
        assert ("vocabulary head among them" in report(model).summary()) == in_fp8
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        losses[in_fp8] = []
        for _ in range(16):
            loss = model(**labelled()).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[in_fp8].append(loss.item())
    assert losses[True] != losses[False]
    assert losses[True] == pytest.approx(losses[False], rel=0.01)
    assert losses[True][-1] < 0.7 * losses[True][0]


def _losses_under_zero(stage: int, fuse: bool) -> list[float]:
    from tests.plugins.training import boost, native, train

    model = build(num_hidden_layers=1, tie_word_embeddings=stage == 2)
    if fuse:
        assert use_fused_loss(model)
    boosted = boost(native(stage=stage), model)
    losses = train(boosted, steps=4, micro_batches=2, no_sync=stage == 1)
    output = boosted.model(input_ids=batch(), labels=batch())
    assert (output.logits is None) == fuse
    return losses


def under_zero() -> dict[int, list[list[float]]]:
    import colossalai

    colossalai.launch_from_torch(verbose=False)
    return {stage: [_losses_under_zero(stage, fuse) for fuse in (False, True)] for stage in (1, 2)}


def test_under_zero_the_losses_of_training_are_the_native_ones() -> None:
    for rank in run_ranks(under_zero, 2, initialize=False):
        for right, found in rank.values():
            assert right[0] != right[-1]
            assert found == pytest.approx(right, rel=2e-3)
