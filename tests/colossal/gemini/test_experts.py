"""Gemini with experts that are modules: their chunks are gathered together for grouped products."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import report
from fp8booster.nn.experts import grouped as module
from fp8booster.nn.experts.grouped import GroupedExperts, grouped_experts
from tests.colossal.gemini.observations import OPTIONS
from tests.colossal.gemini.runs import boost, config, masters, wire
from tests.colossal.models import token_batch
from tests.colossal.zero.runs import CLOSE
from tests.distributed import ranks
from tests.nn.experts.families import EXPERTS, tiny_mixture
from tests.plugins.training import Boosted, assert_close, assert_equal, train

pytestmark = pytest.mark.skipif(not version("transformers").startswith("4."), reason="experts are no modules")

SENT = {"FP8": {}, "16 bits": {"fp8_communication": False}}
FAMILIES = ("Qwen3-MoE", "Mixtral", "DeepSeek V3")


def mixture(family: str = "Qwen3-MoE", chosen: int = EXPERTS) -> nn.Module:
    """A tiny model; rounding sends no token elsewhere where it goes to all experts."""
    return tiny_mixture(family, vocab_size=128, num_experts_per_tok=chosen, topk_group=2)


def run_of(*model: Any, **arguments: Any) -> Boosted:
    """A boosted mixture."""
    return boost(wire(**arguments), mixture(*model))


def ways(run: Boosted) -> set[str | None]:
    """Why the blocks' experts run one by one; None: they do not."""
    return {row.why_one_by_one for row in report(run.model).grouped}


@ranks(2)
@pytest.mark.parametrize("sent", SENT)
@pytest.mark.parametrize("family", FAMILIES)
def test_grouped_experts_learn_as_those_one_by_one(family: str, sent: str) -> None:
    run = run_of(family, **SENT[sent])
    found = train(run, steps=4)
    assert ways(run) == {None}
    with patch.object(GroupedExperts, "_why_never", lambda self, look: "a test"):
        other = run_of(family, **SENT[sent])
        expected = train(other, steps=4)
        assert ways(other) == {"a test"}
    assert_close(expected, found, CLOSE)
    assert expected != found


@ranks(2)
@pytest.mark.parametrize("option", ["all on the host", "prefetch", "auto with prefetch"])
def test_what_only_moves_work_changes_no_bit(option: str) -> None:
    expected, found = run_of(), run_of(**OPTIONS[option])
    assert train(expected) == train(found)
    assert_equal(masters(expected), masters(found))


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("sent", SENT)
def test_activations_that_are_computed_again_change_no_bit(sent: str, reentrant: bool) -> None:
    runs = [run_of(**SENT[sent]) for _ in range(2)]
    runs[1].model.unwrap().gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        runs[1].model.unwrap().enable_input_require_grads()
    assert train(runs[0]) == train(runs[1])
    assert ways(runs[1]) == {None}


@ranks(2)
@pytest.mark.parametrize("sent", SENT)
def test_ranks_with_other_numbers_of_tokens_run_them_alike(sent: str) -> None:
    """Where other engines' ranks would run them one by one: chunks are gathered and reduced in one order."""
    run = run_of("Qwen3-MoE", 2, **SENT[sent])
    tokens = token_batch(dist.get_rank(), batch=1, length=(8, 64)[dist.get_rank()])
    with patch.object(module, "ONE_BY_ONE_FROM", 4e4):
        losses = [run.step(tokens)[0] for _ in range(4)]
        run.model.eval()
        with torch.no_grad():
            losses.append(run.loss(tokens).item())
    assert losses[-1] < losses[0] - 0.3, losses
    assert ways(run) == {None}
    assert {row.why_one_by_one_in_evaluation for row in report(run.model).grouped} == {None}


@ranks(2)
@pytest.mark.parametrize("sent", SENT)
def test_nothing_of_the_weights_is_kept_for_backward(sent: str) -> None:
    run = run_of("Qwen3-MoE", 1, **SENT[sent])
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: held.append(each) or each, lambda each: each):
        run.loss(token_batch(dist.get_rank(), batch=1, length=8))
    in_fp8 = [each.numel() for each in held if each.dtype == torch.float8_e4m3fn]
    assert max(in_fp8) < EXPERTS * 64 * 48  # those of down


@ranks(2)
@pytest.mark.parametrize("fused", [True, False])
def test_experts_are_grouped_where_layers_are_fused(fused: bool) -> None:
    run = boost(wire(fp8_config=config(fused=fused)), mixture())
    assert len(grouped_experts(run.model.unwrap())) == (2 if fused else 0)
    train(run, steps=1)


@ranks(2)
def test_experts_of_which_only_some_are_trained_run_one_by_one() -> None:
    model = mixture()
    model.model.layers[0].mlp.experts[1].requires_grad_(False)
    for parameter in model.model.layers[1].mlp.experts.parameters():
        parameter.requires_grad_(False)
    run = boost(wire(), model)
    train(run, steps=2)
    some = "an engine keeps the FP8 weights of some of the layers alone"
    assert [row.why_one_by_one for row in report(run.model).grouped] == [some, None]


@ranks(2)
def test_backward_through_experts_from_before_a_step_is_refused() -> None:
    run = run_of()
    loss = run.loss(token_batch(0))
    run.model.publish_masters()
    with pytest.raises(RuntimeError, match="run backward before the optimizer steps"):
        run.booster.backward(loss, run.optimizer)
