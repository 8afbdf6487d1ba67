"""What `use_one_sided` refuses, and one-sided reads among processes that share memory, kernels interpreted.

On GPUs it is checked by `test_gpu.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.comm import Encoding, call, one_sided
from fp8booster.comm.one_sided import Mailbox, PeerMemory, mailbox_of
from fp8booster.kernels.operators import Operator
from tests.distributed import run_ranks

SENTENCES = ("capacity is 0; give", "is for GPUs, and torch sees none", "groups inside one node")


def refusals() -> None:
    for sentence, capacity, visible in zip(SENTENCES, (0, 2**20, 2**20), (True, False, True), strict=True):
        torch.cuda.is_available = lambda visible=visible: visible
        torch.cuda.current_device = lambda: 0
        with pytest.raises(ValueError, match=sentence):
            comm.use_one_sided(capacity=capacity)
        assert mailbox_of(None, torch.ones(4), 4) is None
    comm.stop_one_sided()  # of what was never begun: nothing
    values = torch.ones(4096)
    comm.all_reduce(values)
    assert values.unique().tolist() == [2.0]


def test_refuses_what_it_is_not_for() -> None:
    run_ranks(refusals, 2, environment={"LOCAL_WORLD_SIZE": "1"})


class Memory:
    """Stands for a mailbox."""


def test_memory_that_peers_may_read_is_held_until_all_have_met(monkeypatch) -> None:
    mailbox, group = Memory(), MagicMock(group_name="peers")
    held, events = weakref.ref(mailbox), []
    monkeypatch.setitem(one_sided._mailboxes, "peers", mailbox)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: events.append(held() is not None))
    monkeypatch.setattr(dist, "barrier", lambda group: events.append(held() is not None))
    del mailbox
    comm.stop_one_sided(group)
    assert events == [True] * 3
    assert held() is None


CAPACITY = 2048
EXACT = {"encoding": Encoding(block_size=32, power_of_two=True), "min_bytes": 0}


def exact(count: int, rank: int) -> torch.Tensor:
    """Values that FP8 holds exactly, and their sum over two ranks too."""
    generator = torch.Generator().manual_seed(100 * count + rank)
    return torch.randint(-7, 8, (count,), generator=generator) * 8.0


def differing(mailbox: Mailbox) -> Iterator[str]:
    """The calls that do not give what torch.distributed gives; all of them fit into the mailbox, in any order."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    for count in (ranks * 33, ranks * 700, ranks * 64, ranks):
        values, regions = exact(count, rank), mailbox._written
        ours, right = values.clone(), values.clone()
        comm.all_reduce(ours, dist.ReduceOp.AVG, **EXACT)
        dist.all_reduce(right)
        if not torch.equal(ours, right / ranks):
            yield f"all_reduce {count}"
        assert mailbox._written == regions  # two exchanges
        part, right = values[: count // ranks].clone(), right.view(ranks, -1)[rank]
        comm.reduce_scatter_tensor(part, values, **EXACT)
        if not torch.equal(part, right):
            yield f"reduce_scatter_tensor {count}"
        part.fill_(-1)
        comm.reduce_scatter_coalesced(part, [values], **EXACT)
        if not torch.equal(part, right):
            yield f"reduce_scatter_coalesced {count}"
        assert mailbox._written == regions
        own = exact(count // ranks, 2 + rank)
        ours = torch.empty(count)
        comm.all_gather_into_tensor(ours, own, **EXACT)
        if not torch.equal(ours, torch.cat([exact(count // ranks, 2 + each) for each in range(ranks)])):
            yield f"all_gather_into_tensor {count}"
        comm.all_to_all_single(ours, values, **EXACT)
        right = torch.cat([exact(count, each).view(ranks, -1)[rank] for each in range(ranks)])
        if not torch.equal(ours, right):
            yield f"all_to_all_single {count}"
        assert mailbox._written == regions


def shared_memory(folder: str) -> PeerMemory:
    """What `peer_memory` makes on GPUs, as files that the ranks map."""
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def mapped(of: int) -> torch.Tensor:
        return torch.from_file(f"{folder}/{of}", shared=True, size=2 * CAPACITY, dtype=torch.uint8)

    mapped(rank).fill_(0xEE)
    dist.barrier()
    memory = [mapped(each) for each in range(ranks)]
    addresses = torch.tensor([each.data_ptr() for each in memory])
    meetings = memory  # keeps the files mapped

    def meet() -> None:
        assert len(meetings) == ranks
        dist.barrier()

    return PeerMemory(memory[rank], addresses, meet)


def read_from_peers(folder: str) -> tuple[list[str], list[int]]:
    """What went wrong, and how many streams waited for another so far, after each round of calls."""
    mailbox = Mailbox(dist.get_rank(), torch.device("cuda", 0), shared_memory(folder))
    stream = MagicMock()
    current: list[int] = []

    def fits(group: object, tensor: torch.Tensor, size: int) -> Mailbox:
        assert size <= mailbox.capacity
        return mailbox

    with (
        patch.object(call, "mailbox_of", fits),
        patch.object(Operator, "uses_triton", lambda self, tensor: True),
        patch.object(torch._C, "_cuda_getCurrentRawStream", lambda device: current[-1], create=True),
        patch.object(torch.cuda, "current_stream", lambda device: stream),
    ):
        wrong, waits = [], []
        for handle in (1, 1, 2):
            current.append(handle)
            wrong += differing(mailbox)
            waits.append(stream.wait_stream.call_count)
    dist.barrier()
    return wrong, waits


def test_messages_are_read_where_peers_left_them(tmp_path: Path) -> None:
    environment = {"TRITON_INTERPRET": "1"}
    for wrong, waits in run_ranks(read_from_peers, 2, str(tmp_path), environment=environment, preloaded=False):
        assert wrong == []
        assert waits == [0, 0, 1]  # the first call on another stream waits for the calls before it
