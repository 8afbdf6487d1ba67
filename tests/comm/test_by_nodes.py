"""Reductions by nodes, on four ranks that are told to be two nodes of two."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm import by_nodes, links, threshold
from fp8booster.comm.links import BETWEEN_NODES, BY_NODES, INSIDE_A_NODE, KINDS, REDUCTIONS, VARIABLE, Links
from fp8booster.comm.threshold import use_links
from fp8booster.formats import HIGH_PRECISION
from fp8booster.monitor.traffic import count_traffic
from tests.comm.harness import assert_same_on_all_ranks, finish, of_all_ranks
from tests.distributed import ranks, run_ranks

NODES = {"2 and 2": (0, 0, 2, 2), "alternating": (0, 1, 0, 1)}
LEAST = 4096


def forget() -> None:
    """Let the ranks take thresholds and nodes anew, once all have taken the former ones."""
    dist.barrier()
    for known in (threshold._in_use, threshold._nodes, by_nodes._schedules):
        known.clear()


@contextmanager
def measured(first_ranks: tuple[int, ...] = NODES["2 and 2"], least: int = 0) -> Iterator[None]:
    """Let reductions run by nodes from a size on, in a group of all ranks of these nodes."""
    forget()
    never = {BETWEEN_NODES: dict.fromkeys(KINDS), BY_NODES: dict.fromkeys(REDUCTIONS, least)}
    use_links(Links("a test", "cpu", never, first_ranks))
    comm.reset_statistics()
    try:
        yield
    finally:
        forget()


def values_of(count: int, dtype: torch.dtype) -> torch.Tensor:
    torch.manual_seed(dist.get_rank())
    return torch.randn(count).to(dtype)


def assert_close(found: torch.Tensor, everyone: list[torch.Tensor], op: dist.ReduceOp.RedOpType, part: slice) -> None:
    """The error is within FP8's: about 2.6 % of the norm for each rounding, of which a sum has one or two."""
    exact = sum(everyone) / (len(everyone) if op == dist.ReduceOp.AVG else 1)
    error = (found.double() - exact[part]).norm()
    assert error < 0.06 * exact[part].norm()
    assert error > 0, "nothing was rounded"


@pytest.mark.parametrize("nodes", NODES)
@pytest.mark.parametrize("op", [dist.ReduceOp.SUM, dist.ReduceOp.AVG], ids=["sum", "mean"])
@ranks(4)
def test_reductions_by_nodes_are_those_of_all_ranks(nodes: str, op: dist.ReduceOp.RedOpType) -> None:
    rank = dist.get_rank()
    with measured(NODES[nodes]):
        for dtype in HIGH_PRECISION:
            for asynchronous, count in ((False, 4096), (True, 4099), (False, 1001)):
                values = values_of(count, dtype)
                everyone = of_all_ranks(values)
                finish(comm.all_reduce(values, op, async_op=asynchronous))
                assert_close(values, everyone, op, slice(None))
                assert_same_on_all_ranks(values)
                part = torch.empty(count, dtype=dtype)
                values = values_of(4 * count, dtype)
                kept, everyone = values.clone(), of_all_ranks(values)
                own = slice(rank * count, (rank + 1) * count)
                finish(comm.reduce_scatter_tensor(part, values, op, async_op=asynchronous))
                assert_close(part, everyone, op, own)
                finish(comm.reduce_scatter(part, list(values.chunk(4)), op, async_op=asynchronous))
                assert_close(part, everyone, op, own)
                assert torch.equal(values, kept)
        for name, calls in (("all_reduce", 9), ("reduce_scatter_tensor", 18)):
            row = comm.statistics()[name]
            assert (row.calls, row.by_nodes, sum(row.uncompressed.values())) == (calls, calls, 0)
        assert "by nodes" in str(comm.statistics())


@ranks(4)
def test_many_tensors_are_reduced_in_one_message_by_nodes() -> None:
    tensors = [values_of(4 * count, torch.bfloat16).view(4, -1) for count in (100, 33)]
    sums = torch.empty(133)
    with measured():
        comm.reduce_scatter_coalesced(sums, tensors)
        assert comm.statistics()["reduce_scatter_tensor"].by_nodes == 1
    for tensor, found in zip(tensors, sums.split([100, 33]), strict=True):
        rank, count = dist.get_rank(), found.numel()
        assert_close(found, of_all_ranks(tensor.view(-1)), dist.ReduceOp.SUM, slice(rank * count, (rank + 1) * count))


@ranks(4)
def test_a_mean_of_large_values_does_not_overflow_inside_a_node() -> None:
    values = torch.full((1000,), 60000.0, dtype=torch.float16)
    with measured():
        comm.all_reduce(values, dist.ReduceOp.AVG)
    torch.testing.assert_close(values, torch.full_like(values, 60000.0), rtol=0.07, atol=0)


@ranks(4)
def test_what_is_counted_is_what_torch_was_given() -> None:
    with measured():
        for reduce in (
            lambda: comm.all_reduce(torch.ones(1001)),
            lambda: comm.reduce_scatter_tensor(torch.empty(250), torch.ones(1000)),
        ):
            comm.reset_statistics()
            with count_traffic() as traffic:
                reduce()
            (row,) = comm.statistics().rows.values()
            assert row.wire_bytes == traffic.sent
            assert row.wire_bytes < row.raw_bytes


@ranks(4)
def test_a_file_decides_by_size_on_every_rank(tmp_path: Path) -> None:
    """Of which the thresholds are written by hand, and read by rank 0 alone."""
    forget()
    rank, path = dist.get_rank(), tmp_path / "links.json"
    environment = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), VARIABLE: str(path)}
    with patch.dict(os.environ, environment):
        if rank == 0:
            minimum = {link: dict.fromkeys(KINDS) for link in (INSIDE_A_NODE, BETWEEN_NODES)}
            minimum[BETWEEN_NODES]["all_reduce"] = LEAST // 2
            minimum[BY_NODES] = {"all_reduce": LEAST, "reduce_scatter_tensor": None}
            links.write_links(path, minimum, date="2026-01-01", hosts=["a", "b"])
        taken = use_links()
        assert taken.source.startswith("measured ")
        assert list(taken.first_ranks) == [0, 0, 2, 2]
        comm.reset_statistics()
        for size in (LEAST, LEAST - 4, LEAST // 2 - 4):
            comm.all_reduce(torch.ones(size // 4))
        comm.all_reduce(torch.ones(LEAST), min_bytes=0)
        comm.reduce_scatter_tensor(torch.empty(LEAST), torch.ones(4 * LEAST))
        found = comm.statistics()
        assert (found["all_reduce"].by_nodes, found["all_reduce"].uncompressed) == (1, {"small": 1})
        assert found["all_reduce"].calls == 4
        assert found["reduce_scatter_tensor"].by_nodes == 0
        assert found["reduce_scatter_tensor"].uncompressed == {"no gain measured": 1}
    forget()


@ranks(4)
def test_a_file_from_before_is_not_used(tmp_path: Path) -> None:
    forget()
    rank, path = dist.get_rank(), tmp_path / "links.json"
    environment = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2), VARIABLE: str(path)}
    with patch.dict(os.environ, environment):
        if rank == 0:
            minimum = {link: dict.fromkeys(KINDS, 0) for link in (INSIDE_A_NODE, BETWEEN_NODES)}
            links.write_links(path, minimum, date="2026-01-01", hosts=["a", "b"])
            assert BY_NODES not in json.loads(path.read_text())["minimum_bytes"]
            with pytest.warns(UserWarning, match=r"of another version; run `fp8booster doctor --nodes` again"):
                taken = use_links()
        else:
            taken = use_links()
        assert "of another version" in taken.source
        assert not taken.device
    forget()


@ranks(4)
def test_groups_inside_a_node_of_uneven_nodes_or_of_single_ranks_stay_flat() -> None:
    inside, _ = dist.new_subgroups(2)
    across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
    three = dist.new_group([0, 1, 2])
    values = torch.ones(LEAST)
    with measured():
        for group in (inside, across, three):
            if isinstance(group, dist.ProcessGroup):
                comm.all_reduce(values.clone(), group=group)
        assert comm.statistics()["all_reduce"].by_nodes == 0
    for nodes in ((0, 0, 0, 3), (0, 0, 2, 3), (0, 0, 0, 0), (0, 1, 2, 3)):
        with measured(nodes):
            comm.all_reduce(values.clone())
            row = comm.statistics()["all_reduce"]
            assert (row.by_nodes, row.calls) == (0, 1)
    for group in (inside, across, three):
        if isinstance(group, dist.ProcessGroup):
            dist.destroy_process_group(group)


@ranks(4)
def test_what_is_no_sum_is_plain_and_ranks_that_disagree_are_told() -> None:
    with measured():
        values = torch.full((LEAST,), float(dist.get_rank()))
        comm.all_reduce(values, dist.ReduceOp.MAX)
        assert torch.equal(values, torch.full_like(values, 3.0))
        row = comm.statistics()["all_reduce"]
        assert (row.by_nodes, row.uncompressed) == (0, {"reduction MAX": 1})
        # before any of them waits in a group of its node, though the call is asynchronous
        with pytest.raises(ValueError, match="ranks of a group disagree"):
            comm.all_reduce(torch.ones(3 * LEAST + dist.get_rank() // 2), async_op=True)


def sums_of_two_worlds() -> list[tuple[float, int]]:
    """Each makes groups of its nodes anew: those of the first have ended with it."""
    store, rank, size = next(dist.rendezvous("env://"))
    found = []
    for name in ("first", "second"):
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
        use_links(by_nodes.always_by_nodes(torch.device("cpu"), NODES["2 and 2"]))
        values = torch.ones(LEAST)
        comm.all_reduce(values)
        found.append((values.mean().item(), len(by_nodes._schedules)))
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_groups_of_nodes_end_with_the_group_of_all_ranks() -> None:
    assert run_ranks(sums_of_two_worlds, 4, initialize=False) == [[(4.0, 1), (4.0, 1)]] * 4
