from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from fp8booster import comm
from fp8booster.monitor.traffic import count_traffic
from tests.comm.training import losses_of, small_model, worst_difference
from tests.distributed import run_ranks


def sharded(model: nn.Module, policy: MixedPrecisionPolicy) -> nn.Module:
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def train_plain_and_in_fp8(dtype: torch.dtype | None) -> dict[str, object]:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype and torch.float32)
    model = small_model()
    others = {"gather and reduce": {}, "reduce": {"gather": False}, "gather": {"reduce": False}}
    results = {}
    copies = {name: copy.deepcopy(model) for name in others}
    with count_traffic() as plain_traffic:
        results["plain"] = losses_of(sharded(model, policy))
    for name, options in others.items():
        compressed = sharded(copies[name], policy)
        comm.compress_fsdp(compressed, min_bytes=0, **options)
        comm.reset_statistics()
        with count_traffic() as traffic:
            results[name] = losses_of(compressed)
        counted = comm.statistics()
        results[name + " statistics"] = {key: row.ratio for key, row in counted.rows.items()}
        results[name + " bytes"] = traffic.sent / plain_traffic.sent
    return results


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_loss_follows_that_of_plain_fsdp_on_two_ranks(dtype: torch.dtype | None) -> None:
    for rank in run_ranks(train_plain_and_in_fp8, 2, dtype):
        plain = rank["plain"]
        assert plain[-1] < 0.5 * plain[0]
        for name, worst in (("reduce", 0.03), ("gather", 0.1), ("gather and reduce", 0.1)):
            assert rank[name] != plain
            assert worst_difference(rank[name], plain) < worst, name
        assert set(rank["reduce statistics"]) == {"reduce_scatter_tensor"}
        assert set(rank["gather statistics"]) == {"all_gather_into_tensor"}
        assert rank["gather and reduce statistics"]["reduce_scatter_tensor"] < 0.27
        assert rank["gather and reduce statistics"]["all_gather_into_tensor"] < (0.54 if dtype else 0.27)
        assert rank["gather and reduce bytes"] < (0.45 if dtype else 0.28)


def test_an_unsharded_model_is_refused() -> None:
    with pytest.raises(ValueError, match="fully_shard"):
        comm.compress_fsdp(nn.Linear(4, 4))
