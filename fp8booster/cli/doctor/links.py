"""`fp8booster doctor --nodes`: time of each collective in 16 bits and in FP8, inside a node and between nodes."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from statistics import median

import numpy as np
import torch
import torch.distributed as dist

from fp8booster import comm
from fp8booster.cli.doctor.calls import COLLECTIVES, ENCODED, ENCODED_BY_NODES, PLAIN, Bench
from fp8booster.cli.doctor.timing import time_ranks_interleaved
from fp8booster.comm.by_nodes import always_by_nodes
from fp8booster.comm.links import (
    BETWEEN_NODES,
    BY_NODES,
    ESTIMATED,
    INSIDE_A_NODE,
    REDUCTIONS,
    VARIABLE,
    file_of_links,
    write_links,
)
from fp8booster.comm.threshold import group_or_all, use_links

ROUNDS, SAMPLE_MS = 7, 10.0
"""Samples of each time, and what each lasts at least."""

LARGEST_MIB = {"cuda": 256.0, "cpu": 16.0}
SMALLEST_BYTES, FACTOR = 2**16, 4
"""Payloads begin here, and each is so many times the one before."""


@dataclass(frozen=True)
class LinkTime:
    """A collective of one payload on one link."""

    link: str
    collective: str
    payload: int
    """Bytes of the larger side in 16 bits."""

    plain_ms: float
    """Median of the slowest rank's times, in 16 bits."""

    fp8_ms: float
    """The same in FP8, encoding and decoding included."""

    ratio_p90: float
    """90th percentile over the samples of FP8's time over that in 16 bits."""

    by_nodes_ms: float | None = None
    """The median in FP8 by nodes, of reductions between nodes of several ranks; else None."""

    by_nodes_ratio_p90: float | None = None
    """90th percentile of that time over the shorter of the others."""


@dataclass(frozen=True)
class LinkTimes:
    """All that was measured."""

    hosts: list[str]
    ranks: int
    ranks_of_a_node: int
    device: str
    times: list[LinkTime]
    minimum_bytes: dict[str, dict[str, int | None]]
    """By link and collective; None where FP8 gains at no size. Those by nodes gain over both other forms."""

    file: str | None
    """Where the thresholds were written, on rank 0's node; None: nowhere."""


def smallest_that_gains(ratios: Mapping[float, float]) -> float | None:
    """Return the smallest payload from which FP8 takes less time at every larger one too, or None.

    Args:
        ratios: FP8's time over that in 16 bits, by payload.
    """
    least = None
    for payload in sorted(ratios, reverse=True):
        if ratios[payload] >= 1:
            break
        least = payload
    return least


def measure_links(largest_mib: float | None, announce: Callable[[str], object]) -> LinkTimes:
    """Join the ranks of this start, measure and write the thresholds; all ranks call it and return the same.

    Args:
        largest_mib: the largest payload in MiB; None: 256 on GPUs, 16 on the CPU.
        announce: hears what is being measured.

    Raises:
        ValueError: no launcher started this, there is one rank, or nodes have different numbers of ranks.
    """
    if "RANK" not in os.environ or "LOCAL_WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--nodes measures between ranks, and nothing started any; start it on each node as `torchrun --nnodes 2 "
            "--nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint NODE:29500 -m fp8booster doctor --nodes`"
        )
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    sizes = payloads(LARGEST_MIB[device.type] if largest_mib is None else largest_mib)
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(minutes=5))
    try:
        return _measure(device, sizes, announce)
    finally:
        dist.destroy_process_group()


def payloads(largest_mib: float) -> list[int]:
    """Return the payloads that are measured, in bytes."""
    sizes = []
    size = SMALLEST_BYTES
    while size <= largest_mib * 2**20:
        sizes.append(size)
        size *= FACTOR
    if not sizes:
        raise ValueError(f"--mib is {largest_mib:g}; give at least {SMALLEST_BYTES / 2**20:g}, the smallest payload")
    return sizes


def _measure(device: torch.device, sizes: list[int], announce: Callable[[str], object]) -> LinkTimes:
    ranks, of_a_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    if ranks == 1:
        raise ValueError("there is one rank, which sends nothing; start two or more")
    found: list[tuple[int, str]] = [(0, "")] * ranks
    dist.all_gather_object(found, (of_a_node, socket.gethostname()))
    counts = {count for count, _ in found}
    if len(counts) > 1:
        raise ValueError(f"nodes have {' and '.join(map(str, sorted(counts)))} ranks; start as many on each")
    use_links(always_by_nodes(device, [rank - rank % of_a_node for rank in range(ranks)]))
    times = []
    for link, group in _groups(ranks, of_a_node).items():
        bench = Bench(group, device)
        by_nodes = replace(bench, min_bytes=None)
        for collective, build in COLLECTIVES.items():
            for size in sizes:
                announce(f"Timing {collective} {link}, {size / 2**20:g} MiB")
                count = max(1, size // 2 // bench.ranks) * bench.ranks
                variants = {
                    name: build(module, bench, count, torch.bfloat16)
                    for name, module in ((PLAIN, dist), (ENCODED, comm))
                }
                if link == BETWEEN_NODES and of_a_node > 1 and collective in REDUCTIONS:
                    variants[ENCODED_BY_NODES] = build(comm, by_nodes, count, torch.bfloat16)
                elapsed = time_ranks_interleaved(variants, device=device, rounds=ROUNDS, sample_ms=SAMPLE_MS)
                plain, fp8 = elapsed[PLAIN], elapsed[ENCODED]
                ratio = float(np.percentile(np.divide(fp8, plain), 90))
                found_by_nodes: tuple[float, ...] = ()
                if ENCODED_BY_NODES in elapsed:
                    ratios = np.divide(elapsed[ENCODED_BY_NODES], np.minimum(plain, fp8))
                    found_by_nodes = median(elapsed[ENCODED_BY_NODES]), float(np.percentile(ratios, 90))
                times.append(LinkTime(link, collective, size, median(plain), median(fp8), ratio, *found_by_nodes))
    thresholds = thresholds_of(times)
    hosts, path = list(dict.fromkeys(host for _, host in found)), file_of_links()
    if path is not None and dist.get_rank() == 0:
        date = time.strftime("%Y-%m-%d")
        write_links(path, thresholds, date=date, hosts=hosts, times=[asdict(each) for each in times])
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    return LinkTimes(hosts, ranks, of_a_node, name, times, thresholds, None if path is None else str(path))


def thresholds_of(times: list[LinkTime]) -> dict[str, dict[str, int | None]]:
    """Return the payload from which each collective gains in FP8, by link; None: from none."""
    ratios: dict[str, dict[str, dict[float, float]]] = {}
    for each in times:
        ratios.setdefault(each.link, {}).setdefault(each.collective, {})[each.payload] = each.ratio_p90
        if each.by_nodes_ratio_p90 is not None:
            by_size = ratios.setdefault(BY_NODES, {}).setdefault(each.collective, {})
            by_size[each.payload] = each.by_nodes_ratio_p90
    found: dict[str, dict[str, int | None]] = {}
    for link, kinds in ratios.items():
        least = {kind: smallest_that_gains(by_size) for kind, by_size in kinds.items()}
        found[link] = {kind: None if size is None else int(size) for kind, size in least.items()}
    return found


def _groups(ranks: int, of_a_node: int) -> dict[str, dist.ProcessGroup]:
    """Return this rank's group on each kind of link. All nodes measure inside at the same time."""
    groups = {}
    if of_a_node > 1:
        own, _ = dist.new_subgroups(of_a_node)
        groups[INSIDE_A_NODE] = own
    if ranks > of_a_node:
        groups[BETWEEN_NODES] = group_or_all(None)
    return groups


def sentences(found: LinkTimes) -> list[str]:
    """Return what gains in FP8 on each link, and where the thresholds are."""
    lines = []
    for link, kinds in found.minimum_bytes.items():
        gains = [f"{kind} from {size / 2**20:g} MiB" for kind, size in kinds.items() if size is not None]
        others = [kind for kind, size in kinds.items() if size is None]
        if link == BY_NODES:
            clauses = [f"FP8 by nodes gains most in {', '.join(gains)}"] if gains else []
            clauses += [f"{', '.join(others)} do not run so"] if others else []
        else:
            clauses = [f"FP8 gains in {', '.join(gains)}"] if gains else []
            clauses += [f"{', '.join(others)} stay in 16 bits"] if others else []
        lines.append(f"{link}: {'; '.join(clauses)}")
    if found.file is None:
        lines.append(f"{VARIABLE} is empty: nothing was written, and thresholds stay {ESTIMATED.source.split(';')[0]}.")
    else:
        lines.append(f"written to {found.file} on {found.hosts[0]}, which training on these ranks reads.")
    return lines
