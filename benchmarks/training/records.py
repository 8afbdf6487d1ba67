"""Put what the turns found into one record for each engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.harness.environment import Gpu
from benchmarks.harness.results import Record
from benchmarks.harness.statistics import Samples
from benchmarks.training.engines import ENGINES, OURS
from benchmarks.training.flops import model_flops, native_flops
from benchmarks.training.job import Job
from benchmarks.training.rounds import Findings


@dataclass(frozen=True)
class Setting:
    """The setting that all engines of a run share."""

    job: Job
    ranks: int
    gpu: Gpu

    @property
    def tokens_a_step(self) -> int:
        """Tokens of one step of all ranks, where each is a replica."""
        return self.job.micro_batches * self.job.micro_batch * self.job.sequence * self.ranks

    @property
    def place(self) -> str:
        """The machine, for titles."""
        return place_of(self.ranks, on_gpus=self.job.device == "cuda")


def place_of(ranks: int, *, on_gpus: bool) -> str:
    """As "1 GPU", "8 GPUs", "2 ranks"."""
    return f"{ranks} {'GPU' if on_gpus else 'rank'}{'s' if ranks != 1 else ''}"


def engine_records(findings: Mapping[str, Findings], setting: Setting, baseline: str) -> list[Record]:
    """A record for each engine, in the order of `findings`; one that failed has its reason and what it found before.

    Ratios compare the throughputs of the rounds that both engines finished, round by round.
    """
    records = [_record(name, found, setting) for name, found in findings.items()]
    by_name = {record["engine"]: record for record in records}
    ours = next((name for name in reversed(OURS) if name in by_name), None)
    for record in records:
        record["baseline"] = baseline
        record["over_baseline"] = _ratio(record, by_name.get(baseline))
        record["ours_over"] = _ratio(by_name.get(ours), record)
    return records


BY_HEART = 0.02
"""Of its first loss: what a model that loses less has learned by heart, as it does random tokens that come again."""


def loss_records(findings: Mapping[str, Findings], reference: str) -> list[Record]:
    """The losses of each engine's first round; the last one is the mean of the last tenth of the steps.

    "difference" is that to `reference`'s last, over it; None where there is no reference, or where it has learned its
    batches by heart, so that the little that is left says nothing about another's.
    """
    curves = {name: next(iter(found.outcomes.values()))["losses"] for name, found in findings.items() if found.outcomes}
    last = {name: float(np.mean(losses[-max(1, len(losses) // 10) :])) for name, losses in curves.items()}
    comparable = reference in last and last[reference] > BY_HEART * curves[reference][0]
    return [
        {
            "engine": name,
            "label": ENGINES[name].label,
            "first": losses[0],
            "last": last[name],
            "difference": last[name] / last[reference] - 1 if comparable else None,
            "losses": losses,
        }
        for name, losses in curves.items()
    ]


def _record(name: str, found: Findings, setting: Setting) -> Record:
    record: Record = {"engine": name, "label": ENGINES[name].label, "failed": found.reason}
    if not found.outcomes:
        return record
    job = setting.job
    outcomes = found.outcomes
    steps = [ms for outcome in outcomes.values() for ms in outcome["step_ms"]]
    ranks = np.median([outcome["rank_ms"] for outcome in outcomes.values()], axis=0)
    first = next(iter(outcomes.values()))
    tokens = first["replicas"] * job.micro_batches * job.micro_batch * job.sequence
    ms = Samples.of(steps)
    throughput = 1e3 * tokens / ms.median / setting.ranks
    flops = model_flops(job) * throughput
    natively = native_flops(job)
    return record | {
        "rounds": list(outcomes),
        "ms": ms.as_record(),
        "rank_ms": ranks.tolist(),
        "slowest_rank": int(ranks.argmax()),
        "host_ms": Samples.of([ms for outcome in outcomes.values() for ms in outcome["host_ms"]]).as_record(),
        "tokens": tokens,
        "tokens_per_second_per_gpu": throughput,
        "by_round": {
            str(number): 1e3 * tokens / float(np.median(outcome["step_ms"])) / setting.ranks
            for number, outcome in outcomes.items()
        },
        "model_tflops": 1e-12 * flops,
        "utilisation": {
            precision: None if peak is None else flops / peak
            for precision in ("FP8", "BF16")
            for peak in (setting.gpu.peak_flops(precision),)
        },
        "native_tflops": None if natively is None else 1e-12 * natively * throughput,
        "peak_bytes": max(outcome["peak_bytes"] for outcome in outcomes.values()),
        "reserved_bytes": max(outcome["reserved_bytes"] for outcome in outcomes.values()),
        "power": _power([outcome["power"] for outcome in outcomes.values()], tokens / ms.median),
        "wire": first["wire"],
        "layers": first["layers"],
        "fused": first["fused"],
        "profile": first["parts"],
        "build_s": [outcome["build_s"] for outcome in outcomes.values()],
    }


def _power(rounds: Sequence[Record | None], tokens_per_ms: float) -> Record | None:
    """The mean of the rounds, rank by rank, and tokens for each joule of all GPUs; None unless all rounds have it."""
    if None in rounds:
        return None
    means: Record = {name: np.mean([of_round[name] for of_round in rounds], axis=0).tolist() for name in rounds[0]}
    return means | {"tokens_per_joule": 1e3 * tokens_per_ms / sum(means["watts"])}


def _ratio(one: Record | None, other: Record | None) -> Record | None:
    if one is None or other is None or "by_round" not in one or "by_round" not in other:
        return None
    both = [number for number in one["by_round"] if number in other["by_round"]]
    if not both:
        return None
    return (
        Samples.of([one["by_round"][number] for number in both])
        .over(Samples.of([other["by_round"][number] for number in both]))
        .as_record()
    )
