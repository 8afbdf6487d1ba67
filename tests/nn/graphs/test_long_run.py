"""A run with captured layers of some hundred steps: the bits of eager layers, and memory that stays."""

from __future__ import annotations

import io

import pytest
import torch
from torch import nn

from fp8booster.nn.graphs import captured_layers
from tests.nn.graphs.test_layer import LAYERS, forward, pair_of_models, tokens

LENGTHS = (32, 48)
EVALUATE_EVERY = 10


class Run:
    """A model in training, evaluated and saved on the way."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(self, number: int) -> list[float]:
        """Take a step over two micro-batches, and evaluate now and then; returns the losses."""
        length = LENGTHS[number // 3 % 2]  # both lengths, by turns of some steps
        losses = []
        for micro in range(2):
            loss = forward(self.model, tokens(2 * number + micro, self.device, length))
            loss.backward()
            losses.append(loss.item())
        self.optimizer.step()
        self.optimizer.zero_grad()
        if number % EVALUATE_EVERY == 0:
            self.model.eval()
            with torch.no_grad():
                losses.append(forward(self.model, tokens(-1 - number, self.device, 40)).item())
            self.model.train()
        return losses

    def saved(self) -> bytes:
        """What a checkpoint holds."""
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        return file.getvalue()

    def load(self, saved: bytes) -> None:
        """Go on from what a run saved."""
        state = torch.load(io.BytesIO(saved), map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.usefixtures("record")
def test_a_long_run_has_the_bits_of_eager_layers_and_memory_that_stays(device: torch.device) -> None:
    """With two lengths, evaluation, a save, and a run that went elsewhere in between and goes back to it."""
    on_gpu = device.type == "cuda"
    steps = 300 if on_gpu else 36
    settled = steps // 2 + 10  # all that is done on the way has been done: what a load takes is not given back
    models = pair_of_models(device)
    eager, captured = (Run(model, device) for model in models)
    memory = []
    for number in range(steps):
        assert captured.step(number) == eager.step(number), number
        if number == steps // 2:
            saved = captured.saved()
            captured.step(1000)
            captured.load(saved)
        if on_gpu and number >= settled:
            memory.append((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    for one, other in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert captured_layers(captured.model) == {None: LAYERS}
    if on_gpu:
        allocated, reserved = (max(each) / each[0] for each in zip(*memory, strict=True))
        assert allocated < 1.01
        assert reserved < 1.01
