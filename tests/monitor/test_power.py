from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8booster.monitor.power import Draw, PowerMeter, Sample, draw_of, parse


@pytest.mark.parametrize(
    ("line", "sample"),
    [
        ("1485, 689.96, 0x0000000000000004\n", Sample(2.0, 1485, 689.96, True)),
        ("1980, 311.51, 0x0000000000000000\n", Sample(2.0, 1980, 311.51, False)),
        ("345, 76.21, 0x0000000000000001\n", Sample(2.0, 345, 76.21, False)),  # idle
        ("1200, 699.00, 0x0000000000000084\n", Sample(2.0, 1200, 699.0, True)),  # the hardware's brake too
        ("[N/A], 76.21, 0x0000000000000001\n", None),
        ("No devices were found\n", None),
    ],
)
def test_lines_of_nvidia_smi(line: str, sample: Sample | None) -> None:
    assert parse(line, 2.0) == sample


def test_a_draw_is_of_its_samples() -> None:
    samples = [Sample(0, 1500, 600, True), Sample(1, 1400, 700, True), Sample(2, 1900, 500, False)]
    assert draw_of(samples) == Draw(1500, 600, pytest.approx(2 / 3))
    assert draw_of([]) is None


@pytest.fixture
def smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder at the head of PATH, and a GPU that torch tells of."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="a-b"))
    return tmp_path / "nvidia-smi"


def test_samples_of_a_span_are_those_that_came_in_it(smi: Path) -> None:
    smi.write_text('#!/bin/sh\necho "$@" > "$0.arguments"\nwhile sleep 0.02; do echo 1500, 600.0, 0x4; done\n')
    smi.chmod(0o755)
    with PowerMeter(torch.device("cuda")) as meter:
        begin = time.perf_counter()
        deadline = begin + 20
        while meter.draw(begin, deadline) is None and time.perf_counter() < deadline:
            time.sleep(0.01)
        end = time.perf_counter()
    assert meter.draw(begin, end) == Draw(1500, 600, 1)
    assert meter.draw(begin - 2, begin - 1) is None
    arguments = smi.with_name("nvidia-smi.arguments").read_text()
    assert "GPU-a-b" in arguments
    assert "clocks.sm,power.draw.instant,clocks_event_reasons.active" in arguments


def test_a_driver_that_does_not_answer_gives_no_samples(smi: Path) -> None:
    smi.write_text("#!/bin/sh\necho Field is not a valid field to query.\nexit 2\n")
    smi.chmod(0o755)
    with PowerMeter(torch.device("cuda")) as meter:
        pass
    assert meter.draw(0, time.perf_counter()) is None


def test_without_nvidia_smi_there_are_no_samples(smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(smi.parent))
    with PowerMeter(torch.device("cuda")) as meter:
        pass
    assert meter.draw(0, time.perf_counter()) is None


def test_the_cpu_is_not_asked() -> None:
    with PowerMeter(torch.device("cpu")) as meter:
        pass
    assert meter.draw(0, time.perf_counter()) is None
