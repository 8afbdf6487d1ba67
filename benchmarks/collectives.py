"""Time collectives in FP8, encoding and decoding included, compared with NCCL in BF16 in the same run.

    torchrun --nproc-per-node 8 -m benchmarks.collectives --out results --json results/collectives.json

Every rank runs this; the first writes. Payloads are BF16, counted at a collective's larger side. Variants take turns,
and a sample is the slowest rank's.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from benchmarks.harness import command
from benchmarks.harness.plots import plot_lines
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.statistics import Samples
from benchmarks.transfers.calls import KEPT, calls, errors
from benchmarks.transfers.ranks import head_of, join
from fp8booster import comm, formats
from fp8booster.cli.doctor.calls import COLLECTIVES, ENCODED, PLAIN, Bench
from fp8booster.cli.doctor.links import smallest_that_gains
from fp8booster.cli.doctor.timing import time_ranks_interleaved
from fp8booster.comm import Encoding
from fp8booster.comm.threshold import group_or_all
from fp8booster.monitor.traffic import bytes_sent

ALL = list(COLLECTIVES)
SIZES_MIB = [2.0**power for power in range(11)]
FORMATS = {"e4m3": formats.E4M3, "e5m2": formats.E5M2}
NOTE = (
    "Median [10th-90th percentile] over the rounds of the slowest rank's time. Bus bandwidth is the bytes that the "
    "BF16 collective sends by the algorithm that sends fewest, over the time: an FP8 call that takes half the time "
    "shows twice the bandwidth. Wire bytes are those that leave a rank, scales and padding included. The error is root "
    "mean square over the result's, against the same collective of FP32 values."
)


def sent_by_plain(collective: str, payload: int, ranks: int) -> int:
    """Bytes that leave a rank in BF16."""
    given = payload // ranks if collective == "all_gather_into_tensor" else payload
    return bytes_sent(collective, given, ranks)


def measure(collective: str, mib: float, bench: Bench, *, rounds: int, sample_ms: float) -> list[Record]:
    """One record for each variant of a collective at one payload."""
    count = max(1, int(mib * 2**20) // 2 // bench.ranks) * bench.ranks
    error = errors(collective, bench, count)
    comm.reset_statistics()
    variants = calls(collective, bench, count)
    variants[ENCODED]()
    wire = comm.statistics()[collective].wire_bytes
    elapsed = time_ranks_interleaved(variants, device=bench.device, rounds=rounds, sample_ms=sample_ms)
    timings = {name: Samples.of(values) for name, values in elapsed.items()}
    plain_bytes = sent_by_plain(collective, 2 * count, bench.ranks)
    return [
        {
            "collective": collective,
            "mib": mib,
            "payload_bytes": 2 * count,
            "ranks": bench.ranks,
            "variant": name,
            "ms": ms.as_record(),
            "ratio": ms.over(timings[PLAIN]).as_record(),
            "bus_bytes_per_second": plain_bytes / (ms.median * 1e-3),
            "wire_bytes": plain_bytes if name == PLAIN else wire,
            "wire_ratio": 1.0 if name == PLAIN else wire / plain_bytes,
            "error": error.get(name, error[ENCODED]),
        }
        for name, ms in timings.items()
    ]


def smallest_that_pays(records: list[Record]) -> list[Record]:
    """For each collective the payload from which FP8 is faster at every size: what `comm.threshold` needs."""
    found = []
    encoded = [r for r in records if r["variant"] == ENCODED]
    for collective in dict.fromkeys(r["collective"] for r in encoded):
        ratios = {r["mib"]: r["ratio"]["p90"] for r in encoded if r["collective"] == collective}
        found.append({"collective": collective, "variant": ENCODED, "mib": smallest_that_gains(ratios)})
    return found


COLUMNS = (
    Column("collective", lambda r: r["collective"]),
    Column("MiB", lambda r: f"{r['mib']:g}"),
    Column("variant", lambda r: r["variant"]),
    Column("ms", lambda r: spread(r["ms"], 3)),
    Column("over BF16", lambda r: spread(r["ratio"], 3)),
    Column("bus GB/s", lambda r: f"{r['bus_bytes_per_second'] / 1e9:.0f}"),
    Column("wire MiB", lambda r: f"{r['wire_bytes'] / 2**20:.2f}"),
    Column("wire over BF16", lambda r: f"{r['wire_ratio']:.3f}"),
    Column("error", lambda r: f"{r['error']:.2e}"),
)
THRESHOLD_COLUMNS = (
    Column("collective", lambda r: r["collective"]),
    Column("variant", lambda r: r["variant"]),
    Column("MiB", lambda r: "none" if r["mib"] is None else f"{r['mib']:g}"),
)


def plot(result: Result, records: list[Record], folder: Path) -> str:
    """Draw the ratio to BF16 over payloads; return the file's name."""
    name = f"{result.stem}.png"
    sizes = sorted({record["mib"] for record in records})
    lines = {}
    for collective in dict.fromkeys(record["collective"] for record in records):
        for variant in (ENCODED, KEPT):
            chosen = [r for r in records if r["collective"] == collective and r["variant"] == variant]
            if chosen:
                label = collective if variant == ENCODED else f"{collective}, {variant}"
                lines[label] = [r["ratio"]["median"] for r in sorted(chosen, key=lambda r: r["mib"])]
    lines["roofline: BF16"] = [1.0] * len(sizes)
    plot_lines(
        folder / name, title=result.title, x_label="BF16 payload, MiB", y_label="time over BF16", x=sizes, lines=lines
    )
    return name


def main(
    collective: Annotated[list[str], typer.Option(help=f"{', '.join(COLLECTIVES)}; repeat the option.")] = ALL,
    mib: Annotated[list[float], typer.Option(help="BF16 payloads in MiB; repeat the option.")] = SIZES_MIB,
    format: Annotated[str, typer.Option(help="e4m3 or e5m2.")] = "e4m3",
    block_size: Annotated[int, typer.Option(help="Values that share a scale; 0 for one scale.")] = 256,
    rounds: Annotated[int, typer.Option(help="Samples of each variant.")] = 11,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 20.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time collectives in FP8 compared with BF16, over the ranks that torchrun started."""
    if quick:
        mib, rounds = mib[::5], 3
    target, gpu = join(device, "collectives")
    bench = Bench(group_or_all(None), target, Encoding(format=FORMATS[format], block_size=block_size or None))
    records = [
        record
        for name in collective
        for size in mib
        for record in measure(name, size, bench, rounds=rounds, sample_ms=sample_ms)
    ]
    if bench.rank == 0:
        deliver(records, bench, head_of(bench, gpu, commit=commit), json=json, out=out)
    dist.barrier()
    dist.destroy_process_group()


def deliver(records: list[Record], bench: Bench, head: dict[str, str], *, json: Path | None, out: Path | None) -> None:
    """Write what was measured."""
    result = Result(
        f"collectives-{bench.ranks}",
        f"Collectives of {bench.ranks} ranks in FP8 compared with BF16",
        head,
        [
            Table("collectives", "Time, bytes and error", COLUMNS, records, NOTE),
            Table(
                "thresholds",
                "Payload from which FP8 is faster",
                THRESHOLD_COLUMNS,
                smallest_that_pays(records),
                "The smallest payload measured from which the 90th percentile of the ratio stays under 1.",
            ),
        ],
    )
    if out is not None:
        result = replace(result, plots=[plot(result, records, out)])
    command.deliver(result, folder=out, json_file=json)


if __name__ == "__main__":
    command.run_command(main)
