from __future__ import annotations

from pathlib import Path

import pytest

from fp8booster.cli.metrics import MetricsLog, StepMetrics, read_metrics


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the figures of nine steps."""
    log = MetricsLog(tmp_path, 0)
    for step in range(1, 10):
        log.write(
            StepMetrics(
                step=step,
                loss=1.0,
                lr=1e-3,
                grad_norm=1.0,
                tokens_per_second=1.0,
                seconds=1.0,
                peak_memory=1,
                wire_bytes=1,
            )
        )
    log.close()
    return tmp_path


def test_a_resumed_run_drops_the_steps_that_it_takes_again(folder):
    MetricsLog(folder, 3).close()
    assert [line.step for line in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]


@pytest.mark.parametrize("line", ["{}", "nan", '{"step": 1}'])
def test_a_line_of_figures_that_is_wrong_is_named(folder, line):
    file = folder / "metrics.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines[:2], line, *lines[3:]]) + "\n")
    with pytest.raises(ValueError, match=r"Line 3 of .*metrics\.jsonl .*; put it right, or move the file away"):
        read_metrics(file)
