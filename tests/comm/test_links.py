"""Thresholds that were measured, in place of the estimates."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import fp8booster.comm as comm
from fp8booster import mailbox
from fp8booster.comm import links, threshold
from fp8booster.comm.links import BETWEEN_NODES, BY_NODES, ESTIMATED, INSIDE_A_NODE, KINDS, NEVER, REDUCTIONS, VARIABLE
from fp8booster.comm.threshold import MINIMUM_BYTES, ON_THE_CPU, minimum_bytes, use_links
from tests.distributed import ranks, run_ranks

CPU = torch.device("cpu")
MEASURED = {
    INSIDE_A_NODE: dict.fromkeys(KINDS, 4096),
    BETWEEN_NODES: dict.fromkeys(KINDS, 8192) | {"all_to_all_single": None},
    BY_NODES: dict.fromkeys(REDUCTIONS),
}


def forget() -> None:
    """Let the ranks take thresholds anew, once all have taken the former ones, as another group of all ranks does."""
    dist.barrier()
    threshold._in_use.clear()


def written(path: Path) -> Path:
    """Let rank 0 write a file, and read it alone, as where the others are on another disk."""
    if dist.get_rank() == 0:
        links.write_links(path, MEASURED, date="2026-01-01", hosts=["a", "b"])
    return path if dist.get_rank() == 0 else path.with_name("missing")


@ranks(4)
def test_every_rank_takes_what_rank_0_reads_and_decides_by_link_and_collective(tmp_path: Path) -> None:
    rank = dist.get_rank()
    environment = {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": str(rank % 2)}
    own, _ = dist.new_subgroups(2)
    forget()
    with patch.dict(os.environ, environment), patch.dict(os.environ, {VARIABLE: str(written(tmp_path / "links.json"))}):
        taken = use_links()
        assert taken.source == f"measured 2026-01-01 on a, b ({tmp_path / 'links.json'})"
        assert minimum_bytes("all_reduce", CPU, own) == minimum_bytes("all_gather", CPU, own) == 4096
        assert minimum_bytes("send", CPU, None) == 8192
        assert minimum_bytes("all_to_all", CPU, own) == 4096
        assert minimum_bytes("all_to_all", CPU, None) == NEVER
        # of other devices nothing was measured
        assert minimum_bytes("send", torch.device("cuda"), None) == MINIMUM_BYTES[BETWEEN_NODES]
        comm.reset_statistics()
        values = torch.randn(4096)
        comm.all_to_all_single(torch.empty_like(values), values)
        # uneven parts: all ranks know that no size gains
        comm.all_to_all_single(torch.empty_like(values), values, [1024] * 4, [1024] * 4)
        comm.all_reduce(values[:2047].clone())
        comm.all_reduce(values[:2048].clone())
        found = comm.statistics()
        assert found["all_to_all_single"].uncompressed == {"no gain measured": 2}
        assert found["all_reduce"].uncompressed == {"small": 1}
        assert found["all_reduce"].calls == 2
        assert taken.source in found.thresholds
        assert "measured 2026-01-01" in str(found)
    forget()


DAMAGE = {
    "ranks 4 and here 2": lambda record: record["conditions"].update(ranks=4),
    "ranks of a node 8 and here 1": lambda record: record["conditions"].update({"ranks of a node": 8}),
    "device H and here CPU": lambda record: record["conditions"].update(device="H"),
    "torch 1.0": lambda record: record["conditions"].update(torch="1.0"),
    "fp8booster 0.0.1": lambda record: record["conditions"].update(fp8booster="0.0.1"),
    "damaged or of another version": lambda record: record["minimum_bytes"][INSIDE_A_NODE].pop("send"),
    "no number of bytes": lambda record: record["minimum_bytes"][INSIDE_A_NODE].update(send=0.5),
}


@pytest.mark.parametrize("reason", DAMAGE)
@ranks(2)
def test_a_file_of_other_conditions_is_not_used_and_says_why(reason: str, tmp_path: Path) -> None:
    path = written(tmp_path / "links.json")
    if dist.get_rank() == 0:
        record = json.loads(path.read_text())
        DAMAGE[reason](record)
        path.write_text(json.dumps(record))
    forget()
    environment = {VARIABLE: str(path), "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    with patch.dict(os.environ, environment), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        source = use_links().source
    assert source.startswith("estimated, for ")
    assert reason in source
    assert "doctor --nodes` again" in source
    assert [source in str(each.message) for each in warned] == ([True] if dist.get_rank() == 0 else [])
    assert minimum_bytes("send", CPU, None) == MINIMUM_BYTES[ON_THE_CPU]
    forget()


@ranks(2)
def test_a_file_that_is_asked_for_and_missing_is_told_and_none_is_none(tmp_path: Path) -> None:
    for given, expected in ((str(tmp_path / "none.json"), "none.json"), ("", ESTIMATED.source)):
        forget()
        with patch.dict(os.environ, {VARIABLE: given}), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert expected in use_links().source
    forget()


def takes_again(folder: str) -> list[str]:
    """The sources of two groups of all ranks, of which each has another file, and both one store.

    Torch's own keys are apart: a rank may take an address for one of now that another left before.
    """
    store, rank, size = next(dist.rendezvous("env://"))
    mailbox._get_process_group_store = lambda group: store
    found = []
    for name in ("first", "second"):
        dist.init_process_group("gloo", store=dist.PrefixStore(name, store), rank=rank, world_size=size)
        os.environ[VARIABLE] = str(written(Path(folder) / name))
        found.append(use_links().source)
        dist.barrier()
        dist.destroy_process_group()
    return found


def test_another_group_of_all_ranks_reads_anew(tmp_path: Path) -> None:
    for first, second in run_ranks(takes_again, 2, str(tmp_path), initialize=False):
        assert first.endswith("first)")
        assert second.endswith("second)")
