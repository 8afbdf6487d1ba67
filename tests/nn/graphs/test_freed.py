"""Graphs are freed with a process group whose collectives are in them, and with no other."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster.nn.graphs import capture_layers, captured_layers, recorder
from fp8booster.nn.graphs.layer import WARM_UP
from tests.distributed import ranks
from tests.nn.graphs import rerun
from tests.nn.graphs.rerun import Rerun

FEATURES = 16


class Reducing(nn.Linear):
    """Adds the mean of what all ranks of a group compute, where it has one."""

    group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.group is None:
            return y
        mean = y.detach().clone()
        dist.all_reduce(mean, group=self.group)
        return y + mean / dist.get_world_size(self.group)


@ranks(2)
@pytest.mark.parametrize("destroyed", ["another", "its own"])
def test_a_backward_that_is_awaited_needs_its_own_group_alone(destroyed: str) -> None:
    import fp8booster.colossal  # noqa: F401  which frees graphs before groups

    own, another = dist.new_group([0, 1]), dist.new_group([0, 1])
    stand_in = Rerun()
    with (
        mock.patch.object(recorder, "recorder_for", return_value=stand_in),
        mock.patch.object(recorder, "ROOM", -(2**50)),
        mock.patch.object(rerun, "nothing_sent", nullcontext),  # a capture counts its collectives
    ):
        layers = nn.ModuleList([Reducing(FEATURES, FEATURES), Reducing(FEATURES, FEATURES)])
        layers[0].group = own
        capture_layers(nn.ModuleDict({"layers": layers}))
        for step in range(WARM_UP + 2):
            loss = layers[1](layers[0](torch.ones(2, 4, FEATURES))).sum()
            if step <= WARM_UP:
                loss.backward()
        found = captured_layers(layers)
        assert found == {None: 2}, found
        dist.destroy_process_group(own if destroyed == "its own" else another)
        if destroyed == "another":
            loss.backward()
            dist.destroy_process_group(own)
            return
        with pytest.raises(RuntimeError, match="a process group was destroyed; run backward first"):
            loss.backward()
        dist.destroy_process_group(another)
