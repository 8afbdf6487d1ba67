"""What is worth a warning is warned of once, with the tensor and a remedy."""

from __future__ import annotations

import pytest

from fp8booster.monitor.watchdog import Warnings, Watchdog
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
    rules = Watchdog(saturated=0.25, flushed=0.5, outlier_growth=2.0)
    warnings = Warnings(rules)
    assert warnings.of([row(1, outlier=4.0), row(5, saturated=0.25, flushed=0.5, outlier=8.0)]) == []
    assert len(warnings.of([row(10, saturated=0.26, flushed=0.51, outlier=8.5)])) == 3


def test_each_kind_role_and_layer_is_warned_of_once() -> None:
    warnings = Warnings(Watchdog())
    bad = [row(1, flushed=0.4), row(1, flushed=0.4, role="input"), row(1, flushed=0.4, layer="layers.1")]
    assert len(warnings.of(bad)) == 3
    assert warnings.of(bad) == []
    (sentence,) = warnings.of([row(2, flushed=0.4, saturated=0.02)])
    assert "are clipped" in sentence


def test_an_outlier_is_compared_with_the_first_of_its_own_role_and_layer() -> None:
    warnings = Warnings(Watchdog(outlier_growth=2.0))
    first = [row(1, outlier=1.0), row(1, outlier=5.0, role="input"), row(1, outlier=9.0, layer="layers.1")]
    assert warnings.of(first) == []
    assert warnings.of([row(5, outlier=9.0, role="input"), row(5, outlier=17.0, layer="layers.1")]) == []
    assert len(warnings.of([row(10, outlier=11.0, role="input"), row(10, outlier=19.0, layer="layers.1")])) == 2


def test_codes_without_one_scale_have_no_outliers() -> None:
    warnings = Warnings(Watchdog(outlier_growth=2.0))
    assert warnings.of([row(1, outlier=1.0, scale=None), row(5, outlier=99.0, scale=None)]) == []


def test_an_outlier_that_grows_is_warned_of() -> None:
    warnings = Warnings(Watchdog(outlier_growth=8.0))
    assert warnings.of([row(1, outlier=5.0)]) == []
    assert warnings.of([row(50, outlier=40.0)]) == []
    (sentence,) = warnings.of([row(100, outlier=1000.0)])
    assert "1000 times its root mean square, 5 times at first" in sentence


def test_a_threshold_of_none_is_never_reached() -> None:
    rules = Watchdog(saturated=None, flushed=None, outlier_growth=None)
    assert Warnings(rules).of([row(1), row(2, saturated=1.0, flushed=1.0, outlier=1e9)]) == []


def test_of_many_tensors_the_first_are_named_and_the_others_counted() -> None:
    sentences = Warnings(Watchdog()).of([row(1, layer=f"layers.{number}", flushed=0.9) for number in range(40)])
    assert len(sentences) == 6
    assert [sentence.split(":")[0] for sentence in sentences[:5]] == [
        f"Step 1, weight of layers.{number}" for number in range(5)
    ]
    assert sentences[-1].startswith("35 other tensors")
    assert len(Warnings(Watchdog()).of([row(1, layer=f"layers.{number}", flushed=0.9) for number in range(5)])) == 5


@pytest.mark.parametrize(
    "options", [{"on_nonfinite": "stop"}, {"saturated": 2.0}, {"flushed": -1}, {"outlier_growth": 0.5}]
)
def test_a_rule_that_is_none_is_refused(options) -> None:
    with pytest.raises(ValueError, match=f"Watchdog.{next(iter(options))} is .*; use "):
        Watchdog(**options)
