"""Qwen3, for which Colossal-AI has no policy: the weights that all heads share find the gradient of a whole model."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.colossal.hybrid.runs import ours, start
from tests.colossal.hybrid.test_sharded_models import GROUPED, pass_through
from tests.colossal.models import token_batch
from tests.distributed import ranks

MODES = {
    "TP2": {"tp_size": 2},
    "TP2 flash": {"tp_size": 2, "enable_flash_attention": True},
    "TP2 split_gather": {"tp_size": 2, "sequence_parallelism_mode": "split_gather"},
    "SP2 all_to_all": {"sp_size": 2, "sequence_parallelism_mode": "all_to_all"},
    "PP2": {"pp_size": 2, "pp_style": "1f1b", "num_microbatches": 2},
}


@ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_one_process(mode: str) -> None:
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=16))
    whole = copy.deepcopy(model)
    tokens = token_batch(0, batch=4)
    loss = whole(input_ids=tokens, labels=tokens).loss
    loss.backward()
    expected = {name: value.grad for name, value in whole.named_parameters()}
    run = start(ours(MODES[mode], precision="fp32"), model)
    found = pass_through(run, {"input_ids": tokens, "labels": tokens})
    assert found == pytest.approx(loss.item(), rel=1e-5)
    held = {name.removeprefix("module."): value for name, value in run.model.unwrap().named_parameters()}
    norms = {name for name in held if "norm" in name}
    assert {"model.layers.0.self_attn.q_norm.weight", "model.layers.1.self_attn.k_norm.weight"} & norms
    for name in norms:
        torch.testing.assert_close(held[name].grad, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@ranks(2)
def test_frozen_head_norms_are_sharded_and_may_be_trained_later() -> None:
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**GROUPED, head_dim=16))
    tokens = token_batch(0, batch=4)
    batch = {"input_ids": tokens, "labels": tokens}
    whole = copy.deepcopy(model)
    whole(**batch).loss.backward()
    names = {name for name, _ in model.named_parameters() if "q_norm" in name or "k_norm" in name}
    for name in names:
        model.get_parameter(name).requires_grad_(False)
    run = start(ours(MODES["TP2"], precision="fp32"), model)
    held = {name: value for name, value in run.model.unwrap().named_parameters() if name in names}
    assert held.keys() == names
    pass_through(run, batch)
    assert all(value.grad is None for value in held.values())
    for value in held.values():
        value.requires_grad_(True)
    pass_through(run, batch)
    for name, value in held.items():
        torch.testing.assert_close(value.grad, whole.get_parameter(name).grad, rtol=1e-4, atol=1e-6, msg=name)
