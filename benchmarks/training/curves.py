"""The loss on text that no run trains on, on the way, and the tokens and the time to an equal loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from benchmarks.harness.results import Column, Record, Table
from benchmarks.training.convergence import Findings
from benchmarks.training.differences import Difference
from benchmarks.training.runs import HELD_OUT, Point
from benchmarks.training.samples import recorded_table
from benchmarks.training.variants import reference_of


def timed_tables(found: Findings, variants: Sequence[str]) -> list[Table]:
    """The tables of runs that were evaluated or recorded on the way; none of those that were not."""
    tables = [equal_loss_table(found, variants), curve_table(found, variants)]
    runs = [
        (f"seed {seed}, {name}", by_variant[name])
        for seed, by_variant in found.recorded.items()
        for name in variants
        if name in by_variant
    ]
    return [table for table in [*tables, recorded_table(runs)] if table.records]


def curve_table(found: Findings, variants: Sequence[str]) -> Table:
    """Show the loss of BF16 on each text after so many tokens, and the differences to it."""
    of_all = reference_of(variants)
    points = {
        (seed, name, text, tokens): (loss, error)
        for seed, by_variant in found.curves.items()
        for name, by_text in by_variant.items()
        for text, curve in by_text.items()
        if len(curve) > 1
        for tokens, loss, error in curve
    }
    records: list[Record] = []
    for text, tokens in dict.fromkeys((text, tokens) for _, _, text, tokens in points):
        losses = {
            name: {seed: points[key] for seed in found.curves if (key := (seed, name, text, tokens)) in points}
            for name in variants
        }
        reference = losses.get(of_all, {})
        gaps = {
            name: Difference.of(both).as_record()
            for name, of_seed in losses.items()
            if name != of_all
            if (both := [loss / reference[seed][0] - 1 for seed, (loss, _) in of_seed.items() if seed in reference])
        }
        mean = [float(value) for value in np.mean(list(reference.values()), axis=0)] if reference else None
        records.append({"text": text, "tokens": tokens, "reference": mean, "differences": gaps})
    return Table(
        "curves",
        "Loss on each text on the way",
        [
            Column("text", lambda r: r["text"]),
            Column("M tokens", lambda r: f"{1e-6 * r['tokens']:.4g}"),
            Column(of_all, lambda r: "-" if r["reference"] is None else "{:.4f} ± {:.4f}".format(*r["reference"])),
            *(
                Column(name, lambda r, name=name: r["differences"].get(name, {}).get("shown", "-"))
                for name in variants
                if name != of_all
            ),
        ],
        records,
        f"The loss of {of_all} is the mean over the seeds; after ± is its standard error over the text, which all runs "
        "share. Of the others the difference to it, of the same seed; after ± is the standard error over the seeds.",
    )


def equal_loss_table(found: Findings, variants: Sequence[str]) -> Table:
    """Show what each variant needs for the loss of BF16: tokens and time, compared with BF16's."""
    records: list[Record] = []
    of_all = reference_of(variants)
    for name in variants:
        rows = [
            each
            for by_variant, speeds in ((curves, found.speeds.get(seed, {})) for seed, curves in found.curves.items())
            if name != of_all and name in by_variant and of_all in by_variant
            if (each := _of_seed(by_variant[name], by_variant[of_all], speeds.get(name), speeds.get(of_all)))
        ]
        if rows:
            records.append(
                {
                    "variant": name,
                    "seeds": len(rows),
                    "tokens needed": [row["needed"] for row in rows],
                    "minutes needed": [row["minutes"] for row in rows if "minutes" in row],
                    **{
                        key: Difference.of(values).as_record()
                        for key in ("loss", "tokens", "speed", "time")
                        if (values := [row[key] for row in rows if key in row])
                    },
                }
            )
    return Table(
        "equal loss",
        "Tokens and time to an equal loss",
        [
            Column("variant", lambda r: r["variant"]),
            Column("seeds", lambda r: str(r["seeds"])),
            Column("M tokens, and BF16's", lambda r: _means(r["tokens needed"], 1e-6)),
            Column("minutes, and BF16's", lambda r: _means(r["minutes needed"], 1)),
            *(
                Column(title, lambda r, key=key: r.get(key, {}).get("shown", "-"))
                for key, title in {
                    "loss": "held-out loss",
                    "tokens": "tokens to equal loss",
                    "speed": "tokens/s",
                    "time": "time to equal loss",
                }.items()
            ),
        ],
        records,
        f"Compared with {of_all} of the same seed; after ± is the standard error over the seeds. The equal loss is the "
        "higher one of both runs' last losses on held-out text, which both reach: the tokens at which each does, once "
        "and for all, lie on straight lines between its evaluations. The learning rate falls towards the end, and a "
        "loss with it: a run that was planned for fewer tokens would reach the loss earlier. The speed is the median "
        "of training, without evaluations; it tells of a variant where runs do not share a GPU.",
    )


def _means(pairs: Sequence[tuple[float, float]], factor: float) -> str:
    return ", ".join(f"{factor * mean:.4g}" for mean in np.mean(pairs, axis=0)) if pairs else "-"


def _of_seed(
    curves: dict[str, list[Point]], references: dict[str, list[Point]], speed: float | None, of_bf16: float | None
) -> Record | None:
    """One variant over BF16, less one each, and what both need; None where no curve reaches back to the equal loss."""
    curve, reference = curves.get(HELD_OUT, []), references.get(HELD_OUT, [])
    if not curve or not reference:
        return None
    equal = max(curve[-1][1], reference[-1][1])
    needed, by_bf16 = tokens_to(equal, curve), tokens_to(equal, reference)
    if needed is None or by_bf16 is None:
        return None
    found: Record = {"loss": curve[-1][1] / reference[-1][1] - 1, "tokens": needed / by_bf16 - 1}
    found["needed"] = needed, by_bf16
    if speed and of_bf16:
        found |= {"speed": speed / of_bf16 - 1, "time": needed / by_bf16 * of_bf16 / speed - 1}
        found["minutes"] = needed / speed / 60, by_bf16 / of_bf16 / 60
    return found


def tokens_to(loss: float, curve: Sequence[Point]) -> float | None:
    """Return the tokens after which a curve stays at or below a loss; None where it does from its first point, or not.

    Between two points the curve is a straight line.
    """
    above = [index for index, (_, each, _) in enumerate(curve) if each > loss]
    if not above or above[-1] == len(curve) - 1:
        return None
    (before, high, _), (after, low, _) = curve[above[-1] : above[-1] + 2]
    return before + (after - before) * (high - loss) / (high - low)
