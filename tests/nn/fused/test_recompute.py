"""`FP8Config.recompute`: gradients bit for bit, what is saved, what the report says."""

from __future__ import annotations

import copy

import pytest
import torch

from benchmarks.saved_activations import SETTINGS, layer_of, records_of
from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.config import Activations
from fp8booster.nn.fused import fuse_blocks
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks
from tests.nn.fused.models import FAMILIES, batch, build
from tests.nn.fused.test_decoder import fused, sqnr, step
from tests.nn.fused.test_saved_activations import LOST_DB, PLUGINS
from tests.plugins.training import boost

PARTS = ("activations", "norms", "both", "all")

UNITS = {
    'FP8, recompute="activations"': 12.90,
    'FP8, recompute="norms"': 13.24,
    'FP8, recompute="both"': 11.90,
    'FP8, recompute="all"': 11.40,
    'FP8, saved_activations="8-bit", recompute="norms"': 8.27,
    'FP8, saved_activations="8-bit", recompute="all"': 7.77,
}


@pytest.mark.parametrize("setting", UNITS)
def test_what_a_layer_of_llama_saves(setting: str) -> None:
    model = layer_of(1024, 2752, 8)
    SETTINGS[setting](model)
    found = sum(record["units"] for record in records_of(model, 32))
    assert found == pytest.approx(UNITS[setting], abs=0.02)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", PARTS)
def test_losses_and_gradients_are_the_same(parts: str, family: str) -> None:
    model = build(family, hidden_size=128, intermediate_size=344)
    (loss, right), (again, found) = (
        step(fused(copy.deepcopy(model), config))
        for config in (FP8Config(), FP8Config(activations=Activations(recompute=parts)))
    )
    assert again == loss
    assert all(torch.equal(found[name], gradient) for name, gradient in right.items())


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("parts", PARTS)
def test_kernels_give_the_same_gradients_again(parts: str, family: str) -> None:
    model = build(family, torch.bfloat16, hidden_size=128, intermediate_size=344).cuda()
    ids, found = batch().cuda(), []
    for config in (FP8Config(always=True), FP8Config(always=True, activations=Activations(recompute=parts))):
        trained = fused(copy.deepcopy(model), config).train()
        loss = trained(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in trained.parameters())])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("granularity", ["rowwise", "blockwise"])
def test_finer_scales_give_the_same_gradients_too(granularity: str) -> None:
    model = build(hidden_size=128, intermediate_size=384)
    (_, right), (_, found) = (
        step(
            fused(
                copy.deepcopy(model),
                FP8Config(scaling=granularity, activations=Activations(recompute=parts), emulate=True),
            )
        )
        for parts in ("none", "all")
    )
    assert all(torch.equal(found[name], gradient) for name, gradient in right.items())


def test_norms_whose_inputs_are_in_8_bits_err_by_that() -> None:
    exact = build(dtype=torch.float32, hidden_size=128, intermediate_size=344)
    configs = (FP8Config(), FP8Config(activations=Activations(saved="8-bit", recompute="norms")))
    (_, right), (loss, plain), (again, found) = map(
        step, (exact, *(fused(copy.deepcopy(exact), config) for config in configs))
    )
    assert again == loss
    for name, gradient in right.items():
        assert sqnr(found[name], gradient) > sqnr(plain[name], gradient) - LOST_DB, name


def test_checkpointed_layers_and_a_second_backward_give_the_same_gradients() -> None:
    model = fused(build(hidden_size=128, intermediate_size=344), FP8Config(activations=Activations(recompute="all")))
    _, right = step(model)
    loss = model(input_ids=batch(), labels=batch()).loss
    for _ in range(2):
        model.zero_grad()
        loss.backward(retain_graph=True)
        assert all(torch.equal(parameter.grad, right[name]) for name, parameter in model.named_parameters())
    for reentrant in (False, True):
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        model.enable_input_require_grads()
        _, again = step(model)
        assert all(torch.equal(again[name], gradient) for name, gradient in right.items()), reentrant


def test_a_norm_whose_weight_is_gone_is_computed_again_as_it_was() -> None:
    """Engines that gather it may have freed or written over it by then."""
    model = fused(build(hidden_size=128, intermediate_size=344), FP8Config(activations=Activations(recompute="norms")))
    _, right = step(model)
    name, norm = "model.layers.1.self_attn.q_proj.weight", model.model.layers[1].input_layernorm
    loss = model(input_ids=batch(), labels=batch()).loss
    norm.weight.data.zero_()
    (gradient,) = torch.autograd.grad(loss, [model.get_parameter(name)])
    assert torch.equal(gradient, right[name])


def test_the_report_tells_what_is_computed_again() -> None:
    unfused = build()
    convert_to_fp8(unfused, FP8Config(activations=Activations(recompute="both")))
    assert report(unfused).recomputed == ()
    fuse_blocks(unfused)
    assert report(unfused).recomputed == ("4 norms", "2 SwiGLUs")
    assert "outputs of 4 norms and 2 SwiGLUs computed again in backward" in report(unfused).summary()
    assert "cast again" not in report(unfused).summary()
    every = report(fused(build(), FP8Config(activations=Activations(recompute="all"))))
    assert every.recast == 2
    assert "computed again in backward, outputs of 2 attentions cast again in backward" in every.summary()
    eight = fused(build(), FP8Config(activations=Activations(saved="8-bit", recompute="both")))
    assert report(eight).recomputed == ("4 norms",)
    assert report(eight).saved_in_8_bits == ("4 norms", "2 SwiGLUs")


@ranks(2)
def test_the_report_leaves_out_norms_whose_tokens_ranks_gather() -> None:
    import fp8booster.plugins

    config = FP8Config(activations=Activations(recompute="both"), emulate=True)
    said = []
    for mode in (None, "split_gather"):
        sequence = {"enable_sequence_parallelism": mode is not None, "sequence_parallelism_mode": mode}
        sizes = {"tp_size": 2, "pp_size": 1, "precision": "bf16"}
        boosted = boost(
            fp8booster.plugins.HybridParallelPlugin(use_fp8=True, fp8_config=config, **sizes, **sequence),
            tiny_llama().bfloat16(),
        )
        boosted.step(token_batch(seed=0))
        said.append(report(boosted.model.unwrap()).recomputed)
    assert said == [("4 norms", "2 SwiGLUs"), ("2 SwiGLUs",)]


@ranks(2)
def test_the_report_leaves_out_attention_whose_output_ranks_exchange() -> None:
    import fp8booster.plugins

    config, said = FP8Config(activations=Activations(recompute="all"), emulate=True), []
    for sizes in ({"tp_size": 2}, {"tp_size": 1, "sp_size": 2, "sequence_parallelism_mode": "all_to_all"}):
        options = {"pp_size": 1, "precision": "bf16", "enable_sequence_parallelism": "sp_size" in sizes}
        made = fp8booster.plugins.HybridParallelPlugin(use_fp8=True, fp8_config=config, **options, **sizes)
        said.append(report(boost(made, tiny_llama().bfloat16()).model.unwrap()).recast)
    assert said == [2, 0]


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_plugins_train_to_the_same_losses(plugin: str) -> None:
    import fp8booster.plugins

    losses, said = [], []
    for parts in ("none", "all"):
        config = FP8Config(activations=Activations(recompute=parts), emulate=True)
        made = getattr(fp8booster.plugins, plugin)(use_fp8=True, fp8_config=config, **PLUGINS[plugin])
        boosted = boost(made, tiny_llama().bfloat16())
        losses.append([boosted.step(token_batch(seed=number))[0] for number in range(4)])
        said.append(report(boosted.model.unwrap()).recomputed)
    assert said == [(), ("4 norms", "2 SwiGLUs")]
    assert losses[0] == losses[1]
