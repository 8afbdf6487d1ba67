"""Captured layers run eagerly where a recording samples a step, and are replayed in others, with equal bits."""

from __future__ import annotations

import math

import pytest
import torch

from fp8booster import record as record_scales
from fp8booster.monitor.sinks import read_scales
from fp8booster.nn.graphs import captured_layers
from fp8booster.nn.recording import NonFiniteStep
from tests.nn.graphs.test_layer import LAYERS, forward, pair_of_models, tokens

SAMPLED = "a recording samples this step"


@pytest.mark.usefixtures("record")
def test_sampled_steps_run_eagerly_and_others_are_replayed(device, tmp_path) -> None:
    eager, captured = pair_of_models(device)
    ran = []

    def train(model: torch.nn.Module) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(1, 9):
            forward(model, tokens(step, device)).backward()
            ran.extend(captured_layers(model))
            optimizer.step()
            optimizer.zero_grad()

    train(eager)
    with record_scales(captured, every=6, sink=tmp_path / "scales.jsonl") as recording:
        train(captured)
        with pytest.raises(NonFiniteStep, match=f"or in the {LAYERS} layers replayed"):
            recording.allows_step(math.nan)
    assert ran[0] == ran[5] == SAMPLED
    assert ran[6:] == [None, None]
    assert all(map(torch.equal, eager.parameters(), captured.parameters()))
    rows = read_scales(tmp_path / "scales.jsonl")[1]
    names = {step: {(row.layer, row.role) for row in rows if row.step == step} for step in (1, 6)}
    assert names[1] == names[6]
    assert len(names[6]) == LAYERS * (4 + 4 + 7)


@pytest.mark.usefixtures("record")
def test_layers_are_replayed_when_recordings_have_ended_in_any_order(device) -> None:
    _, model = pair_of_models(device)
    first, second = (record_scales(model, every=every) for every in (1, 1000))
    first.close()
    second.close()
    for step in range(5):
        forward(model, tokens(step, device)).backward()
    assert captured_layers(model) == {None: LAYERS}


@pytest.mark.usefixtures("record")
@pytest.mark.parametrize("ends", ["first", "second"])
def test_a_recording_that_ends_leaves_another_its_samples(device, ends: str) -> None:
    _, model = pair_of_models(device)
    recordings = [record_scales(model, every=every) for every in ((1, 1000) if ends == "second" else (1000, 1))]
    for step in range(5):
        forward(model, tokens(step, device)).backward()
        for recording in recordings:
            recording.end_step()
    ended = recordings.pop(ends == "second")
    ended.close()
    forward(model, tokens(0, device)).backward()
    assert captured_layers(model) == {SAMPLED: LAYERS}
    recordings[0].close()
