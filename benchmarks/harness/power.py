"""Clock and power of a GPU while something runs, as nvidia-smi samples them.

Where power limits the clock, a step that leaves out waiting and copying runs its products more slowly: what counts then
is energy.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

PERIOD_MS = 50
_QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
_POWER_LIMIT = 0x4 | 0x80
"""Bits of the reasons for a lower clock: the software's power limit, and the hardware's brake (nvml.h:
nvmlClocksEventReasonSwPowerCap, nvmlClocksThrottleReasonHwPowerBrakeSlowdown)."""


class Sample(NamedTuple):
    """One moment of a GPU."""

    seconds: float
    """Of `time.perf_counter`."""

    mhz: float
    watts: float
    limited: bool
    """Power holds the clock down."""


class Draw(NamedTuple):
    """The power and clock of a GPU over a span of time."""

    mhz: float
    """Median clock of its processors."""

    watts: float
    """Mean power."""

    limited: float
    """Share of the time in which power held the clock down."""


class PowerMeter:
    """Samples a GPU from `with` on, in a process and a thread of its own, which cost the measured program nothing.

    Args:
        device: which; of any other than a CUDA device, and where nvidia-smi does not answer, there are no samples.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._samples: list[Sample] = []
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> PowerMeter:
        if self._device.type == "cuda":
            gpu = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            command = ["nvidia-smi", "-i", gpu, f"--query-gpu={_QUERY}", "-lms", str(PERIOD_MS)]
            try:
                self._process = subprocess.Popen(
                    [*command, "--format=csv,noheader,nounits"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            except FileNotFoundError:
                return self
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def draw(self, begin: float, end: float) -> Draw | None:
        """Over a span of `time.perf_counter`; None where there are no samples of it."""
        return draw_of([sample for sample in self._samples if begin <= sample.seconds <= end])

    def _read(self) -> None:
        for line in self._process.stdout:
            sample = parse(line, time.perf_counter())
            if sample is not None:
                self._samples.append(sample)


def parse(line: str, seconds: float) -> Sample | None:
    """A line of nvidia-smi; None where it does not know a value."""
    try:
        mhz, watts, reasons = line.split(",")
        return Sample(seconds, float(mhz), float(watts), bool(int(reasons, 16) & _POWER_LIMIT))
    except ValueError:
        return None


def draw_of(samples: Sequence[Sample]) -> Draw | None:
    """Summarize samples; return None without any."""
    if not samples:
        return None
    return Draw(
        median(sample.mhz for sample in samples),
        fmean(sample.watts for sample in samples),
        fmean(sample.limited for sample in samples),
    )
