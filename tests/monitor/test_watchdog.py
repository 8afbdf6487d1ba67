"""What is worth a warning is warned of once, with the tensor and a remedy."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable, Iterable

import numpy as np
import pytest

from fp8booster.monitor.watchdog import Course, Warnings, Watchdog
from tests.monitor.test_sinks import row


def test_a_sound_tensor_is_not_warned_of() -> None:
    assert Warnings(Watchdog()).of([row(1), row(50)]) == []


@pytest.mark.parametrize(
    ("figures", "says"),
    [
        ({"saturated": 0.02}, "2.00% of its values are clipped at the largest of e4m3"),
        ({"flushed": 0.4}, 'scaling="rowwise"'),
        ({"flushed": 0.4, "role": "output gradient"}, "formats=Formats(gradient=torch.float8_e5m2)"),
        ({"flushed": 0.4, "role": "message"}, "messages=Encoding()"),
        ({"flushed": 0.4, "role": "output gradient", "format": "e5m2"}, "in e5m2; give each row its scale"),
        ({"flushed": 0.4, "role": "first moment"}, "take torch.optim.AdamW"),
        ({"flushed": 0.4, "role": "second moment"}, "take torch.optim.AdamW"),
        ({"flushed": 0.4, "role": "saved activation"}, 'Activations(saved="16-bit")'),
        ({"flushed": 0.4, "role": "gradient sum"}, 'gradient_accumulation="16-bit"'),
        ({"non_finite": 7}, "7 values are NaN or infinite; the weight itself"),
        ({"non_finite": 7, "role": "input"}, "what computes it overflowed"),
        ({"non_finite": 7, "role": "output gradient"}, "it overflowed in backward"),
    ],
)
def test_a_figure_beyond_its_threshold_is_warned_of_once(figures, says) -> None:
    warnings = Warnings(Watchdog())
    (sentence,) = warnings.of([row(50, **figures)])
    assert sentence.startswith(f"Step 50, {figures.get('role', 'weight')} of layers.0: ")
    assert says in sentence
    assert warnings.of([row(100, **figures)]) == []


def test_a_figure_at_its_threshold_is_not_warned_of() -> None:
    rules = Watchdog(saturated=0.25, flushed=0.5, weight_growth=2.0)
    warnings = Warnings(rules)
    assert warnings.of([row(step, amax=1.0) for step in range(6)]) == []
    assert warnings.of([row(step, saturated=0.25, flushed=0.5, amax=2.0) for step in (6, 7)]) == []
    warnings = Warnings(rules)
    assert warnings.of([row(step, amax=1.0) for step in range(6)]) == []
    assert len(warnings.of([row(step, saturated=0.26, flushed=0.51, amax=2.01) for step in (6, 7)])) == 3


def test_each_kind_role_and_layer_is_warned_of_once() -> None:
    warnings = Warnings(Watchdog())
    bad = [row(1, flushed=0.4), row(1, flushed=0.4, role="input"), row(1, flushed=0.4, layer="layers.1")]
    assert len(warnings.of(bad)) == 3
    assert warnings.of(bad) == []
    (sentence,) = warnings.of([row(2, flushed=0.4, saturated=0.02)])
    assert "are clipped" in sentence


def warned_at(amax: Callable[[int], float], steps: Iterable[int], rules: Watchdog | None = None) -> list[int]:
    """The sampled steps in which there is a warning of a weight with these amaxes."""
    warnings = Warnings(rules or Watchdog())
    return [step for step in steps if warnings.of([row(step, amax=amax(step))])]


def sampled(every: int, last: int = 5000) -> list[int]:
    return [1, *range(every, last + 1, every)] if every > 1 else list(range(1, last + 1))


NORMAL = {
    "constant": lambda t: 0.1,
    "as a root": lambda t: t**0.5,
    "linear from zero": lambda t: t,
    "with warm-up from zero": lambda t: t * t,
    "warm-up from initial values, then linear": lambda t: (
        0.1 + 1e-3 * min(t, 1000) ** 2 / 2000 + 1e-3 * max(0, t - 1000)
    ),
    "saturates": lambda t: 0.1 + 2 * (1 - math.exp(-t / 300)),
    "decays, then learns again": lambda t: 1 - 0.5 * min(t, 2500) / 2500 + 0.5 * max(0, t - 2500) / 2500,
    "one value that is broken": lambda t: 100.0 if t == 3000 else 1.0,
}


@pytest.mark.parametrize("every", [1, 10, 50, 300])
@pytest.mark.parametrize("course", NORMAL)
def test_a_weight_that_grows_as_a_power_of_the_steps_is_not_warned_of(course, every) -> None:
    noise = random.Random(0)
    assert warned_at(lambda step: NORMAL[course](step) * math.exp(noise.gauss(0, 0.05)), sampled(every)) == []


@pytest.mark.parametrize("every", [109, 305, 1526, 2000])
def test_a_weight_that_grows_over_most_of_the_run_so_far_is_not_warned_of_however_few_the_samples(every) -> None:
    # four times as large after three times the steps, as one of 58 M parameters that learned for 1 B tokens
    def amax(step: int) -> float:
        return 0.125 + 0.4 * min(max(step - 3052, 0), 6104) / 6104

    assert warned_at(amax, sampled(every, 30_520)) == []


@pytest.mark.parametrize("every", [1, 10, 50])
@pytest.mark.parametrize("before", ["constant", "as a root", "with warm-up from zero", "saturates"])
@pytest.mark.parametrize("rate", [0.005, 0.02])
def test_a_weight_that_grows_by_a_factor_a_step_is_warned_of_before_it_is_eight_times_as_large(
    rate, before, every
) -> None:
    begins = 2000

    def amax(step: int) -> float:
        return NORMAL[before](min(step, begins)) * math.exp(rate * max(0, step - begins))

    (warned, *others) = warned_at(amax, sampled(every, begins + 1000))
    eightfold = begins + math.log(8) / rate
    assert begins + math.log(3) / rate < warned < eightfold + 2 * every
    assert others == []  # but once


@pytest.mark.parametrize("power", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("intervals", [(1, 100), (5, 50), (10, 1000), (50, 5), (100, 1)])
def test_an_interval_that_changes_at_a_resume_gives_no_warning(intervals, power) -> None:
    before, after = intervals
    steps = [*(step for step in sampled(before) if step <= 500), *(step for step in sampled(after) if step > 500)]
    assert warned_at(lambda step: step**power, steps) == []
    # and none after steps that were not recorded
    assert warned_at(lambda step: step**power, [step for step in steps if not 300 < step <= 4000]) == []


@pytest.mark.parametrize("power", [0.3, 2.0])
def test_steps_that_are_taken_again_from_a_checkpoint_give_no_warning(power) -> None:
    steps = [*range(10, 1001, 10), *range(310, 2001, 10)]
    assert warned_at(lambda step: step**power, steps) == []
    course, last = Course(), None
    for step in steps:
        last = course.growth(step, step**power)
    assert last is not None  # it is judged again behind the steps that were taken before
    assert last < 1.1


@pytest.mark.parametrize("intervals", [(5, 50), (50, 5), (100, 1)])
def test_a_weight_that_diverges_is_warned_of_after_an_interval_has_changed(intervals) -> None:
    before, after = intervals
    steps = [*(step for step in sampled(before) if step <= 1000), *(step for step in sampled(after) if step > 1000)]
    (warned,) = warned_at(lambda step: step**0.5 * math.exp(0.01 * max(0, step - 2000)), steps)
    assert 2000 + math.log(3) / 0.01 < warned < 2000 + math.log(8) / 0.01 + 2 * after


def test_samples_of_before_are_warned_of_where_other_thresholds_let_them_pass() -> None:
    bad = [row(step, flushed=0.4) for step in (1, 5, 10)]
    for since, count in ((0, 0), (7, 0), (10, 1)):
        warnings = Warnings(Watchdog())
        warnings.resume(bad, since)
        assert len(warnings.of([row(15, flushed=0.4)])) == count


def test_each_weight_has_its_own_course() -> None:
    warnings = Warnings(Watchdog())
    for step in range(8):
        rows = [row(step, amax=1.0), row(step, amax=100.0, layer="layers.1"), row(step, amax=8.0**step, role="input")]
        assert warnings.of(rows) == []
    found = [
        sentence for step in (8, 9) for sentence in warnings.of([row(step, amax=4.0), row(step, layer="layers.1")])
    ]
    assert [sentence.partition(":")[0] for sentence in found] == ["Step 9, weight of layers.0"]
    assert "4, is 4.0 times as large as its course so far leads to" in found[0]


def test_a_weight_of_zeros_has_no_course_until_it_is_learned() -> None:
    assert warned_at(lambda step: max(0.0, step - 10.0), range(1, 400)) == []


def test_the_memory_of_a_course_is_bounded_and_spread_over_the_run() -> None:
    course = Course()
    for step in range(10_000):
        course.growth(step, 1.0 + step)
    values = course._values
    assert len(values) <= 65
    gaps = {after - before for before, after in itertools.pairwise(values)}
    assert values[0] == 1.0
    assert values[-1] > 9_500
    assert len(gaps) == 1


def test_thresholds_are_written_as_json() -> None:
    rules = Watchdog(saturated=None, flushed=np.float32(0.5), weight_growth=math.inf)
    assert json.dumps(rules.thresholds, allow_nan=False) == (
        '{"saturated": null, "flushed": 0.5, "weight_growth": null}'
    )


def test_a_threshold_of_none_is_never_reached() -> None:
    rules = Watchdog(saturated=None, flushed=None, weight_growth=None)
    assert Warnings(rules).of([row(1), row(2, saturated=1.0, flushed=1.0)]) == []
    assert warned_at(lambda step: 9.0**step, range(20), rules) == []


def test_of_many_tensors_the_first_are_named_and_the_others_counted() -> None:
    sentences = Warnings(Watchdog()).of([row(1, layer=f"layers.{number}", flushed=0.9) for number in range(40)])
    assert len(sentences) == 6
    assert [sentence.split(":")[0] for sentence in sentences[:5]] == [
        f"Step 1, weight of layers.{number}" for number in range(5)
    ]
    assert sentences[-1].startswith("35 other tensors")
    assert len(Warnings(Watchdog()).of([row(1, layer=f"layers.{number}", flushed=0.9) for number in range(5)])) == 5


@pytest.mark.parametrize(
    "options", [{"on_nonfinite": "stop"}, {"saturated": 2.0}, {"flushed": -1}, {"weight_growth": 0.5}]
)
def test_a_rule_that_is_none_is_refused(options) -> None:
    with pytest.raises(ValueError, match=f"Watchdog.{next(iter(options))} is .*; use "):
        Watchdog(**options)
