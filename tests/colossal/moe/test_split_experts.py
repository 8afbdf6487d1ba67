"""A Mixtral of transformers 5, sharded with experts that are modules, trains as with experts that are one parameter."""

from __future__ import annotations

import copy
import re
from importlib.metadata import version
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn

from fp8booster.colossal.moe.mixtral import is_split, split_experts
from tests.colossal.hybrid.runs import HybridRun, ours, start
from tests.colossal.models import token_batch
from tests.colossal.moe.models import EXPERTS, tiny_mixtral
from tests.distributed import ranks, shared_folder

pytestmark = pytest.mark.skipif(version("transformers").startswith("4."), reason="experts are modules")


def gradients(model: nn.Module) -> tuple[float, dict[str, torch.Tensor]]:
    """A loss in FP32, and gradients."""
    tokens = token_batch(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.item(), {name: value.grad for name, value in model.named_parameters()}


def test_split_experts_compute_what_whole_ones_do() -> None:
    whole = tiny_mixtral()
    model = copy.deepcopy(whole)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = len(list(model.parameters()))
    split_experts(model, optimizer)
    assert is_split(model)
    assert not is_split(whole)
    assert len(list(model.parameters())) == before + 2 * (3 * EXPERTS - 2)  # in each of two layers
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    assert held == set(model.parameters())
    tokens = token_batch(0)
    expected, found = (each(input_ids=tokens, labels=tokens).loss for each in (whole, model))
    torch.testing.assert_close(found, expected)
    expected.backward()
    found.backward()
    for one, other in zip(whole.model.layers, model.model.layers, strict=True):
        torch.testing.assert_close(other.mlp.gate.weight.grad, one.mlp.gate.weight.grad)
        for number, expert in enumerate(other.mlp.experts):
            both = torch.cat([expert.w1.weight.grad, expert.w3.weight.grad])
            torch.testing.assert_close(both, one.mlp.experts.gate_up_proj.grad[number])
            torch.testing.assert_close(expert.w2.weight.grad, one.mlp.experts.down_proj.grad[number])
    split_experts(model, optimizer)  # again: nothing
    assert held == set(model.parameters())


@pytest.mark.parametrize("frozen", ["gate_up_proj", "down_proj"])
def test_each_projection_stays_frozen_by_itself(frozen: str) -> None:
    model = tiny_mixtral()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(frozen not in name)
    split_experts(model, None)
    for layer in model.model.layers:
        for expert in layer.mlp.experts:
            trained = [each.weight.requires_grad for each in (expert.w1, expert.w3, expert.w2)]
            assert trained == [frozen == "down_proj"] * 2 + [frozen == "gate_up_proj"]


def test_an_optimizer_with_states_of_whole_experts_is_refused() -> None:
    model = tiny_mixtral()
    optimizer = torch.optim.AdamW(model.parameters())
    gradients(model)
    optimizer.step()
    with pytest.raises(ValueError, match="boost a new optimizer"):
        split_experts(model, optimizer)


def spread(run: HybridRun) -> tuple[float, dict[str, torch.Tensor]]:
    """As `gradients`, of a boosted model."""
    plugin = run.booster.plugin
    tokens = token_batch(0)
    batch = {"input_ids": tokens, "labels": tokens}
    if plugin.pp_size == 1:
        loss = run.model(**batch).loss
        run.booster.backward(loss, run.optimizer)
    else:
        found = run.booster.execute_pipeline(
            iter([batch]), run.model, lambda output, _: output.loss, run.optimizer, return_loss=True
        )["loss"]
        loss = torch.zeros(()) if found is None else found.detach().float().reshape(())
        dist.all_reduce(loss)
    held = run.model.unwrap().named_parameters()
    return loss.item(), {name.removeprefix("module."): value.grad for name, value in held}


@ranks(2)
@pytest.mark.parametrize("mode", ["TP2", "PP2"])
def test_a_sharded_mixtral_has_the_loss_and_gradients_of_a_whole_one(mode: str) -> None:
    arguments: dict[str, Any] = {
        "TP2": {"tp_size": 2},
        "PP2": {"pp_size": 2, "pp_style": "1f1b", "num_microbatches": 2},
    }[mode]
    # the loss that balances experts is no mean over micro-batches
    model = tiny_mixtral(output_router_logits=mode == "TP2")
    loss, expected = gradients(copy.deepcopy(model))
    found, held = spread(start(ours(arguments, precision="fp32"), model))
    assert found == pytest.approx(loss, rel=1e-5)
    compared = {name for name in held.keys() & expected.keys() if held[name].shape == expected[name].shape}
    assert any("norm" in name for name in compared)
    for name in compared:
        torch.testing.assert_close(held[name], expected[name], rtol=1e-4, atol=1e-6, msg=name)
    experts = [name for name in held if "experts.1.w2" in name]
    assert experts
    for name in experts:
        whole = re.sub(r"experts.*", "experts.down_proj", name)
        torch.testing.assert_close(held[name], expected[whole][1], rtol=1e-4, atol=1e-6, msg=name)


@ranks(2)
def test_transformers_loads_a_checkpoint_whose_experts_were_spread() -> None:
    from fp8booster.plugins.moe_hybrid_parallel import MoeHybridParallelPlugin

    model = tiny_mixtral()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    run = start(MoeHybridParallelPlugin(1, 1, 2, precision="bf16", zero_stage=1), model)
    folder = str(shared_folder("mixtral"))
    run.booster.save_model(run.model, folder, shard=True, use_safetensors=True)
    dist.barrier()
    loaded = transformers.MixtralForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    assert loaded.keys() == expected.keys()
    for name, value in loaded.items():
        torch.testing.assert_close(value, expected[name].bfloat16().float(), msg=name)


@ranks(2)
def test_what_does_not_split_them_is_told_what_does() -> None:
    from colossalai.shardformer.policies.mixtral import MixtralForCausalLMPolicy

    from tests.colossal.tensor.models import shard

    with pytest.raises(ValueError, match="by its experts alone, without tensor parallelism"):
        shard(tiny_mixtral())
    plugin = ours({}, custom_policy=MixtralForCausalLMPolicy())
    with pytest.raises(ValueError, match="leave custom_policy out"):
        start(plugin, tiny_mixtral())
