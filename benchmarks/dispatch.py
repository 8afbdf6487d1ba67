"""Time how a mixture's tokens go to experts on other ranks and come back, in FP8 and in BF16.

    torchrun --nproc-per-node 8 -m benchmarks.dispatch --out results --json results/dispatch.json

Every rank runs this; the first writes. Sizes are those of Qwen3-30B-A3B. Variants are interleaved, and a sample is the
slowest rank's.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.harness import command
from benchmarks.harness.results import Column, Record, Result, Table, spread
from benchmarks.harness.statistics import Samples
from benchmarks.transfers.calls import relative_error
from benchmarks.transfers.one_sided import ONE_SIDED, add_one_sided
from benchmarks.transfers.ranks import head_of, join
from benchmarks.transfers.tokens import DISPATCH, PLAIN, Mixture, Way, Ways, Work, in_high_precision, ways
from fp8booster.cli.doctor.calls import Bench
from fp8booster.cli.doctor.timing import time_ranks_interleaved
from fp8booster.comm.threshold import group_or_all
from fp8booster.nn.experts.host_copy import HostCopy

UNEVEN = [1.0, 4.0]
NOTE = (
    "Median [10th-90th percentile] over the rounds of the slowest rank's time. A dispatch brings a row of each token "
    "to each of its experts; a combine sends back what they make of it and adds up each token's, weighted. In BF16 "
    "every row is sent. In FP8 a token is cast or encoded and sent once to each rank, with its choices and weights. "
    "What that rank's experts make of it is added up there, and comes back as a message in both, which there time the "
    "same call. Sizes are known. Uneven: rows of the busiest rank's experts over those of the least busy rank's, "
    "as asked for. Bytes sent leave a rank. BF16's GB/s are the most bytes that leave or reach a rank in BF16, over "
    "the time, whatever is sent. FP8 as cast finds its largest value here, on which ranks agree with their counts. The "
    "error is root mean square over the result's, on the first rank, against FP32."
)
COUNTS_NOTE = (
    "Before ranks send rows, in each layer, they tell each other how many, and each one's host waits for that."
)


def measure(work: Work, variants: Ways, *, rounds: int, sample_ms: float) -> list[Record]:
    """Return a record for each variant of dispatch and of combine."""
    bench, records = work.bench, []
    for (phase, of_phase), exact in zip(variants.items(), in_high_precision(work, torch.float32), strict=True):
        values = exact.values(exact.call())
        errors = {name: relative_error(way.values(way.call()), values) for name, way in of_phase.items()}
        del values
        calls = {name: way.call for name, way in of_phase.items()}
        elapsed = time_ranks_interleaved(calls, device=bench.device, rounds=rounds, sample_ms=sample_ms)
        timings = {name: Samples.of(samples) for name, samples in elapsed.items()}
        _, busiest, _ = _transfer(of_phase[PLAIN], phase)
        for name, ms in timings.items():
            leave, _, arriving = _transfer(way := of_phase[name], phase)
            records.append(
                {
                    "uneven": work.uneven,
                    "phase": phase,
                    "variant": name,
                    "ranks": bench.ranks,
                    "ms": ms.as_record(),
                    "ratio": ms.over(timings[PLAIN]).as_record(),
                    "bytes_sent": {
                        "most": int(leave.max()) * way.row_bytes,
                        "mean": int(leave.sum()) * way.row_bytes / bench.ranks,
                    },
                    "bf16_bytes_per_second": busiest * of_phase[PLAIN].row_bytes / (ms.median * 1e-3),
                    "rows_received": {"most": int(arriving.max()), "least": int(arriving.min())},
                    "error": errors[name],
                }
            )
    return records


def _transfer(way: Way, phase: str) -> tuple[torch.Tensor, int, torch.Tensor]:
    """Return the rows that leave each rank, the most that leave or reach one, and those that each gets, its own too."""
    rows = way.loads if phase == DISPATCH else way.loads.T
    away = rows - rows.diag().diag()
    leave = away.sum(1)
    return leave, max(int(leave.max()), int(away.sum(0).max())), rows.sum(0)


def measure_counts(work: Work, *, rounds: int, sample_ms: float) -> Record:
    """Return the time until the host knows how many rows come."""
    bench, arriving = work.bench, torch.empty_like(work.counts)

    def call() -> list[list[int]]:
        dist.all_to_all_single(arriving, work.counts, group=bench.group)
        return HostCopy(arriving).tolist()

    elapsed = time_ranks_interleaved({"counts": call}, device=bench.device, rounds=rounds, sample_ms=sample_ms)
    ms = Samples.of(elapsed["counts"])
    return {"uneven": work.uneven, "shape": list(arriving.shape), "ms": ms.as_record()}


COLUMNS = (
    Column("uneven", lambda r: f"{r['uneven']:g}"),
    Column("phase", lambda r: r["phase"]),
    Column("variant", lambda r: r["variant"]),
    Column("ms", lambda r: spread(r["ms"], 3)),
    Column("over BF16", lambda r: spread(r["ratio"], 3)),
    Column("MiB sent, most", lambda r: f"{r['bytes_sent']['most'] / 2**20:.2f}"),
    Column("mean", lambda r: f"{r['bytes_sent']['mean'] / 2**20:.2f}"),
    Column("BF16's GB/s", lambda r: f"{r['bf16_bytes_per_second'] / 1e9:.0f}"),
    Column("rows received, most", lambda r: str(r["rows_received"]["most"])),
    Column("least", lambda r: str(r["rows_received"]["least"])),
    Column("error", lambda r: f"{r['error']:.2e}"),
)
COUNTS_COLUMNS = (
    Column("uneven", lambda r: f"{r['uneven']:g}"),
    Column("ranks x experts of each", lambda r: "{} x {}".format(*r["shape"])),
    Column("ms", lambda r: spread(r["ms"], 3)),
)


def main(
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each rank.")] = 8192,
    hidden: Annotated[int, typer.Option(min=1, help="Values of a token.")] = 2048,
    experts: Annotated[int, typer.Option(min=1, help="Experts of all ranks.")] = 128,
    top_k: Annotated[int, typer.Option(min=1, help="Experts of a token.")] = 8,
    uneven: Annotated[
        list[float], typer.Option(help="Rows of the busiest rank over those of the least busy; repeat the option.")
    ] = UNEVEN,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each variant.")] = 11,
    sample_ms: Annotated[float, typer.Option(help="Milliseconds a sample lasts at least.")] = 20.0,
    quick: command.Quick = False,
    json: command.JsonFile = None,
    out: command.Folder = None,
    commit: command.Commit = None,
    device: command.DeviceName = "cuda",
) -> None:
    """Time dispatch and combine of a mixture's tokens, over the ranks that torchrun started."""
    if quick:
        tokens, rounds = min(tokens, 1024), 3
    target, gpu = join(device, "dispatch")
    bench, mixture = Bench(group_or_all(None), target), Mixture(tokens, hidden, experts, top_k)
    try:
        works = [Work(mixture, factor, bench) for factor in uneven]
    except ValueError as error:
        command.refuse(f"{error}; change --experts, --top-k or --uneven")
    records, counts, left_out = [], [], {}
    for work in works:
        variants = ways(work)
        if (reason := add_one_sided(variants, work)) is not None:
            left_out[ONE_SIDED] = reason
        records += measure(work, variants, rounds=rounds, sample_ms=sample_ms)
        counts.append(measure_counts(work, rounds=rounds, sample_ms=sample_ms))
    if bench.rank == 0:
        result = Result(
            f"dispatch-{bench.ranks}",
            f"Tokens to experts on {bench.ranks} ranks and back, in FP8 compared with BF16",
            head_of(bench, gpu, commit=commit) | {"mixture": str(mixture)},
            [
                Table("rows", "Dispatch and combine", COLUMNS, records, NOTE),
                Table("counts", "The exchange of counts", COUNTS_COLUMNS, counts, COUNTS_NOTE),
            ],
            left_out,
        )
        command.deliver(result, folder=out, json_file=json)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    command.run_command(main)
