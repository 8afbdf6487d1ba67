"""Clock and power of a GPU while something runs, as nvidia-smi samples them, and the peak of its products at a clock.

Where power limits the clock, a step that leaves out waiting and copying runs its products more slowly: what counts then
is energy.
"""

from __future__ import annotations

import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import fmean, median
from typing import NamedTuple

import torch

PERIOD_MS = 50
_QUERY = "clocks.sm,power.draw.instant,clocks_event_reasons.active"
_POWER_LIMIT = 0x4 | 0x80
"""Bits of the reasons for a lower clock: the software's power limit, and the hardware's brake (nvml.h:
nvmlClocksEventReasonSwPowerCap, nvmlClocksThrottleReasonHwPowerBrakeSlowdown)."""

FLOPS_PER_CYCLE = {
    (8, 9): {"BF16": 1024, "FP8": 2048},
    (9, 0): {"BF16": 4096, "FP8": 8192},
    (10, 0): {"BF16": 8192, "FP8": 16384},
}
"""Dense tensor-core operations of one streaming multiprocessor a cycle, by compute capability: NVIDIA's whitepapers on
Ada, Hopper and Blackwell (peak rate / processors / boost clock)."""


def peak_flops(capability: tuple[int, int], processors: int, hz: float, precision: str) -> float | None:
    """Return the tensor-core operations a second of a GPU at a clock; None for one that is not listed.

    Args:
        capability: its compute capability.
        processors: its streaming multiprocessors.
        hz: their clock.
        precision: "BF16" or "FP8".
    """
    if capability not in FLOPS_PER_CYCLE:
        return None
    return FLOPS_PER_CYCLE[capability][precision] * processors * hz


class Sample(NamedTuple):
    """One moment of a GPU."""

    seconds: float
    """A time of `time.perf_counter`."""

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
        period_ms: between two samples.
        kept: so many are kept, the last ones; None: all.
    """

    def __init__(self, device: torch.device, *, period_ms: int = PERIOD_MS, kept: int | None = None) -> None:
        self._device, self._period_ms = device, period_ms
        self._samples: deque[Sample] = deque(maxlen=kept)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> PowerMeter:
        if self._device.type == "cuda":
            gpu = f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
            command = ["nvidia-smi", "-i", gpu, f"--query-gpu={_QUERY}", "-lms", str(self._period_ms)]
            try:
                self._process = subprocess.Popen(
                    [*command, "--format=csv,noheader,nounits"],
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            except OSError:  # it is not there, or may not run
                return self
            self._thread = threading.Thread(target=self._read, args=(self._process.stdout,), daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            self._thread.join()

    def draw(self, begin: float, end: float) -> Draw | None:
        """Return that over a span of `time.perf_counter`; None where there are no samples of it."""
        # a copy, for the thread adds to them
        return draw_of([sample for sample in list(self._samples) if begin <= sample.seconds <= end])

    def _read(self, lines: Iterable[str]) -> None:
        for line in lines:
            sample = parse(line, time.perf_counter())
            if sample is not None:
                self._samples.append(sample)


def parse(line: str, seconds: float) -> Sample | None:
    """Return what a line of nvidia-smi says; None where it does not know a value."""
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
