"""Measure what a node sends in each collective: in BF16, in FP8, and in FP8 by nodes.

    scripts/two_nodes.sh --per-node 2 -m benchmarks.node_bytes --out results

The bytes are those that the kernel counted at the interface, headers included.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.harness import command
from benchmarks.harness.environment import command_line
from benchmarks.harness.results import Column, Record, Result, Table
from benchmarks.nodes import bytes_sent_by
from fp8booster import comm
from fp8booster.cli.doctor.calls import COLLECTIVES, ENCODED, ENCODED_BY_NODES, PLAIN, Bench
from fp8booster.cli.train.summary import machine
from fp8booster.comm.by_nodes import always_by_nodes
from fp8booster.comm.links import REDUCTIONS
from fp8booster.comm.threshold import use_links

REPEATS = 3

NOTE = (
    "Bytes that a node sent, the larger of the two nodes, over the bytes of the payload in BF16 (the larger side of "
    "the collective)."
)


def bytes_of(call: Callable[[], torch.Tensor], interface: str, payload: int) -> float:
    """Return what a call sends at the interface of the node that sends more, over its payload."""
    call()  # which may connect ranks
    dist.barrier()
    before = bytes_sent_by(interface)
    for _ in range(REPEATS):
        call()
    dist.barrier()  # what this node still sends is over
    most = torch.tensor(float(bytes_sent_by(interface) - before))
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return most.item() / REPEATS / payload


def error_of(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the error over that of the exact values, of the rank with the largest."""
    largest = (found.float() - exact).norm() / exact.norm()
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return largest.item()


def measure(interface: str, mib: float) -> list[Record]:
    """Return a record of each collective."""
    ranks, per_node = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    count = int(mib * 2**20) // 2 // (16 * ranks) * 16 * ranks
    group, device = dist.group.WORLD, torch.device("cpu")
    if group is None or ranks % per_node or ranks == per_node:
        raise ValueError("start it on two nodes or more, with as many ranks on each")
    use_links(always_by_nodes(device, [rank - rank % per_node for rank in range(ranks)]))
    bench, by_nodes = Bench(group, device), Bench(group, device, min_bytes=None)
    records: list[Record] = []
    for name, build in COLLECTIVES.items():
        variants = [(PLAIN, dist, bench), (ENCODED, comm, bench)]
        if name in REDUCTIONS and per_node > 1:
            variants.append((ENCODED_BY_NODES, comm, by_nodes))
            exact = bench.values(count, torch.bfloat16).float()
            dist.all_reduce(exact)
        record: Record = {"collective": name}
        for variant, module, calls in variants:
            if name in REDUCTIONS:
                found = build(module, calls, count, torch.bfloat16)()
                own = exact if found.numel() == count else exact.chunk(ranks)[group.rank()]
                record[f"error of {variant}"] = error_of(found, own)
            call = build(module, calls, count, torch.bfloat16)
            record[variant] = bytes_of(call, interface, 2 * count)
        records.append(record)
    return records


VARIANTS = (PLAIN, ENCODED, ENCODED_BY_NODES)


def _bytes(name: str) -> Column:
    return Column(name, lambda record: f"{record[name]:.3f}" if name in record else "")


def _error(name: str) -> Column:
    key = f"error of {name}"
    return Column(key, lambda record: f"{100 * record[key]:.2f} %" if key in record else "")


TABLE = [Column("collective", lambda r: r["collective"]), *map(_bytes, VARIANTS), *map(_error, VARIANTS)]


def main(
    mib: Annotated[float, typer.Option(help="Payload in BF16.")] = 4.0,
    interface: Annotated[str, typer.Option(envvar="GLOO_SOCKET_IFNAME", help="Which counts.")] = "eth0",
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
) -> None:
    """Measure the bytes that a node sends, on as many nodes as torchrun was told."""
    if "RANK" not in os.environ or torch.cuda.is_available():
        typer.echo("error: start it by scripts/two_nodes.sh or torchrun, with no GPU visible", err=True)
        raise typer.Exit(2)
    dist.init_process_group("gloo")
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    records = measure(interface, mib)
    if dist.get_rank() == 0:
        nodes = dist.get_world_size() // per_node
        head = {
            **machine(),
            "nodes": f"{nodes} network namespaces of one machine, {per_node} processes each, gloo",
            "payload": f"{mib:g} MiB in BF16",
            "command": command_line(),
        }
        table = Table("bytes", "Bytes of a node over those of the payload", TABLE, records, NOTE)
        result = Result("node-bytes", "What a node sends in each collective", head, [table])
        typer.echo(result.markdown())
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"cpu-two-nodes-bytes-{per_node}.md").write_text(result.markdown())
        if json_file is not None:
            json_file.write_text(result.json())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    command.run_command(main)
