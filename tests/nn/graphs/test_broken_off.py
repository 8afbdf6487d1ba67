"""What a GPU does after a capture that broke off."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fp8booster.nn.graphs import capture_layers, captured_layers
from fp8booster.nn.graphs.layer import WARM_UP


class ReadByTheHost(nn.Module):
    """Draws random numbers, and lets the host look at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x / 2 if x.abs().amax().item() > 1e3 else x
        return nn.functional.dropout(self.linear(x), 0.1, self.training)


@pytest.mark.gpu
def test_a_model_whose_capture_breaks_off_on_a_gpu_trains_on() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    eager = nn.ModuleList(ReadByTheHost() for _ in range(2)).to(device)
    captured = copy.deepcopy(eager)
    assert capture_layers(nn.ModuleDict({"layers": captured})) == 2
    for step in range(WARM_UP + 3):
        found = []
        for model in (eager, captured):
            torch.manual_seed(step)
            model.zero_grad()
            x = torch.randn(16, 32, device=device)
            for layer in model:
                x = layer(x)
            x.square().sum().backward()
            found.append([each.grad.clone() for each in model.parameters()])
        assert all(map(torch.equal, *found)), step
    (reason,) = captured_layers(captured)
    assert "cannot be captured" in str(reason)
