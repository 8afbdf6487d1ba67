"""FP8-LM's automatic scaling on 2 and 3 ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm import AutomaticScaling, Encoding
from fp8booster.kernels.scales import MAX_SCALE
from fp8booster.monitor.traffic import count_traffic
from tests.comm.bounds import assert_within, rounding_bound
from tests.distributed import ranks, run_ranks

SIZES = [1000, 7, 3001]
"""Of three tensors in a rank's part."""


def on_gloo(function: Callable[[torch.device], None]) -> Callable[..., None]:
    """A test on 2 and 3 ranks."""
    on_the_cpu = pytest.mark.parametrize("device", [torch.device("cpu")], ids=["cpu"])
    return ranks(2, 3)(on_the_cpu(function))


def reduce(scaling: AutomaticScaling, values: torch.Tensor, sizes: list[int] | None = None) -> torch.Tensor:
    """This rank's part of the mean."""
    output = values.new_empty(values.numel() // dist.get_world_size())
    scaling.reduce_scatter_tensor(output, values, dist.ReduceOp.AVG, sizes=sizes, min_bytes=0)
    return output


def gathered(values: torch.Tensor) -> torch.Tensor:
    """[ranks, N]: the values of all ranks."""
    every = [torch.empty_like(values) for _ in range(dist.get_world_size())]
    dist.all_gather(every, values)
    return torch.stack(every)


def gradients(device: torch.device) -> torch.Tensor:
    """Three tensors of very different size of value, in a part for each rank; ranks differ by a factor."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    parts = [
        torch.cat([torch.randn(size, generator=generator) * 10.0**-power for power, size in enumerate(SIZES)])
        for _ in range(dist.get_world_size())
    ]
    return (torch.cat(parts) * (1 + dist.get_rank())).to(device)


@on_gloo
def test_the_sum_lies_within_what_casts_and_additions_round(device: torch.device) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values = gradients(device)
    found = reduce(AutomaticScaling(ranks, device), values, SIZES)
    every = gathered(values).view(ranks, ranks, -1)
    ratios = []
    for tensor, got in zip(every.split(SIZES, 2), found.split(SIZES), strict=True):
        amax = tensor.double().abs().max() * ranks  # mu is 1 / ranks
        mine = tensor[:, rank].double()
        bound = sum(rounding_bound(values, amax, Encoding()) for values in mine)
        for partial in mine.abs().cumsum(0)[1:]:  # each addition rounds; 1.1: what was rounded before may be larger
            bound = bound + rounding_bound(1.1 * partial, amax, Encoding())
        assert_within(got, mine.mean(0), bound / ranks)
        ratios.append(((got - mine.mean(0)).abs() / (bound / ranks)).max().item())
    assert max(ratios) > 0.3, ratios


@on_gloo
def test_ranks_share_the_scale_of_the_one_with_the_largest_values(device: torch.device) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values = torch.full((ranks,), 3e-6, device=device)
    if rank == 1:
        values *= 2.0**14
    found = reduce(AutomaticScaling(ranks, device), values)
    # under the scale of rank 1 the others' values are flushed
    torch.testing.assert_close(found, torch.full_like(found, 3e-6 * 2.0**14 / ranks), rtol=2.0**-4, atol=0.0)
    alone = gathered(found).flatten()
    assert bool((alone == alone[0]).all())


@on_gloo
def test_mu_is_halved_from_0_001_percent_of_saturated_values(device: torch.device) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    part = 100_000
    cast = ranks * (ranks + 1) * part
    for over, factor in ((0, comm.automatic_scaling.GROWTH), (1, 0.5)):
        scaling = AutomaticScaling(1, device)  # mu is 1: the largest value is cast to the format's largest
        values = torch.zeros(ranks * part, device=device)
        if rank == 0:
            values[: cast // 200_000 + over] = -0.5  # each once sent and once in the sum
        reduce(scaling, values)
        scaling.step()
        assert math.isclose(scaling.mu.item(), factor, rel_tol=1e-6), (over, scaling.mu)
        assert bool((gathered(scaling.mu) == scaling.mu).all())
        before = scaling.mu.clone()
        scaling.step()  # nothing was reduced
        assert torch.equal(scaling.mu, before)


@on_gloo
def test_it_goes_on_with_the_mu_that_was_saved(device: torch.device) -> None:
    ranks = dist.get_world_size()
    whole, resumed = AutomaticScaling(ranks, device), AutomaticScaling(ranks, device)
    values = torch.linspace(0, 1, 64 * ranks, device=device)
    reduce(whole, values)
    whole.step()
    resumed.load({name: each.clone() for name, each in whole.saved.items()})
    assert torch.equal(reduce(resumed, values), reduce(whole, values))
    for scaling in (resumed, whole):
        scaling.step()
    assert torch.equal(resumed.mu, whole.mu)


@on_gloo
def test_mu_grows_to_twice_its_value_in_1000_steps(device: torch.device) -> None:
    ranks = dist.get_world_size()
    scaling = AutomaticScaling(8, device)
    values = torch.ones(ranks, device=device)
    for steps, expected in ((500, 2**0.5 / 8), (500, 0.25)):
        for _ in range(steps):
            reduce(scaling, values)
            scaling.step()
        assert math.isclose(scaling.mu.item(), expected, rel_tol=1e-3), scaling.mu


@on_gloo
def test_sums_beyond_the_format_saturate_and_shrink_mu_until_they_fit(device: torch.device) -> None:
    ranks = dist.get_world_size()
    scaling = AutomaticScaling(1, device)
    values = torch.ones(ranks * 64, device=device)
    assert bool((reduce(scaling, values) < 0.6).all())
    for _ in range(4):
        reduce(scaling, values)
        scaling.step()
    torch.testing.assert_close(reduce(scaling, values), torch.ones(64, device=device), rtol=2.0**-4 * ranks, atol=0.0)


@on_gloo
def test_an_infinity_or_nan_of_one_rank_arrives_as_nan_and_spares_other_tensors(device: torch.device) -> None:
    ranks, rank = dist.get_world_size(), dist.get_rank()
    values = gradients(device)
    good = reduce(AutomaticScaling(ranks, device), values, SIZES)
    for bad in (torch.inf, -torch.inf, torch.nan):
        spoiled = values.clone()
        if rank == ranks - 1:
            spoiled[SIZES[0] + 2] = bad  # in the second tensor of the first rank's part
        scaling = AutomaticScaling(ranks, device)
        first, second, third = reduce(scaling, spoiled, SIZES).split(SIZES)
        assert bool(second.isnan().all())
        assert torch.equal(first, good.split(SIZES)[0])
        assert torch.equal(third, good.split(SIZES)[2])
        scaling.step()
        assert bool(scaling.mu.isfinite())


@on_gloo
def test_statistics_agree_with_what_is_seen_at_torch_distributed(device: torch.device) -> None:
    values = gradients(device).bfloat16()
    scaling = AutomaticScaling(dist.get_world_size(), device)
    comm.reset_statistics()
    with count_traffic() as counted:
        reduce(scaling, values, SIZES)
        scaling.step()
    rows = comm.statistics().rows
    assert sum(row.wire_bytes for row in rows.values()) == counted.sent
    assert 0.5 < rows["reduce_scatter_tensor"].ratio < 0.52


@on_gloo
def test_each_stream_counts_for_itself_and_a_step_adds_them(device: torch.device) -> None:
    if device.type != "cpu":
        return  # `counts_of_streams_that_run_at_once_are_not_lost`
    ranks, seen = dist.get_world_size(), []
    scaling = AutomaticScaling(1, device)
    values = torch.ones(ranks * 64)
    for handle in (1, 2, 1):
        with patch.object(comm.automatic_scaling, "current_stream", lambda tensor, handle=handle: handle):
            reduce(scaling, values)
        seen.append({handle: counts.values.clone() for handle, counts in scaling._counts.items()})
    cast = (ranks + 1) * 64
    assert [each[1][1].item() for each in seen] == [cast, cast, 2 * cast]
    assert seen[2][2][1].item() == cast
    total = scaling._taken_counts()
    assert total.tolist() == [3 * cast] * 2  # with this mu every value is the largest
    assert scaling._taken_counts().tolist() == [0, 0]


@on_gloo
def test_counts_of_streams_that_run_at_once_are_not_lost(device: torch.device) -> None:
    if device.type != "cuda":
        return
    ranks = dist.get_world_size()
    scaling = AutomaticScaling(1, device)
    streams = [torch.cuda.Stream() for _ in range(4)]
    parts = [torch.ones(ranks, 1 << 16, device=device).to(comm.automatic_scaling.FORMAT) for _ in streams]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, part in zip(streams, parts, strict=True):
            with torch.cuda.stream(stream):
                scaling._count(part)
    assert scaling._taken_counts()[1].item() == 200 * len(streams) * ranks * (1 << 16)


@on_gloo
def test_small_ones_go_uncompressed(device: torch.device) -> None:
    comm.reset_statistics()
    values = torch.arange(2.0 * dist.get_world_size(), device=device) / 7
    output = values.new_empty(2)
    AutomaticScaling(dist.get_world_size(), device).reduce_scatter_tensor(output, values)
    expected = values.view(-1, 2)[dist.get_rank()] * dist.get_world_size()
    torch.testing.assert_close(output, expected)
    assert comm.statistics()["reduce_scatter_tensor"].uncompressed == {"small": 1}


def test_scales_stay_finite_and_their_inverses_undo_them() -> None:
    scales, inverse_scales = comm.automatic_scaling.scales_of(torch.tensor([1e-38, 1.0, 0.0]), torch.tensor(4.0))
    assert scales[0] == MAX_SCALE
    assert scales[1] == 4 * 448
    torch.testing.assert_close(scales * inverse_scales, torch.ones(3))


def run_over_nccl() -> None:
    """The tests on GPUs."""
    torch.cuda.set_device(dist.get_node_local_rank())
    dist.init_process_group("nccl")
    for test in list(globals().values()):
        if hasattr(test, "on_rank"):
            test.on_rank(torch.device("cuda"))
            dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
def test_on_nccl() -> None:
    """NCCL's own sum of FP8."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    run_ranks(run_over_nccl, 2, initialize=False, timeout=300)
