"""Gemini with FP8 under every option: it trains as without, or near native."""

from __future__ import annotations

import functools
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from fp8booster import FP8Config
from fp8booster.comm import Encoding
from tests.colossal.gemini.observations import FP16, OPTIONS, assert_are_casts_of_masters
from tests.colossal.gemini.runs import OFFLOADED, boost, config, masters, native, wire
from tests.colossal.zero.runs import CLOSE, Layers, batch, features, step
from tests.distributed import ranks
from tests.plugins.training import assert_close, assert_equal, train


@functools.cache
def _trained() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and masters of a run without options, which the tests of these ranks share."""
    run = boost(wire())
    return train(run), masters(run)


@functools.cache
def _trained_native(**options: Any) -> list[float]:
    """Losses of Colossal-AI's plugin."""
    return train(boost(native(**options)))


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_what_only_moves_work_changes_no_bit(option: str) -> None:
    """But for sums over gradients of other chunks: blocks that share a scale differ where chunks do."""
    found = boost(wire(**OPTIONS[option]))
    (losses, expected), others = _trained(), train(found)
    if option == "kept gathered":  # all-reduced in place of reduce-scattered
        assert_close(losses, others, CLOSE)
        return
    assert losses == others
    assert_equal(expected, masters(found))


@ranks(2)
def test_evaluation_with_prefetch_leaves_training_as_it_is() -> None:
    for make in (wire, native):
        expected, found = boost(make()), boost(make(max_prefetch=1))
        for run in (expected, found):
            train(run, steps=2)
        with torch.no_grad():
            values = [found.loss(batch()).item() for _ in range(2)]
        assert values[0] == values[1]
        assert train(expected, steps=2) == train(found, steps=2)


@ranks(2)
@pytest.mark.parametrize(
    "option",
    [
        "defaults",
        "16 bits on the wire",
        "no masters",
        "rowwise",
        "smooth SwiGLU",
        "fp16",
        "one scale a message",
        "all on the host",
    ],
)
def test_it_trains_near_native(option: str) -> None:
    options = {
        "defaults": {"fp8_config": FP8Config()},
        "16 bits on the wire": {"fp8_communication": False},
        "no masters": {"master_weights": False},
        "rowwise": {"fp8_config": config(scaling="rowwise")},
        "smooth SwiGLU": {"fp8_config": config(scaling="smooth-swiglu")},
        "fp16": FP16,
        "one scale a message": {"fp8_config": config(messages=Encoding(block_size=None))},
        "all on the host": OFFLOADED,
    }[option]
    theirs = {name: value for name, value in options.items() if name not in ("fp8_config", "fp8_communication")}
    in_16_bits, losses = _trained_native(**theirs), train(boost(wire(**options)))
    assert_close(in_16_bits, losses, CLOSE)
    assert losses != in_16_bits


@ranks(2)
@pytest.mark.parametrize("options", [*({}, OFFLOADED, {"min_chunk_size_m": 32}), "auto"], ids=str)
def test_gradients_are_clipped(options: Any) -> None:
    options = {"placement_policy": "auto"} if options == "auto" else options
    free, clipped, reference = (
        boost(plugin) for plugin in (wire(**options), wire(max_norm=1e-3, **options), native(max_norm=1e-3, **options))
    )
    for run in (free, clipped, reference):
        train(run, steps=1)
    assert_close([reference.optimizer.get_grad_norm()], [clipped.optimizer.get_grad_norm()], 0.02)

    def moment(run: Any) -> float:
        total = torch.zeros(1)
        for state in run.optimizer.optim.state.values():
            total += state["exp_avg"].square().sum()
        return total.item() ** 0.5

    scale = clipped.optimizer.get_grad_norm() / 1e-3
    assert scale > 10
    assert_close([moment(free)], [moment(clipped) * scale], 0.01)


@ranks(2)
@pytest.mark.parametrize(
    "option", ["defaults", "kept gathered", "accumulation on the host", "accumulation, optimizer on the host"]
)
def test_accumulated_gradients_are_those_of_one_large_batch(option: str) -> None:
    options = {"enable_gradient_accumulation": True} | OPTIONS[option]
    run, reference = boost(wire(**options)), boost(native(**options))
    losses, expected = (train(one, steps=2, micro_batches=3) for one in (run, reference))
    assert_close(expected, losses, CLOSE)
    found, moments = ([], [])
    for one, into in ((run, found), (reference, moments)):
        into += [state["exp_avg"].abs().sum().item() for state in one.optimizer.state_dict(False)["state"].values()]
    assert_close(moments, found, 0.1)


@ranks(2)
def test_masters_that_return_to_the_gpu_find_all_gradients_there() -> None:
    from colossalai.zero.gemini import gemini_optimizer

    from fp8booster.colossal.gemini import optimizer

    options = {"placement_policy": "auto", "gpu_margin_mem_ratio": 0.9, "enable_gradient_accumulation": True}
    run = boost(wire(**options))
    chunks = [run.model.chunk_manager.get_chunk(parameter) for parameter in run.model.fp16_params]
    places = []
    run.optimizer.before_update = lambda: places.extend(
        (chunk.grad_chunk.device_type, chunk.paired_chunk.device_type) for chunk in chunks
    )
    # on the CPU, too, Gemini's accelerator is told from the host
    with mock.patch.object(optimizer, "get_accelerator", gemini_optimizer.get_accelerator):
        train(run, steps=1)
    assert set(places) == {("cuda", "cuda")}


@ranks(2)
def test_parameters_that_come_after_boost_are_refused() -> None:
    run = boost(wire())
    groups = len(run.optimizer.param_groups)
    with pytest.raises(ValueError, match="before boost"):
        run.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(16))]})
    assert len(run.optimizer.param_groups) == groups


@ranks(2)
def test_an_overflow_skips_the_step_and_the_next_one_is_taken() -> None:
    for options in ({}, {"enable_gradient_accumulation": True}):
        overflowing = FP16 | {"initial_scale": 2.0**30, "hysteresis": 1, "backoff_factor": 2.0**-20}
        run = boost(wire(fp8_config=config(fused=False), **overflowing, **options))
        before = masters(run)
        train(run, steps=1)
        assert_equal(before, masters(run))
        assert_are_casts_of_masters(run)
        train(run, steps=1)
        after = masters(run)
        assert not any(torch.equal(before[name], after[name]) for name in before)


@ranks(2)
def test_activations_that_are_computed_again_change_no_bit() -> None:
    for reentrant in (True, False):
        run = boost(wire())
        run.model.unwrap().gradient_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            run.model.unwrap().enable_input_require_grads()
        assert train(run) == _trained()[0]


@ranks(2)
def test_evaluation_and_inference_read_the_same_weights() -> None:
    run = boost(wire(fp8_config=config(fused=False)))
    train(run, steps=1)
    run.model.eval()
    losses = []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            losses.append(run.loss(batch()).item())
    run.model.train()
    again = run.loss(batch())
    run.booster.backward(again, run.optimizer)
    assert losses == [again.item()] * 2
    run.optimizer.step()
    network = boost(wire(), Layers(64, 64, 64))
    step(network, features())
    with torch.inference_mode():
        found = network.model(features())
    assert found == network.model(features())


@ranks(2)
@pytest.mark.parametrize("fused", [False, True])
def test_a_forward_before_the_step_is_refused_where_gradients_lie_in_place_of_weights(fused: bool) -> None:
    run = boost(wire(fp8_config=config(fused=fused)))
    tokens = batch()
    first = run.loss(tokens)
    run.booster.backward(first, run.optimizer)
    for mode in (torch.enable_grad, torch.no_grad):
        with mode(), pytest.raises(RuntimeError, match=r"call step\(\) or zero_grad\(\) before the next forward"):
            run.loss(tokens)
    run.optimizer.zero_grad()
    assert run.loss(tokens).item() == first.item()
    run = boost(wire(fp8_config=config(fused=fused), enable_gradient_accumulation=True))
    for _ in range(2):
        loss = run.loss(tokens)
        run.booster.backward(loss / 2, run.optimizer)
        assert loss.item() == first.item()
    run.optimizer.step()
    assert run.loss(tokens).item() != first.item()
