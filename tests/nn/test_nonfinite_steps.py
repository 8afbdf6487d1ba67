"""A step that is not finite is refused on all ranks, and the first tensor that is not is named."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from fp8booster import record
from fp8booster.monitor.watchdog import Watchdog
from fp8booster.nn import recording as module
from fp8booster.nn.recording import NonFiniteStep
from tests.distributed import ranks
from tests.nn.test_recording import blocks, steps


def test_a_broken_weight_is_named() -> None:
    model = blocks()
    model.layers[1].weight.data[3, 4] = math.nan
    recording = record(model)
    loss = model(torch.randn(16, 32, dtype=torch.bfloat16)).float().sum()
    with pytest.raises(
        NonFiniteStep, match=r"weight of layers\.1 on rank 0 is the first tensor that is not.*checkpoint"
    ):
        recording.allows_step(loss)
    recording.close()


@pytest.mark.parametrize("every", [1, 1000])
def test_an_activation_that_overflows_is_named_in_any_step(every) -> None:
    model = blocks()
    with record(model, every=every) as recording:
        steps(model, 1)
        model.layers[2].register_forward_pre_hook(lambda _, args: (args[0] * math.inf,))
        norm = model(torch.randn(16, 32, dtype=torch.bfloat16)).float().sum()
        with pytest.raises(NonFiniteStep, match=r"Step 2 is not finite, and input of layers\.2"):
            recording.allows_step(norm)


@ranks(2)
def test_a_rank_that_does_not_tell_what_it_saw_is_named() -> None:
    model, warned = blocks(), []
    with record(model, on_warning=warned.append) as recording:
        if dist.get_rank() == 0:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, "PATIENCE", 0.05)
                recording.blame()
        dist.barrier()
    assert warned == ["What rank 1 saw in step 1 is not known, for it did not come."][: 1 - dist.get_rank()]


def test_a_gradient_that_overflows_is_named() -> None:
    model = blocks()
    model.layers[1].register_full_backward_hook(lambda *_: (torch.full((16, 32), math.inf, dtype=torch.bfloat16),))
    with record(model) as recording:
        model(torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)).float().sum().backward()
        with pytest.raises(NonFiniteStep, match=r"output gradient of layers\.0"):
            recording.allows_step(math.nan)


def test_what_is_not_finite_outside_fp8_is_said_so() -> None:
    with record(blocks()) as recording:
        steps(blocks(), 1)
        with pytest.raises(NonFiniteStep, match="outside FP8 layers"):
            recording.allows_step(math.inf)


def test_a_bad_step_is_skipped_or_only_warned_of() -> None:
    for rule, allowed in (("skip", False), ("warn", True)):
        said: list[str] = []
        with record(blocks(), watchdog=Watchdog(on_nonfinite=rule), on_warning=said.append) as recording:
            assert recording.allows_step(1.0)
            assert recording.allows_step(torch.tensor(math.nan)) is allowed
            assert recording.step == (1 if allowed else 2)
        (sentence,) = said
        assert sentence.endswith("skipped." if rule == "skip" else "taken all the same.")


def test_a_norm_of_no_gradients_is_warned_of_once() -> None:
    model, said = blocks(), []
    with record(model, on_warning=said.append) as recording:
        # nothing to warn of: a loss, and a norm that is 0 because the gradients are
        assert recording.allows_step(torch.ones((), requires_grad=True))
        model(torch.zeros(16, 32, dtype=torch.bfloat16)).float().sum().backward()
        assert recording.allows_step(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        assert said == []
        model.zero_grad()
        for _ in range(2):
            assert recording.allows_step(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    (sentence,) = said
    assert sentence.startswith("allows_step was given 0, and no parameter of the model has a gradient in .grad: ")
    assert "set optimizer.before_update = lambda: recording.allows_step(optimizer.get_grad_norm())" in sentence
