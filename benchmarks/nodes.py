"""Measure FP8 on the wire between nodes: time of a training step, and bytes that the network interface sent.

    scripts/two_nodes.sh --rate 1gbit -m benchmarks.nodes --link "1 Gbit/s" --out results
    scripts/two_nodes.sh -m benchmarks.nodes --mode zero --mode tp --mode pp --mode experts --out results

One process a node. A LLaMA of a named size, or a Mixtral of that size, trains on random tokens under the plugin of each
mode, with FP8 products in the variants that ask for them. Variants are interleaved, and a step takes as long as on the
slowest rank. The bytes are those that the kernel counted at the interface, headers included, and those that
`fp8booster.monitor` counts.
"""

from __future__ import annotations

import fp8booster.colossal  # noqa: F401  isort: skip  (patches colossalai before it is imported)
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import colossalai
import torch
import torch.distributed as dist
import typer

from benchmarks.harness import command
from benchmarks.harness.environment import command_line
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.statistics import Samples
from fp8booster.cli.train.summary import machine
from fp8booster.comm.threshold import links_in_use, topology
from fp8booster.monitor.traffic import Traffic, count_traffic
from fp8booster.training.boosted import BoostedModel, causal
from fp8booster.training.models import MODELS, SIZES, build
from fp8booster.training.parallel import PLUGINS, Parallel
from fp8booster.training.plugins import make_plugin

VOCABULARY, MAX_NORM = 4096, 1.0
WIRE_16, WIRE_8 = "FP8 products, BF16 on the wire", "FP8 products, FP8 on the wire"
VARIANTS: dict[str, dict[str, Any]] = {
    "BF16": {},
    WIRE_16: {"use_fp8": True, "fp8_communication": False},
    WIRE_8: {"use_fp8": True},
}
"""Name: arguments of the plugin."""

MODES = {
    "zero": Parallel(),
    "tp": Parallel(plugin="hybrid", tp=2),
    "pp": Parallel(plugin="hybrid", pp=2, micro_batches=2),
    "experts": Parallel(plugin="moe", ep=2),
}
"""Name: what two nodes share."""

RATES = (10, 25, 100)
"""Gbit/s at which the time on the wire is counted."""

COMPARED = WIRE_16
"""What bytes and time are given as parts of."""

NOTE = (
    "Median [10th-90th percentile] over steps; a step's time is the slowest rank's. MB are the mean over steps of what "
    "one node sent: at its interface, headers included, and as `fp8booster.monitor` counts it, for the algorithm that "
    "sends fewest. gloo reduces and scatters by an all-reduce, which sends more than that; gradients in FP8 go by an "
    "all-to-all. Parts are of what BF16 on the wire takes with the same products. Time on the wire is counted, not "
    "measured: the bytes at the interface over the rate, without delays, and as if nothing were sent while a rank "
    "computes."
)


@dataclass
class Measured:
    """A variant in training and what its steps took."""

    boosted: BoostedModel
    micro_batches: int
    seconds: list[float] = field(default_factory=list)
    at_interface: list[int] = field(default_factory=list)
    counted: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)

    def step(self, tokens: torch.Tensor, interface: str, traffic: Traffic, keep: bool) -> None:
        """One optimizer step on this rank's tokens  [micro-batches * batch, sequence]."""
        dist.barrier()
        sent, counted, began = bytes_sent_by(interface), traffic.sent, time.perf_counter()
        loss = self.boosted.forward_backward([causal(part) for part in tokens.chunk(self.micro_batches)])
        self.boosted.update(MAX_NORM)
        own = time.perf_counter() - began
        counted = traffic.sent - counted
        dist.barrier()  # what this rank still sends is over
        sent = bytes_sent_by(interface) - sent
        slowest = torch.tensor(own)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if loss is not None:  # the last stage of a pipeline has it
            self.losses.append(loss.item())
        if keep:
            self.seconds.append(slowest.item())
            self.at_interface.append(sent)
            self.counted.append(counted)


def bytes_sent_by(interface: str) -> int:
    """Return the bytes that the kernel counted at a network interface of this process's namespace."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    raise ValueError(f"there is no network interface {interface}; name one of `ip link` with --interface")


def boost(variant: str, parallel: Parallel, model: str, sequence: int) -> BoostedModel:
    """A model in training under a variant; the same weights for each."""
    from fp8booster import plugins

    torch.manual_seed(0)
    architecture = replace(MODELS[model], vocabulary=VOCABULARY)
    if parallel.plugin == "moe":
        architecture = replace(architecture, family="mixtral", experts=4, experts_per_token=2)
    network = build(architecture.config(sequence), device=torch.device("cpu"))
    plugin_class = getattr(plugins, PLUGINS[parallel.plugin])
    plugin = make_plugin(plugin_class, parallel, network, MAX_NORM, VARIANTS[variant])
    return BoostedModel(parallel.plugin, plugin, network, torch.optim.AdamW(network.parameters(), lr=1e-3))


def measure(
    parallel: Parallel, model: str, batch: int, sequence: int, steps: int, warmup: int, interface: str
) -> dict[str, Measured]:
    """Return what the steps of each variant took in a mode."""
    with count_traffic() as traffic:
        measured = {
            variant: Measured(boost(variant, parallel, model, sequence), parallel.micro_batches) for variant in VARIANTS
        }
        replica = next(iter(measured.values())).boosted.replica
        generator = torch.Generator().manual_seed(replica.index)
        for number in range(warmup + steps):
            tokens = torch.randint(0, VOCABULARY, (parallel.micro_batches * batch, sequence), generator=generator)
            for each in measured.values():
                each.step(tokens, interface, traffic, keep=number >= warmup)
    return measured


def records_of(measured: dict[str, Measured]) -> list[Record]:
    """One for each variant."""
    reference = measured[COMPARED]
    base_seconds = Samples.of(reference.seconds)
    base_bytes = sum(reference.at_interface)
    return [
        {
            "variant": variant,
            "ms": Samples.of([1e3 * seconds for seconds in each.seconds]).as_record(),
            "ratio": Samples.of(each.seconds).over(base_seconds).as_record(),
            "interface_bytes": sum(each.at_interface) / len(each.at_interface),
            "counted_bytes": sum(each.counted) / len(each.counted),
            "bytes_ratio": sum(each.at_interface) / base_bytes,
            "wire_ms": [8 * sum(each.at_interface) / len(each.at_interface) / rate / 1e6 for rate in RATES],
            "losses": each.losses,
        }
        for variant, each in measured.items()
    ]


TABLE = [
    Column("variant", lambda r: r["variant"]),
    Column("ms a step", lambda r: spread(r["ms"], 0)),
    Column("part", lambda r: f"{r['ratio']['median']:.2f}"),
    Column("MB at the interface", lambda r: f"{r['interface_bytes'] / 1e6:.2f}"),
    Column("part", lambda r: f"{r['bytes_ratio']:.3f}"),
    Column("MB counted", lambda r: f"{r['counted_bytes'] / 1e6:.2f}"),
    Column(
        f"ms on the wire at {', '.join(map(str, RATES))} Gbit/s",
        lambda r: ", ".join(f"{each:.2f}" for each in r["wire_ms"]),
    ),
    Column("last loss", lambda r: f"{r['losses'][-1]:.4f}" if r["losses"] else "on the other node"),
]


ZERO = ["zero"]


def main(
    mode: Annotated[list[str], typer.Option(help=f"{', '.join(MODES)}; repeat the option.")] = ZERO,
    model: Annotated[str, typer.Option(help=f"{', '.join(SIZES)}.")] = "tiny",
    batch: Annotated[int, typer.Option(help="Sequences a rank.")] = 1,
    sequence: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 64,
    steps: Annotated[int, typer.Option(help="Measured steps of each variant.")] = 20,
    warmup: Annotated[int, typer.Option(help="Steps before them.")] = 2,
    link: Annotated[str, typer.Option(help="What joins the nodes, for the head.")] = "unlimited",
    interface: Annotated[str, typer.Option(envvar="GLOO_SOCKET_IFNAME", help="Which counts.")] = "eth0",
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
) -> None:
    """Measure steps of each variant, on as many nodes as torchrun was told."""
    if "RANK" not in os.environ or torch.cuda.is_available():
        typer.echo("error: start it by scripts/two_nodes.sh or torchrun, with no GPU visible", err=True)
        raise typer.Exit(2)
    if unknown := next((name for name in mode if name not in MODES), None):
        command.refuse(f"no mode is called {unknown!r}; --mode takes {', '.join(MODES)}")
    bytes_sent_by(interface)
    colossalai.launch_from_torch(verbose=False)
    nodes = dist.get_world_size() // int(os.environ["LOCAL_WORLD_SIZE"])
    tables = []
    for name in mode:
        measured = measure(MODES[name], model, batch, sequence, steps, warmup, interface)
        title = f"{MODES[name].describe()}, link {link}"
        tables.append(Table(name, title, TABLE, records_of(measured), NOTE if not tables else ""))
    if dist.get_rank() == 0:
        head = {
            **machine(),
            "nodes": f"{nodes} network namespaces of one machine, {dist.get_world_size() // nodes} process each",
            "link": link,
            "topology class": topology(None),
            "sizes from which FP8 is sent": links_in_use().source,
            "each step": f"{model}, {batch} x {sequence} tokens a rank and micro-batch",
            "processor": f"load average {os.getloadavg()[0]:.1f}, shared by both nodes and by other work",
            "command": command_line(),
        }
        result = Result("nodes", "Training between nodes, with and without FP8 on the wire", head, tables)
        typer.echo(result.markdown())
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / ("cpu-two-nodes.md" if mode == ZERO else "cpu-two-nodes-modes.md")).write_text(result.markdown())
        if json_file is not None:
            json_file.write_text(result.json())
    dist.barrier()
    sys.stdout.flush()
    # a regular exit now and then aborts in threads of process groups that colossalai's objects hold
    os._exit(0)


if __name__ == "__main__":
    command.run_command(main)
