"""Rules by which what was recorded is worth a warning, before the loss shows it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import isinf

import numpy as np

from fp8booster.argument_types import require_types
from fp8booster.monitor.scales import MOMENTS, SAVED, SUM, ScaleRow

ON_NONFINITE = ("raise", "skip", "warn")

_MOST = 5
"""Warnings of a step that are given in full."""

_FEWEST = 5
"""Samples of a course that tell where it leads."""

_KEPT = 64
"""Samples of a course, so that a long run costs no more."""

_REACH = 1.5
"""Times the last step of a course within which it tells where it leads; the two samples after the first five are."""


@dataclass(frozen=True, kw_only=True)
class Watchdog:
    """Thresholds of warnings, and what happens to a step whose gradients are not finite.

    Raises:
        ValueError: a field has a value that is not allowed.
        TypeError: a field has the wrong type.
    """

    on_nonfinite: str = "raise"
    """What `Recording.allows_step` does with such a step on all ranks: "raise", "skip" it, or "warn" and take it."""

    saturated: float | None = 0.001
    """Warn where a larger share of a tensor's values is clipped; None: never. Real-time scales clip none."""

    flushed: float | None = 0.25
    """Warn where a larger share of a tensor's nonzero values becomes zero; None: never."""

    weight_growth: float | None = 3.0
    """Warn where a weight's amax is more than this factor above its own course so far (`Course`); None: never."""

    @property
    def thresholds(self) -> dict[str, float | None]:
        """Return those of warnings by their names, as JSON holds them, which has no infinity."""
        given = {"saturated": self.saturated, "flushed": self.flushed, "weight_growth": self.weight_growth}
        return {name: None if value is None or isinf(value) else float(value) for name, value in given.items()}

    def __post_init__(self) -> None:
        require_types(Watchdog, vars(self), "Watchdog.")
        if self.on_nonfinite not in ON_NONFINITE:
            choices = " or ".join(map(repr, ON_NONFINITE))
            raise ValueError(f"Watchdog.on_nonfinite is {self.on_nonfinite!r}; use {choices}")
        for name, least, most in (("saturated", 0, 1), ("flushed", 0, 1), ("weight_growth", 1, float("inf"))):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"Watchdog.{name} is {value!r}; use a number from {least} to {most}, or None")


class Course:
    """The samples of a figure of one tensor, and how far the last two are above what those before lead to.

    A figure that grows as any power of the steps, as weights do when a model begins to learn, has grown by the same
    factor in each doubling of the steps: that of the last doubling is expected once more. One that grows by a factor a
    step, as before a run diverges, leaves that behind.
    """

    def __init__(self) -> None:
        self._steps: list[int] = []
        self._values: list[float] = []
        self._apart = 0
        self._last: float | None = None

    def growth(self, step: int, value: float) -> float | None:
        """Add the sample of a step, above 0; return the less of the last two over what was expected of each.

        None for the first ones, and after steps without samples, which leave nothing to expect.
        """
        before, self._last = self._last, self._over(step, value)
        if not self._steps or step - self._steps[-1] >= self._apart:
            self._steps.append(step)
            self._values.append(value)
            if len(self._values) > _KEPT:
                # of every second one, so that those that are left are spread over the whole run
                del self._steps[1::2], self._values[1::2]
                self._apart = self._steps[-1] - self._steps[-2]
        return None if before is None or self._last is None else min(before, self._last)

    def _over(self, step: int, value: float) -> float | None:
        """Return a value over what was expected of it."""
        # a run that goes back to a checkpoint gives steps again
        if len(self._values) < _FEWEST or not self._steps[-1] < step <= _REACH * self._steps[-1]:
            return None
        steps, values = [*self._steps, step], [*self._values, value]
        # step 1 is sampled in place of step 0: an interval before the second sample
        steps[0] = max(0, min(steps[0], 2 * steps[1] - steps[2]))
        # evenly over the steps, for a resumed run may sample at another interval; a multiple of four intervals
        quarters = len(steps) // 4
        evenly = np.interp(np.linspace(steps[0], step, 4 * quarters + 1), steps, values)
        # medians, over all steps and over the first half, stand for a half and a quarter of the steps: of this one too,
        # or it would be compared with less than half where samples are few
        half, quarter = float(np.median(evenly)), float(np.median(evenly[: 2 * quarters + 1]))
        return value / (half * max(1.0, half / quarter))


class Warnings:
    """Finds what is worth a warning, each but once for a tensor.

    Args:
        rules: the thresholds.
    """

    def __init__(self, rules: Watchdog) -> None:
        self._rules = rules
        self._courses: defaultdict[str, Course] = defaultdict(Course)
        self._given: set[tuple[str, str, str]] = set()

    def of(self, rows: Iterable[ScaleRow]) -> list[str]:
        """Return sentences about the tensors of a sampled step."""
        found = []
        for row in rows:
            for kind, sentence in self._of_tensor(row):
                # a tensor that is bad stays so: one sentence and not one in each sample
                if (row.layer, row.role, kind) not in self._given:
                    self._given.add((row.layer, row.role, kind))
                    found.append(f"Step {row.step}, {row.role} of {row.layer}: {sentence}.")
        if len(found) > _MOST:
            found[_MOST:] = [f"{len(found) - _MOST} other tensors of this step are as bad; the records have them."]
        return found

    def resume(self, rows: Iterable[ScaleRow], since: int) -> None:
        """Go on from samples of before, of which those after step `since` were warned of by the same thresholds."""
        for row in rows:
            # the courses take all of them
            kinds = [kind for kind, _ in self._of_tensor(row)]
            if row.step > since:
                self._given |= {(row.layer, row.role, kind) for kind in kinds}

    def _of_tensor(self, row: ScaleRow) -> Iterator[tuple[str, str]]:
        rules = self._rules
        if row.non_finite:
            yield "non-finite", f"{row.non_finite} values are NaN or infinite; {remedy_of_nonfinite(row.role)}"
        if rules.saturated is not None and row.saturated > rules.saturated:
            yield (
                "saturated",
                f"{row.saturated:.2%} of its values are clipped at the largest of {row.format}; real-time scales "
                "(the default) clip none",
            )
        if rules.flushed is not None and row.flushed > rules.flushed:
            yield "flushed", f"{row.flushed:.0%} of its nonzero values become zero in {row.format}; {_wider(row)}"
        # a weight does not change with the batch, so its course is smooth; activations and gradients jump
        if row.role == "weight" and row.amax > 0:
            growth = self._courses[row.layer].growth(row.step, row.amax)
            if rules.weight_growth is not None and growth is not None and growth > rules.weight_growth:
                yield (
                    "growth",
                    f"its largest value, {row.amax:.3g}, is {growth:.1f} times as large as its course so far leads to, "
                    "as before a run diverges; lower lr, or raise the weight decay, from a checkpoint of before",
                )


def _wider(row: ScaleRow) -> str:
    """Return a remedy that gives small values of a tensor more room."""
    apart = 'give each row its scale (FP8Config(scaling="rowwise")), or leave this layer in 16 bits (layers=...)'
    if row.role == "output gradient" and row.format == "e4m3":
        return f"take formats=Formats(gradient=torch.float8_e5m2), which experts in grouped products do not, {apart}"
    if row.role in MOMENTS:
        return "take torch.optim.AdamW, whose moments are in FP32"
    if row.role == SAVED:
        return 'save in 16 bits (FP8Config(activations=Activations(saved="16-bit")))'
    if row.role == SUM:
        return 'add up in 16 bits (FP8Config(gradient_accumulation="16-bit"))'
    if row.role == "message":
        return "scale by blocks (FP8Config(messages=Encoding()))"
    return apart


def remedy_of_nonfinite(role: str) -> str:
    """Return a remedy for a tensor that is not finite. A cast makes none of what was finite."""
    if role == "weight":
        return "the weight itself is broken, and stays so: resume from a checkpoint of before, with a lower lr"
    if role == "input":
        return "what computes it overflowed or read such a value: lower lr, clip gradients (max_norm), or use BF16"
    return "it overflowed in backward: lower lr or the loss scale, or clip gradients (max_norm)"
