from __future__ import annotations

import copy
from collections import Counter

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8, forget_weights, report
from fp8booster.nn.fused import attention, fuse_blocks
from tests.nn.fused.models import FAMILIES, batch, build
from tests.plugins.test_low_level_zero_census import Census, products


def fused(model: nn.Module, config: FP8Config | None = None) -> nn.Module:
    convert_to_fp8(model, config)
    assert fuse_blocks(model) == 2
    return model


def step(model: nn.Module, ids: torch.Tensor | None = None, **options: object) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss, and the gradients by name."""
    model.zero_grad()
    ids = batch() if ids is None else ids
    loss = model(input_ids=ids, labels=ids, **options).loss
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in model.named_parameters()}


def sqnr(values: torch.Tensor, exact: torch.Tensor) -> float:
    """Signal over noise, in dB."""
    noise = (values.double() - exact.double()).square().sum()
    return (10 * torch.log10(exact.double().square().sum() / noise)).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_model_computes_what_the_model_does(family: str) -> None:
    exact = build(family, torch.float32)
    model = copy.deepcopy(exact)
    names = [name for name, _ in model.named_parameters()]
    state = model.state_dict()
    fused(model, FP8Config())
    assert [name for name, _ in model.named_parameters()] == names
    assert all(torch.equal(model.state_dict()[name], state[name]) for name in state)
    assert isinstance(model.model.layers[0], type(exact.model.layers[0]))
    plain = convert_to_fp8(copy.deepcopy(exact))
    (right, right_gradients), (loss, gradients), (of_plain, plain_gradients) = map(step, (exact, model, plain))
    assert loss == pytest.approx(right, rel=2e-3)
    assert of_plain == pytest.approx(right, rel=2e-3)
    for name, gradient in right_gradients.items():
        # no less exact than FP8 layers alone: the merged weights share a scale
        assert sqnr(gradients[name], gradient) > min(18, sqnr(plain_gradients[name], gradient) - 1.5), name


def test_q_k_v_and_gate_up_are_one_product_each_way() -> None:
    model = fused(build())
    with Census() as counted:
        step(model)
    rows = batch().numel()
    layer = model.model.layers[0]
    merged = [
        nn.Linear(64, sum(projection.out_features for projection in projections), device="meta")
        for projections in (
            (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            (layer.mlp.gate_proj, layer.mlp.up_proj),
        )
    ]
    eligible = 2 * [*merged, layer.self_attn.o_proj, layer.mlp.down_proj]
    assert counted.fp8 == sum(products(eligible, rows).values(), Counter())
    assert counted.other == sum(products([model.lm_head], rows).values(), Counter())
    assert all(row.precision == "FP8" for row in report(model).rows if "lm_head" not in row.name)


def test_casts_take_the_amax_that_the_kernels_deliver(monkeypatch: pytest.MonkeyPatch) -> None:
    from fp8booster.kernels.cast import cast

    model = fused(build())
    torch.optim.SGD(model.parameters()).step()  # until the first, each backward counts as one
    step(model)  # casts the weights
    given: list[bool] = []
    reference = cast.reference

    def counting(matrix, dtype, *, amax, **options):
        if amax is not None:  # what is delivered is right
            assert amax.amax() == matrix.detach().abs().amax()
        given.append(amax is not None)
        return reference(matrix, dtype, amax=amax, **options)

    monkeypatch.setattr(cast, "reference", counting)
    step(model)
    # a layer casts four inputs and four gradients; attention's output, and the gradient that it gets, come from torch
    assert len(given) == 2 * 8
    assert given.count(False) == 2 * 1


def test_the_weights_are_cast_once_a_step_and_again_after_it() -> None:
    model = fused(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.step()  # until the first, each backward counts as one
    first, _ = step(model)
    merged = model.model.layers[0].self_attn.fp8_merged
    held = merged.fp8_weight.held
    assert step(model)[0] == first
    assert merged.fp8_weight.held is held
    optimizer.step()
    second = step(model)[0]
    assert second < first
    assert merged.fp8_weight.held is not held
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    assert step(model)[0] == second  # not seen
    forget_weights(model)
    assert step(model)[0] != second


@pytest.mark.parametrize(
    "change", ["cache", "attentions", "attentions of SDPA", "evaluation", "hook", "mixed configuration", "mask"]
)
def test_what_is_not_covered_runs_as_written(change: str) -> None:
    torch.manual_seed(0)
    model = build(attn_implementation="eager" if change == "attentions" else "sdpa")
    plain = convert_to_fp8(copy.deepcopy(model))
    fused(model)
    options: dict[str, object] = {}
    if change == "cache":
        options["use_cache"] = True
    elif change.startswith("attentions"):
        options["output_attentions"] = True
    elif change == "evaluation":
        model.eval(), plain.eval()
    elif change == "hook":
        for each in model.model.layers:
            each.self_attn.k_proj.register_forward_pre_hook(lambda module, args: None)
            each.mlp.up_proj.register_forward_hook(lambda module, args, output: None)
    elif change == "mixed configuration":
        for each in model.model.layers:
            for layer in (each.self_attn.k_proj, each.mlp.up_proj):
                layer.fp8_casts = layer.fp8_casts.under(FP8Config(fast_accumulation=()))
    elif change == "mask":
        options["attention_mask"] = torch.ones_like(batch()).index_fill_(1, torch.arange(4), 0)
    ids = batch()
    outputs = [each(input_ids=ids, labels=ids, **options) for each in (model, plain)]
    assert outputs[0].loss.item() == pytest.approx(outputs[1].loss.item(), rel=5e-3)
    if change == "cache":
        assert outputs[0].past_key_values.get_seq_length() == ids.shape[1]
    if change.startswith("attentions"):
        found, expected = (each.attentions for each in outputs)
        # with SDPA some versions of transformers give none, for each layer or at all
        assert [each is None for each in found] == [each is None for each in expected]
        if expected and expected[0] is not None:
            torch.testing.assert_close(found[0], expected[0], rtol=0.1, atol=0.02)
    outputs[0].loss.backward()


def test_checkpointed_layers_give_the_same_gradients() -> None:
    model = fused(build())
    loss, gradients = step(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    again, recomputed = step(model)
    assert again == loss
    assert all(torch.equal(recomputed[name], gradient) for name, gradient in gradients.items())


def test_frozen_layers_and_a_second_backward() -> None:
    model = fused(build())
    model.model.layers[0].self_attn.k_proj.weight.requires_grad_(False)
    ids = batch()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward(retain_graph=True)
    first = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert "model.layers.0.self_attn.k_proj.weight" not in first
    model.zero_grad()
    loss.backward()
    for name, parameter in model.named_parameters():
        if name in first:
            assert torch.equal(parameter.grad, first[name]), name


def test_a_copy_is_a_model_of_its_own() -> None:
    model = fused(build())
    loss, _ = step(model)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert step(model)[0] == loss
    assert step(other)[0] != loss
    attention = other.model.layers[0].self_attn
    assert attention.fp8_merged.layers[0] is attention.q_proj


def test_another_model_is_left_alone() -> None:
    model = convert_to_fp8(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)))
    assert fuse_blocks(model) == 0
    assert fuse_blocks(build(hidden_act="relu")) == 2  # all but its MLP, which has another activation


def test_layers_of_other_configurations_are_cast_one_by_one() -> None:
    model = fused(build())
    attention = model.model.layers[0].self_attn
    attention.k_proj.fp8_casts = attention.k_proj.fp8_casts.under(FP8Config(scaling="amax"))
    assert attention.fp8_merged.why_not_merged == "the layers' FP8Configs differ"
    step(model)
    assert attention.fp8_merged.fp8_weight.held is None
    scale = attention.k_proj.fp8_weight.held.inverse_scale
    assert scale.log2() == scale.log2().round()


def test_attention_drops_out_in_training_alone() -> None:
    model = fused(build(attention_dropout=0.5))

    def loss(seed: int) -> float:
        torch.manual_seed(seed)
        return step(model)[0]

    assert loss(0) == loss(0) != loss(1)
    model.eval()
    assert loss(0) == loss(1)


def test_attention_scales_scores_as_its_module_says() -> None:
    model = build()
    plain = convert_to_fp8(copy.deepcopy(model))
    fused(model)
    _, usual = step(model)
    for each in (model, plain):
        for layer in each.model.layers:
            layer.self_attn.scaling = 2.0
    (_, gradients), (_, of_plain) = step(model), step(plain)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert sqnr(gradients[name], of_plain[name]) > 10
    assert sqnr(usual[name], of_plain[name]) < 5


def test_attention_both_ways_is_what_was_asked_for() -> None:
    model = build()
    plain = convert_to_fp8(copy.deepcopy(model))
    fused(model)
    _, causal = step(model)
    (both_ways, gradients), (right, of_plain) = (step(each, is_causal=False) for each in (model, plain))
    assert both_ways == pytest.approx(right, rel=5e-4)
    for name, gradient in of_plain.items():
        assert sqnr(gradients[name], gradient) > 15, name
    name = "model.layers.0.self_attn.v_proj.weight"
    assert sqnr(causal[name], of_plain[name]) < 5


def test_hooks_on_norms_see_what_transformers_gives_them() -> None:
    model = build()
    plain = convert_to_fp8(copy.deepcopy(model))
    fused(model)
    seen = []
    for each in (model, plain):
        values = []
        for layer in each.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.register_forward_pre_hook(lambda _, x, values=values: values.append(x[0].detach()))
                norm.register_forward_hook(lambda *_, values=values: values.append(_[2].detach()) or 2 * _[2])
        seen.append((values, step(each)))
    (values, (loss, gradients)), (right_values, (right, right_gradients)) = seen
    assert len(values) == len(right_values) == 2 * 2 * len(model.model.layers)
    for value, expected in zip(values, right_values, strict=True):
        assert sqnr(value, expected) > 20
    assert loss == pytest.approx(right, rel=5e-3)
    for name, gradient in right_gradients.items():
        assert sqnr(gradients[name], gradient) > 12, name


@pytest.mark.parametrize("family", ["llama", "phi3", "gpt_neox"])
def test_hooks_on_activations_run(family: str) -> None:
    model = build(family, torch.float32)
    plain = copy.deepcopy(model)
    assert fuse_blocks(model) == 2
    seen: list[list[torch.Tensor]] = []
    steps = []
    for each in (model, plain):
        values: list[torch.Tensor] = []
        for name, module in each.named_modules():
            if name.endswith((".act", ".act_fn", ".activation_fn")):
                module.register_forward_hook(lambda *_, values=values: values.append(_[2].detach()) or 2 * _[2])
        steps.append(step(each))
        seen.append(values)
    assert len(seen[1]) == 2
    torch.testing.assert_close(*seen)
    torch.testing.assert_close(*steps)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_mask_where_no_kernel_takes_it_with_shared_keys(family: str, monkeypatch) -> None:
    model = fused(build(family))
    mask = torch.ones_like(batch())
    mask[0, :3] = 0
    loss, gradients = step(model, attention_mask=mask)
    monkeypatch.setattr(attention, "takes_mask_and_groups", lambda query: False)
    again, others = step(model, attention_mask=mask)
    assert again == pytest.approx(loss, rel=1e-4)
    for name, gradient in gradients.items():
        if not name.endswith("k_proj.bias"):  # of which attention takes no notice: noise
            assert sqnr(others[name], gradient) > 20, name
