"""Measure what a node sends in each collective: in BF16, in FP8, and by nodes: BF16 inside and FP8 between.

    scripts/two_nodes.sh --per-node 2 -m benchmarks.node_bytes --out results

"By nodes" is composed here of three calls, to know what it would save: ranks of a node reduce to a share each in BF16,
ranks of one place in their nodes reduce their shares in FP8, and those of a node gather in BF16. The bytes are those
that the kernel counted at the interface, headers included.
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
from fp8booster.cli.doctor.calls import COLLECTIVES, ENCODED, PLAIN, Bench, Call
from fp8booster.cli.train.summary import machine
from fp8booster.comm.transport import one_tensor

BY_NODES = "BF16 inside, FP8 between"
REPEATS = 3

NOTE = (
    "Bytes that a node sent, the larger of the two nodes, over the bytes of the payload in BF16 (the larger side of "
    "the collective)."
)


class ByNodes:
    """Collectives in BF16 inside a node and in FP8 between nodes.

    Args:
        per_node: ranks of a node, numbered one after the other.
        count: values of the larger side.
    """

    def __init__(self, per_node: int, count: int) -> None:
        self.nodes, self.per_node = dist.get_world_size() // per_node, per_node
        self.inside, _ = dist.new_subgroups(per_node)
        places = [[place + per_node * node for node in range(self.nodes)] for place in range(per_node)]
        self.across, _ = dist.new_subgroups_by_enumeration(places)
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.values = torch.randn(count, generator=generator).bfloat16()
        self.share = torch.empty(count // per_node, dtype=torch.bfloat16)
        self.part = torch.empty(count // dist.get_world_size(), dtype=torch.bfloat16)

    def all_reduce(self) -> torch.Tensor:
        """Return the sum of all ranks' values."""
        one_tensor("reduce_scatter")(self.share, self.values, group=self.inside)
        comm.all_reduce(self.share, group=self.across, min_bytes=0)
        whole = torch.empty_like(self.values)
        one_tensor("all_gather")(whole, self.share, group=self.inside)
        return whole

    def reduce_scatter(self) -> torch.Tensor:
        """Return this rank's part of that."""
        parts = self.values.view(self.nodes, self.per_node, -1).transpose(0, 1).contiguous()
        one_tensor("reduce_scatter")(self.share, parts.view(-1), group=self.inside)
        comm.reduce_scatter_tensor(self.part, self.share, group=self.across, min_bytes=0)
        return self.part

    def all_gather(self) -> torch.Tensor:
        """Return the first values of each rank, one after the other."""
        own = self.values[: self.part.numel()]
        comm.all_gather_into_tensor(self.share, own, group=self.across, min_bytes=0)
        whole = torch.empty_like(self.values)
        one_tensor("all_gather")(whole, self.share, group=self.inside)
        return whole.view(self.per_node, self.nodes, -1).transpose(0, 1).reshape(-1)


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
    group = dist.group.WORLD
    if group is None or ranks % per_node or ranks == per_node:
        raise ValueError("start it on two nodes or more, with as many ranks on each")
    bench, by_nodes = Bench(group, torch.device("cpu")), ByNodes(per_node, count)
    total = by_nodes.values.float()
    dist.all_reduce(total)
    rank, size = dist.get_rank(), count // ranks
    gathered = torch.empty(count)
    one_tensor("all_gather")(gathered, by_nodes.values[:size].float())
    composed: dict[str, tuple[Call, torch.Tensor]] = {
        "all_reduce": (by_nodes.all_reduce, total),
        "reduce_scatter_tensor": (by_nodes.reduce_scatter, total[rank * size : (rank + 1) * size]),
        "all_gather_into_tensor": (by_nodes.all_gather, gathered),
    }
    records: list[Record] = []
    for name, build in COLLECTIVES.items():
        record: Record = {"collective": name}
        for variant, module in ((PLAIN, dist), (ENCODED, comm)):
            record[variant] = bytes_of(build(module, bench, count, torch.bfloat16), interface, 2 * count)
        if name in composed:
            call, exact = composed[name]
            record["error"] = error_of(call(), exact)
            record[BY_NODES] = bytes_of(call, interface, 2 * count)
        records.append(record)
    return records


def _shown(name: str, digits: int = 3) -> Column:
    return Column(name, lambda record: f"{record[name]:.{digits}f}" if name in record else "")


TABLE = [Column("collective", lambda r: r["collective"]), _shown(PLAIN), _shown(ENCODED), _shown(BY_NODES)]
TABLE.append(Column("its error", lambda r: f"{100 * r['error']:.1f} %" if "error" in r else ""))


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
