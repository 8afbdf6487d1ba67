"""A step that is skipped leaves what later steps are scaled by as it was."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, convert_to_fp8
from fp8booster.comm import Encoding
from fp8booster.monitor.watchdog import Watchdog
from fp8booster.nn.held_casts import held_casts, remembered_amaxes
from fp8booster.nn.recording import record
from fp8booster.scaling import INPUT, OUTPUT_GRADIENT, WEIGHT
from fp8booster.scaling.delayed import _Histories
from fp8booster.scaling.smooth_swiglu import ChannelFactors
from fp8booster.scaling.steps import note_step
from tests.colossal.models import tiny_llama, token_batch
from tests.distributed import ranks
from tests.plugins.training import Boosted, boost

OVERFLOWS = {"precision": "fp16", "initial_scale": 2.0**31, "min_scale": 1.0, "hysteresis": 1}
SCALINGS: dict[str, dict[str, Any]] = {
    "delayed": {"scaling": "delayed"},
    "smooth SwiGLU": {"scaling": "smooth-swiglu"},
    "auto": {"messages": Encoding(automatic_scaling=True)},
}
ENGINES = ("ZeRO", "hybrid without ZeRO", "gemini")


def engine(name: str, scaling: str, **arguments: Any) -> Any:
    """A plugin with FP8 everywhere."""
    from fp8booster import plugins

    config = FP8Config(emulate=True, always=True, **SCALINGS[scaling])
    arguments = {"precision": "bf16", "use_fp8": True, "fp8_config": config} | arguments
    if name == "ZeRO":
        return plugins.LowLevelZeroPlugin(stage=2, **arguments)
    if name == "gemini":
        return plugins.GeminiPlugin(**arguments)
    return plugins.HybridParallelPlugin(tp_size=1, pp_size=1, **arguments)


def start(name: str, scaling: str, **arguments: Any) -> Boosted:
    optimizer = torch.optim.Adam if name == "gemini" else torch.optim.AdamW
    return boost(engine(name, scaling, **arguments), tiny_llama(), lr=1e-2, optimizer=optimizer)


def roles_noted(model: nn.Module) -> set[str]:
    """The roles of operands that scaling has noted amaxes of, in the first step."""
    states = [casts.state for held in held_casts(model) if (casts := held.get()) is not None and casts.state]
    delayed = {role for state in states if isinstance(state, _Histories) for role in state.by_role}
    return delayed | {INPUT for state in states if isinstance(state, ChannelFactors) and state._seen is not None}


def cases() -> list[tuple[str, str]]:
    return [(name, scaling) for name in ENGINES for scaling in SCALINGS if name == "ZeRO" or scaling != "auto"]


@ranks(2)
@pytest.mark.parametrize("case", cases(), ids=", ".join)
def test_training_goes_on_as_if_a_step_that_is_dropped_had_not_been(case: tuple[str, str]) -> None:
    first, second, odd = (token_batch(seed) for seed in range(3))
    expected, disturbed = (start(*case) for _ in range(2))
    for run in (expected, disturbed):
        run.step(first)
    model = disturbed.model.unwrap()
    for block in (module for module in model.modules() if hasattr(module, "gate_proj")):
        hook = block.register_forward_pre_hook(lambda _, args: (100 * args[0],))  # amaxes beyond all others
        disturbed.booster.backward(disturbed.loss(odd), disturbed.optimizer)
        hook.remove()
        break
    disturbed.optimizer.zero_grad()
    for tokens in (second, first, second):
        assert disturbed.step(tokens) == expected.step(tokens)


@ranks(2)
def test_automatic_scaling_stays_where_the_loss_scale_is_too_large() -> None:
    run = start("ZeRO", "auto", **OVERFLOWS)
    scaling = run.optimizer.automatic_scaling
    run.step(token_batch(0))
    assert run.optimizer.mixed_precision_mixin.loss_scale < OVERFLOWS["initial_scale"]  # it was skipped
    assert scaling.mu.item() == 0.5
    assert not scaling._counts


@ranks(2)
def test_automatic_scaling_stays_where_the_step_is_refused_at_its_norm() -> None:
    run = start("ZeRO", "auto")
    scaling = run.optimizer.automatic_scaling

    def refuse() -> None:
        raise KeyError

    run.optimizer.before_update = refuse
    with pytest.raises(KeyError):
        run.step(token_batch(0))
    assert scaling.mu.item() == 0.5
    assert scaling._counts
    run.optimizer.zero_grad()
    assert not scaling._counts


@ranks(2)
@pytest.mark.parametrize("scaling", ["delayed", "smooth SwiGLU"])
@pytest.mark.parametrize("name", ENGINES)
def test_amaxes_stay_where_the_loss_scale_is_too_large(name: str, scaling: str) -> None:
    run = start(name, scaling, **OVERFLOWS)
    run.step(token_batch(0))
    assert roles_noted(run.model.unwrap()) <= {WEIGHT}
    run.booster.backward(run.loss(token_batch(0)), run.optimizer)
    assert INPUT in roles_noted(run.model.unwrap())


def test_a_recording_that_skips_a_step_forgets_it() -> None:
    model = convert_to_fp8(tiny_llama(), FP8Config(emulate=True, always=True, scaling="delayed"))
    recording = record(model, watchdog=Watchdog(on_nonfinite="skip"))
    tokens = token_batch(0)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert roles_noted(model) == {WEIGHT, INPUT, OUTPUT_GRADIENT}
    assert not recording.allows_step(float("nan"))
    recording.close()
    assert roles_noted(model) == {WEIGHT}
    note_step()
    noted = remembered_amaxes(model)
    assert noted
    assert all(each[WEIGHT].any() for each in noted.values())
