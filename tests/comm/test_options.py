"""What hooks and wrappers of collectives are given reaches each collective that they call."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster.comm import Encoding, collectives, ddp, fsdp
from fp8booster.comm.encoding import settings

GROUP, REPLICAS = object(), object()
HOW = {"encoding": Encoding(block_size=64), "min_bytes": 77}


def observe(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """(name, what of the arguments is no tensor, `HOW`) of each call of a module's collectives."""
    calls = []

    def observed(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            how = {key: named.pop(key) for key in HOW if key in named}
            others = [each for each in (*arguments, *named.values()) if not isinstance(each, torch.Tensor)]
            calls.append((name, others, how))
            return MagicMock()

        return call

    for name in names:
        monkeypatch.setattr(module, name, observed(name))
    return calls


def test_fsdp1_sends_all_alike_between_replicas_too(monkeypatch) -> None:
    calls = observe(monkeypatch, fsdp, "all_reduce", "reduce_scatter_tensor")
    gradient, shard, mean = torch.ones(8), torch.ones(4), dist.ReduceOp.AVG
    sharded = fsdp.FlatFSDPState(group=GROUP, **HOW)
    fsdp.flat_fsdp_hook(sharded, gradient)
    fsdp.flat_fsdp_hook(sharded, gradient, shard)
    fsdp.flat_fsdp_hook(fsdp.FlatFSDPState(group=GROUP, replicas=REPLICAS, **HOW), gradient, shard)
    assert calls == [
        ("all_reduce", [mean, GROUP], HOW),
        *[("reduce_scatter_tensor", [mean, GROUP], HOW)] * 2,
        ("all_reduce", [mean, REPLICAS], HOW),
    ]


def test_fsdp2_gathers_and_reduces_as_it_is_told(monkeypatch) -> None:
    module = nn.Linear(1, 1)
    for name in ("set_custom_all_gather", "set_custom_reduce_scatter"):
        monkeypatch.setattr(nn.Linear, name, lambda self, to, name=name: setattr(self, name[4:], to), raising=False)
    monkeypatch.setattr(fsdp, "FSDPModule", nn.Linear)
    calls = observe(monkeypatch, fsdp, "all_gather_into_tensor", "reduce_scatter_tensor")
    fsdp.compress_fsdp(nn.Sequential(module), **HOW)
    module.custom_all_gather(torch.ones(2), torch.ones(1), GROUP, True)
    module.custom_reduce_scatter(torch.ones(1), torch.ones(2), GROUP, dist.ReduceOp.AVG, True)
    assert calls == [
        ("all_gather_into_tensor", [GROUP, True], HOW),
        ("reduce_scatter_tensor", [dist.ReduceOp.AVG, GROUP, True], HOW),
    ]


@pytest.mark.parametrize("apart", [False, True])
def test_ddp_averages_each_message_as_it_is_told(monkeypatch, apart) -> None:
    calls = observe(monkeypatch, ddp, "all_reduce")
    gradients = [torch.ones(3), torch.ones(2)]
    bucket = SimpleNamespace(
        parameters=lambda: gradients, gradients=lambda: gradients, buffer=lambda: torch.cat(gradients)
    )
    state = ddp.DDPState(group=GROUP, apart=(lambda parameter: len(parameter) == 2) if apart else None, **HOW)
    ddp.ddp_hook(state, bucket)
    assert calls == [("all_reduce", [dist.ReduceOp.AVG, GROUP, True], HOW)] * (2 if apart else 1)


def test_each_message_of_many_tensors_goes_as_told(monkeypatch) -> None:
    calls = observe(monkeypatch, collectives, "all_reduce")
    tensors = [torch.ones(3), torch.ones(3), torch.ones(3).bfloat16()]
    how = {"encoding": HOW["encoding"]}
    collectives.all_reduce_coalesced(tensors, dist.ReduceOp.AVG, GROUP, bucket_bytes=12, **how)
    assert calls == [("all_reduce", [dist.ReduceOp.AVG, GROUP, ()], how)] * 3
    calls.clear()
    collectives.all_reduce_coalesced(tensors, dist.ReduceOp.AVG, GROUP, bucket_bytes=24, of=("a", "b", "c"), **how)
    assert [others[-1] for _, others, _ in calls] == [("a", "b"), ("c",)]


def test_a_format_is_no_encoding() -> None:
    with pytest.raises(TypeError, match=r"encoding is torch.float8_e4m3fn; give an fp8booster.comm.Encoding"):
        settings(encoding=torch.float8_e4m3fn)
