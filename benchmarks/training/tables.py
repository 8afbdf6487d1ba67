"""Show the records of whole training steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.results import Column, Record, Table, spread
from benchmarks.training.engines import ENGINES
from benchmarks.training.flops import FORMULA

STEP_NOTE = (
    "A step begins where the one before ended, and ends when the GPU of the slowest rank has done what its current "
    "stream holds, as in a loop that reads each loss; what is sent on other streams goes on, in the next step's time, "
    "and the last step waits for all of it. The host's time ends when Python has launched the step, or has waited "
    "within it: where it is near the step's, the GPU may wait for Python. Median [10th-90th percentile] over the timed "
    "steps of all rounds. Engines "
    "take turns, each in processes of its own; ratios are of tokens a second, round by round. Memory is the peak of "
    "torch's allocator in the timed steps, on the rank with most. Wire bytes leave a rank in a step, the mean of the "
    "ranks, counted at torch.distributed by the algorithm that sends fewest; where DDP's own reducer sends, computed. "
)


def step_table(records: Sequence[Record], baseline: str) -> Table:
    """One row for each engine."""
    ours = "fp8booster over it"
    return Table(
        "engines",
        "A training step",
        [
            Column("engine", _name),
            Column("ms", _of("ms", lambda ms: spread(ms, 1))),
            Column("slowest rank", _or_dash("slowest_rank", _slowest)),
            Column("host ms", _of("host_ms", lambda ms: spread(ms, 1))),
            Column("tokens/s/GPU", _of("tokens_per_second_per_gpu", "{:.0f}".format)),
            Column(f"over {ENGINES[baseline].label}", _of("over_baseline", lambda ratio: spread(ratio, 2))),
            Column(ours, _of("ours_over", lambda ratio: spread(ratio, 2))),
            Column("model TFLOP/s", _of("model_tflops", "{:.0f}".format)),
            Column("of FP8 peak", _of("utilisation", lambda of: _percent(of["FP8"]))),
            Column("of BF16 peak", _of("utilisation", lambda of: _percent(of["BF16"]))),
            Column("Colossal-AI's TFLOPS", _of("native_tflops", "{:.0f}".format)),
            Column("peak GiB", _of("peak_bytes", lambda size: f"{size / 2**30:.1f}" if size else "-")),
            Column("wire MiB", _of("wire", lambda wire: f"{wire['bytes'] / 2**20:.1f}")),
            Column("rounds", _of("rounds", lambda rounds: str(len(rounds)))),
        ],
        records,
        STEP_NOTE + FORMULA,
    )


def power_table(records: Sequence[Record]) -> Table | None:
    """At which clocks and for how much energy the engines ran; None where it was not sampled."""
    sampled = [{"label": record["label"], **record["power"]} for record in records if record.get("power")]
    if not sampled:
        return None
    return Table(
        "power",
        "Clocks and power",
        [
            Column("engine", lambda r: r["label"]),
            Column("MHz", lambda r: _by_rank(r["mhz"], "{:.0f}")),
            Column("W", lambda r: _by_rank(r["watts"], "{:.0f}")),
            Column("held down by power", lambda r: _by_rank([100 * share for share in r["limited"]], "{:.0f} %")),
            Column("tokens/J", lambda r: f"{r['tokens_per_joule']:.2f}"),
        ],
        sampled,
        "Of the GPU of each rank in the timed steps, as nvidia-smi samples it: the median clock of its processors, its "
        "mean power, and the share of the samples in which the power limit held the clock down. Tokens of all ranks "
        "for each joule that their GPUs took.",
    )


def why_no_power(records: Sequence[Record]) -> str | None:
    """Whose clocks and power are in no table though they ran, in a sentence; None where all are there."""
    unsampled = [record["label"] for record in records if "power" in record and record["power"] is None]
    if not unsampled:
        return None
    return (
        f"not known of {'; '.join(unsampled)}, for nvidia-smi did not answer with both for the GPU of every rank "
        "while steps were timed"
    )


def wire_tables(records: Sequence[Record]) -> list[Table]:
    """Show the bytes sent, by collective, and fp8booster's statistics of them."""
    sent = [
        {"label": record["label"], **row} for record in records if "wire" in record for row in record["wire"]["rows"]
    ]
    encoded = [
        {"label": record["label"], **row} for record in records if "wire" in record for row in record["wire"]["fp8"]
    ]
    tables = [
        Table(
            "wire",
            "What rank 0 sends in a step",
            [
                Column("engine", lambda r: r["label"]),
                Column("collective", lambda r: r["collective"]),
                Column("dtype", lambda r: r["dtype"]),
                Column("calls", lambda r: str(r["calls"])),
                Column("sent MiB", lambda r: f"{r['sent_bytes'] / 2**20:.2f}"),
            ],
            sent,
        ),
        Table(
            "fp8_communication",
            "What fp8booster compressed",
            [
                Column("engine", lambda r: r["label"]),
                Column("collective", lambda r: r["collective"]),
                Column("calls", lambda r: str(r["calls"])),
                Column("MiB uncompressed", lambda r: f"{r['raw_bytes'] / 2**20:.2f}"),
                Column("MiB sent", lambda r: f"{r['wire_bytes'] / 2**20:.2f}"),
                Column("calls in 16 bits, and why", _uncompressed),
            ],
            encoded,
        ),
    ]
    return [table for table in tables if table.records]


def loss_table(records: Sequence[Record], reference: str) -> Table:
    """Compare the losses."""
    return Table(
        "losses",
        "Loss",
        [
            Column("engine", lambda r: r["label"]),
            Column("steps", lambda r: str(len(r["losses"]))),
            Column("first", lambda r: f"{r['first']:.4f}"),
            Column("last tenth", lambda r: f"{r['last']:.4f}"),
            Column(
                f"over {ENGINES[reference].label}",
                lambda r: "-" if r["difference"] is None else f"{100 * r['difference']:+.2f} %",
            ),
        ],
        records,
        "Mean of all replicas, in the first round, warm-up included. Peers that draw their weights shard by shard "
        "begin from others. Random tokens come again every few steps and are learned by heart: what is left of the "
        "loss then is not compared. `--data` trains on text.",
    )


def _name(record: Record) -> str:
    if record["failed"] is None:
        return record["label"]
    return f"{record['label']} (left out{' later' if 'rounds' in record else ''})"


def _of(key: str, show: Callable) -> Callable[[Record], str]:
    return lambda record: "-" if record.get(key) is None else show(record[key])


def _or_dash(key: str, show: Callable[[Record], str]) -> Callable[[Record], str]:
    return lambda record: "-" if record.get(key) is None else show(record)


def _slowest(record: Record) -> str:
    rank = record["slowest_rank"]
    return f"{rank} ({record['rank_ms'][rank]:.1f})"


def _by_rank(values: Sequence[float], form: str) -> str:
    return ", ".join(form.format(value) for value in values)


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.1f} %"


def _uncompressed(record: Record) -> str:
    return ", ".join(f"{count} {reason}" for reason, count in record["uncompressed"].items()) or "none"
