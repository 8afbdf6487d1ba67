"""The loss in FP8 compared with BF16, over several seeds: the differences, and how far chance moves them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.plots import plot_differences, plot_points
from benchmarks.harness.results import Column, Record, Table
from benchmarks.training.differences import Difference
from benchmarks.training.runs import HELD_OUT, Point, Run
from benchmarks.training.samples import TENTHS, recorded
from benchmarks.training.variants import BF16, VARIANTS, Variant, base_of, reference_of

Losses = Mapping[int, Mapping[str, Sequence[float]]]
"""By seed and variant, of every step; a seed has the variants that were trained."""

Ends = Mapping[int, Mapping[str, Mapping[str, float]]]
"""By seed and variant: the loss after the last step, as the run computes ("own") and in BF16."""


@dataclass
class Findings:
    """The findings of a campaign's runs that have ended, by seed and variant."""

    losses: dict[int, dict[str, list[float]]] = field(default_factory=dict)
    """Where all were finite."""
    held_out: dict[int, dict[str, dict[str, float]]] = field(default_factory=dict)
    """The loss on what no step trains on, as the run computes ("own") and in BF16."""
    kinds: dict[int, dict[str, dict[str, dict[str, float]]]] = field(default_factory=dict)
    """The same on text of each other kind, by its name."""
    curves: dict[int, dict[str, dict[str, list[Point]]]] = field(default_factory=dict)
    """The loss on each text after so many tokens."""
    speeds: dict[int, dict[str, float]] = field(default_factory=dict)
    """Tokens/s, the median."""
    recorded: dict[int, dict[str, list[Record]]] = field(default_factory=dict)
    """What FP8 did to the tensors of each role in each tenth of the steps (`samples.recorded`)."""
    not_finite: dict[int, dict[str, int]] = field(default_factory=dict)
    """The step of the first loss that was not."""
    facts: dict[str, str] = field(default_factory=dict)
    """By variant, what computes in FP8."""

    @classmethod
    def of(cls, runs: Sequence[Run]) -> tuple[Findings, dict[str, str]]:
        """Return the findings in their folders, and by name the progress of those that have no loss to compare."""
        found, left_out = cls(), {}
        for run in runs:
            label, end = run.variant.label, run.folder.end()
            if end is None:
                if done := len(run.folder.losses()):
                    left_out[run.name] = f"{done} of {run.job.steps} steps so far"
            elif end["end"] == HELD_OUT:
                found.losses.setdefault(run.seed, {})[label] = run.folder.losses()
                found.held_out.setdefault(run.seed, {})[label] = end["held_out"]
                found.kinds.setdefault(run.seed, {})[label] = end["kinds"]
                found.curves.setdefault(run.seed, {})[label] = run.folder.curves()
                if speed := run.folder.speed():
                    found.speeds.setdefault(run.seed, {})[label] = speed
                if rows := recorded(run.folder.scales, run.job.steps):
                    found.recorded.setdefault(run.seed, {})[label] = rows
                if end["layers"] is not None or run.variant.engine == Variant.engine:
                    found.facts[label] = end["layers"] or "no layer, as their logs say why"
            else:
                found.not_finite.setdefault(run.seed, {})[label] = end["at_step"]
                left_out[run.name] = f"its loss is not finite at step {end['at_step']}"
        return found, left_out


NOTE = (
    "The loss is the mean of a tenth of the steps, the difference that to BF16's of the same seed, over it: of BF16 "
    "with fused blocks, where no other ran. "
    "After ± is the standard error of the mean over the seeds: two runs that round differently, as both "
    "variants of BF16 do, part from each other too, and what of a difference lies within a few of its errors "
    "may be chance."
)


def read_runs(files: Sequence[Path]) -> tuple[Findings, list[str], list[dict[str, Any]]]:
    """Results of `benchmarks.convergence --json`, with different seeds or variants.

    Returns:
        what all found, their variants, and the results.

    Raises:
        ValueError: a file is no such result, two have one run, or they differ in what they train.
    """
    joined = Findings()
    variants: dict[str, None] = {}
    runs = []
    alike: dict[str, tuple[Path, str | None]] = {}
    of: dict[tuple[int, str], Path] = {}
    for file in files:
        runs.append(_read(file))
        head = runs[-1]["head"]
        for line in (*COMPARED, *(line for line in head if line.startswith(OF_KIND))):
            compared = _compared(head, line)
            first, known = alike.setdefault(line, (file, compared))
            if compared != known:
                raise ValueError(
                    f"{file} differs in {line} from {first}: {compared} and {known}; "
                    "join runs that differ in their seeds or variants alone"
                )
        for record in runs[-1]["tables"]["ends"]:
            if "losses" not in record:
                continue  # the mean over seeds
            seed = int(record["seed"])
            # one that ended elsewhere may not have been finite here
            for variant in {**record["losses"], **record.get("not_finite", {})}:
                if (other := of.setdefault((seed, variant), file)) is not file:
                    raise ValueError(f"{file} has seed {seed} of {variant}, which {other} has too; leave one out")
                variants[variant] = None
            for name in KEPT:
                getattr(joined, name).setdefault(seed, {}).update(record.get(name, {}))
    for name in KEPT:
        setattr(joined, name, dict(sorted(getattr(joined, name).items())))
    return joined, in_order(variants), runs


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
        if found["tables"]["ends"] and found["head"]:
            return found
    except (ValueError, TypeError, LookupError):
        pass
    raise ValueError(f"{file} is not a result of `benchmarks.convergence --json`; leave it out")


def joined_head(files: Sequence[Path], runs: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the head of results that were joined: each line with the values of all, dates and commits by file."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        for line, value in run["head"].items():
            values.setdefault(line, {})[value] = None
    # a text has other names elsewhere
    one = ("command", "training", "text", *(line for line in values if line.startswith(OF_KIND)))
    head = {line: next(iter(of_all)) if line in one else "; ".join(of_all) for line, of_all in values.items()}
    head["command of the first run"] = head["command"]
    each = (
        f"{file.stem} {run['head']['date']}, {run['head'].get('commit')}" for file, run in zip(files, runs, strict=True)
    )
    return head | {"date": max(values["date"]), "runs": "; ".join(each)}


KEPT = ("losses", "held_out", "kinds", "curves", "speeds", "recorded", "not_finite")
"""Of `Findings`, what a result's records have by seed."""


COMPARED = ("GPU", "ranks", "training", "text")
"""Lines of the head that must be alike; results of before have no "text"."""

OF_KIND = "text of "
"""Lines of the head that must be alike where two results have them: texts of other kinds."""


def _compared(head: Mapping[str, str], line: str) -> str | None:
    """A line of the head, in which a digest stands for the text, whatever its folder was called."""
    shown, digest = head.get(line), head.get("text", "").rpartition("digest ")[2]
    if line.startswith(OF_KIND) and shown is not None:
        return shown.rpartition("digest ")[2]
    if shown is None or not digest:
        return shown
    return digest if line == "text" else re.sub(r"(?<=, text of )[^,]*", digest, shown)


def tenths(losses: Sequence[float]) -> list[float]:
    """The mean of each tenth of the steps; of each step, where there are fewer than ten."""
    return [float(np.mean(part)) for part in np.array_split(losses, min(TENTHS, len(losses)))]


def differences(losses: Losses, variant: str, reference: str) -> list[Difference]:
    """Return the differences of each tenth, over the seeds that have both the variant and the reference."""
    both = [by_variant for by_variant in losses.values() if variant in by_variant and reference in by_variant]
    if not both:
        return []
    ratios = [np.divide(tenths(each[variant]), tenths(each[reference])) - 1 for each in both]
    return [Difference.of(of_tenth) for of_tenth in np.transpose(ratios)]


def end_table(found: Findings, variants: Sequence[str]) -> Table:
    """The last tenth, seed by seed, and over all of them."""
    records: list[Record] = []
    for seed in sorted({*found.losses, *found.not_finite}):
        kept = {name: getattr(found, name).get(seed, {}) for name in KEPT}
        records.append(
            {"seed": str(seed), "last": {name: tenths(each)[-1] for name, each in kept["losses"].items()}, **kept}
        )
    over_all: Record = {"seed": "all", "differences": {}}
    of_all = reference_of(variants)
    for name in variants:
        if name != of_all and (course := differences(found.losses, name, of_all)):
            over_all["differences"][name] = course[-1].as_record()
    return Table(
        "ends",
        "The last tenth of the steps",
        [
            Column("seed", lambda r: r["seed"]),
            *(Column(name, lambda r, name=name: _end(r, name, of_all)) for name in variants),
        ],
        [*records, over_all],
        NOTE,
    )


def _end(record: Record, variant: str, reference: str) -> str:
    if "last" not in record:
        return record["differences"].get(variant, {}).get("shown", "")
    last = record["last"]
    if variant in record.get("not_finite", {}):
        return f"not finite at step {record['not_finite'][variant]}"
    if variant not in last:
        return "-"
    if variant == reference or reference not in last:
        return f"{last[variant]:.4f}"
    return f"{last[variant]:.4f} ({100 * (last[variant] / last[reference] - 1):+.2f} %)"


def part_table(found: Findings, variants: Sequence[str]) -> Table:
    """Show the cost of each part: a variant less the one that it is compared with, a row each."""
    records: list[Record] = []
    kinds = _kinds(found)
    for name in variants:
        ended = sum(name in by_variant for by_variant in found.losses.values())
        diverged = sum(name in by_variant for by_variant in found.not_finite.values())
        finite = f"{ended} of {ended + diverged}"
        references = [] if name == BF16 else dict.fromkeys((BF16, base_of(name)))
        for reference in references:
            if reference not in variants:
                continue
            course = differences(found.losses, name, reference)
            records.append(
                {
                    "variant": name,
                    "reference": reference,
                    "last": _recorded(course[-1] if course else None),
                    **{
                        f"held_out_{way}": _recorded(_gap(found.held_out, name, reference, way))
                        for way in ("own", "BF16")
                    },
                    "kinds": {kind: _recorded(_gap(_of_kind(found, kind), name, reference, "own")) for kind in kinds},
                    "finite": finite,
                }
            )
    return Table(
        "parts",
        "What each part changes",
        [
            Column("variant", lambda r: r["variant"]),
            Column("compared with", lambda r: r["reference"]),
            Column("last tenth", lambda r: _shown(r["last"])),
            Column("held out", lambda r: _shown(r["held_out_own"])),
            Column("held out, weights run in BF16", lambda r: _shown(r["held_out_BF16"])),
            *(Column(f"text of {kind}", lambda r, kind=kind: _shown(r["kinds"][kind])) for kind in kinds),
            Column("finite to the end", lambda r: r["finite"]),
        ],
        records,
        "Each variant and the one that it differs from in one part, of the same seed. Held out is text that no run "
        "has trained on, after the last step: computed as the run computes, and by the same weights in plain BF16. "
        "Text of other kinds is computed as the run computes.",
    )


def kind_table(found: Findings, variants: Sequence[str]) -> Table:
    """Compare losses after the last step on what was held out, and on text of each other kind."""
    records: list[Record] = []
    of_all = reference_of(variants)
    for kind, losses in _texts(found).items():
        for way, shown in (("own", ""), (BF16, ", weights run in BF16")):
            of = {name: [each[name][way] for each in losses.values() if name in each] for name in variants}
            gaps = {name: _recorded(_gap(losses, name, of_all, way)) for name in variants if name != of_all}
            mean = {name: float(np.mean(each)) for name, each in of.items() if each}
            records.append({"text": kind + shown, "losses": mean, "differences": gaps})
    return Table(
        "kinds",
        "Loss on each text after the last step",
        [
            Column("text", lambda r: r["text"]),
            Column(of_all, lambda r: _loss(r["losses"].get(of_all))),
            *(Column(name, lambda r, name=name: _shown(r["differences"][name])) for name in variants if name != of_all),
        ],
        records,
        f"The loss of {of_all} is the mean over the seeds; of the others the difference to it, of the same seed, "
        "and its standard error. As the run computes, and by the same weights in plain BF16.",
    )


def forward_table(found: Findings, variants: Sequence[str]) -> Table:
    """Show what a forward in FP8 costs: the same weights run in each way, compared with plain BF16."""
    records: list[Record] = []
    for name in variants:
        for text, losses in _texts(found).items():
            runs = [each[name] for each in losses.values() if name in each]
            ways = dict.fromkeys(way for run in runs for way in run if way not in ("error", BF16))
            if name != BF16 and runs:
                costs = {way: Difference.of([run[way] / run[BF16] - 1 for run in runs if way in run]) for way in ways}
                records.append(
                    {"variant": name, "text": text, "costs": {way: cost.as_record() for way, cost in costs.items()}}
                )
    shown = dict.fromkeys(way for record in records for way in record["costs"])
    return Table(
        "forward",
        "What the rounding of the forward costs",
        [
            Column("trained as", lambda r: r["variant"]),
            Column("text", lambda r: r["text"]),
            *(
                Column(f"run as {'trained' if way == 'own' else way}", lambda r, way=way: _shown(r["costs"].get(way)))
                for way in shown
            ),
        ],
        records,
        "The loss of the same weights after the last step, run as the column says, over that in plain BF16, less one; "
        "the mean over the seeds and its standard error.",
    )


def _loss(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _texts(found: Findings) -> dict[str, Ends]:
    """Return the findings on what was held out, and on text of each other kind, by its name."""
    return {HELD_OUT: found.held_out, **{kind: _of_kind(found, kind) for kind in _kinds(found)}}


def _kinds(found: Findings) -> list[str]:
    """The names of the texts of other kinds."""
    ends = (by_kind for by_variant in found.kinds.values() for by_kind in by_variant.values())
    return list(dict.fromkeys(kind for by_kind in ends for kind in by_kind))


def _of_kind(found: Findings, kind: str) -> Ends:
    """Return the findings on text of one kind, in the form of `Findings.held_out`."""
    return {
        seed: {name: by_kind[kind] for name, by_kind in by_variant.items() if kind in by_kind}
        for seed, by_variant in found.kinds.items()
    }


def _gap(losses: Ends, variant: str, reference: str, way: str) -> Difference | None:
    ratios = [
        by_variant[variant][way] / by_variant[reference][way] - 1
        for by_variant in losses.values()
        if variant in by_variant and reference in by_variant
    ]
    return Difference.of(ratios) if ratios else None


def _recorded(difference: Difference | None) -> Record | None:
    return None if difference is None else difference.as_record()


def _shown(record: Record | None) -> str:
    return "-" if record is None else record["shown"]


def course_table(losses: Losses, variants: Sequence[str]) -> Table:
    """The mean difference of each tenth."""
    of_all = reference_of(variants)
    of = {name: differences(losses, name, of_all) for name in variants if name != of_all}
    steps = max((len(each) for by_variant in losses.values() for each in by_variant.values()), default=0)
    ends = np.cumsum([len(part) for part in np.array_split(range(steps), min(TENTHS, steps) or 1)])
    records = [
        {
            "steps": f"{begin + 1} to {end}",
            "differences": {name: str(found[index]) for name, found in of.items() if index < len(found)},
        }
        for index, (begin, end) in enumerate(zip([0, *ends], ends, strict=False))
    ]
    return Table(
        "course",
        f"Difference to {of_all} on the way, the mean over seeds",
        [
            Column("steps", lambda r: r["steps"]),
            *(Column(name, lambda r, name=name: r["differences"].get(name, "-")) for name in of),
        ],
        records,
    )


def in_order(labels: Iterable[str]) -> list[str]:
    """Labels of variants as tables have them: those of `VARIANTS` first."""
    labels = list(labels)
    known = [variant.label for variant in VARIANTS.values() if variant.label in labels]
    return known + [label for label in labels if label not in known]


def _way(found: Findings, variant: str, reference: str) -> dict[float, tuple[float, float]]:
    """Return the difference on held-out text in percent, and its error, after so many millions of tokens."""
    ratios: dict[float, list[float]] = {}
    for by_variant in found.curves.values():
        one, other = (by_variant.get(name, {}).get(HELD_OUT, []) for name in (variant, reference))
        of_reference = {tokens: loss for tokens, loss, _ in other}
        for tokens, loss, _ in one:
            if tokens in of_reference:
                ratios.setdefault(1e-6 * tokens, []).append(loss / of_reference[tokens] - 1)
    return {tokens: Difference.of(each).in_percent for tokens, each in sorted(ratios.items())}


def plot(stem: Path, found: Findings, variants: Sequence[str], title: str) -> list[str]:
    """Draw the differences to BF16 over the tenths, on held-out text on the way, and at the end with text of other
    kinds, as `stem` + suffixes.

    Returns:
        the names of the files that have something to show.
    """
    of_all = reference_of(variants)
    percent = f"loss over that of {of_all}, %"
    drawn = []
    lines = {
        name: course for name in variants if name != of_all and (course := differences(found.losses, name, of_all))
    }
    if lines:
        drawn.append(f"{stem.name}.png")
        plot_differences(
            stem.with_name(drawn[-1]),
            title=title,
            x_label="tenth of the steps",
            y_label=percent,
            lines={
                name: {tenth: each.in_percent for tenth, each in enumerate(course, 1)} for name, course in lines.items()
            },
        )
    ways = {name: way for name in lines if len(way := _way(found, name, of_all)) > 1}
    if ways:
        drawn.append(f"{stem.name}-held-out.png")
        plot_differences(
            stem.with_name(drawn[-1]), title=title, x_label="M tokens", y_label=f"held-out {percent}", lines=ways
        )
    ends = {
        text: gaps
        for text, losses in _texts(found).items()
        if (gaps := {name: each for name in lines if (each := _gap(losses, name, of_all, "own"))})
    }
    if ends:
        drawn.append(f"{stem.name}-end.png")
        kinds = {"last tenth": {name: course[-1] for name, course in lines.items()}, **ends}
        plot_points(
            stem.with_name(drawn[-1]),
            title=title,
            x_label=percent,
            kinds={kind: {name: each.in_percent for name, each in of.items()} for kind, of in kinds.items()},
        )
    return drawn
