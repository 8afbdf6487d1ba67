"""The speed of a run as a share of what its GPUs can do."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from fp8booster.monitor.power import PowerMeter, peak_flops
from fp8booster.nn.linear.speed_model import measured_rates
from fp8booster.training.arithmetic import TokenFlops, token_flops

_PERIOD = 1.0  # seconds between two looks at the clock
_WINDOW = 600.0  # seconds over which its median is taken


class ChipLimit:
    """The limit of a rank's GPU, at the clock that it has while `with` this; without one where it is not known.

    It is known for a GPU whose peak is in `fp8booster.monitor.power`, and a model whose operations can be counted.

    Args:
        network: whole, before an engine shards it.
        sequence: tokens of a sequence.
        device: the rank's.
    """

    def __init__(self, network: nn.Module, sequence: int, device: torch.device) -> None:
        self._device = device
        self._flops = _counted(network, sequence) if self._peak(1.0) is not None else None
        watched = device if self._flops is not None else torch.device("cpu")
        self._meter = PowerMeter(watched, period_ms=int(1e3 * _PERIOD), kept=int(_WINDOW / _PERIOD))
        self._mhz: float | None = None
        self._looked = -_PERIOD

    def __enter__(self) -> ChipLimit:
        self._meter.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._meter.__exit__()

    def share(self, tokens_per_second: float) -> float | None:
        """Return a step's model FLOP/s over the FP8 peak at the clock of the last minutes; None where it is unknown.

        Args:
            tokens_per_second: of one GPU.
        """
        if self._flops is None:
            return None
        now = time.perf_counter()
        if now - self._looked >= _PERIOD:
            # not the clock at the end of the run, when it saves
            draw = self._meter.draw(now - _WINDOW, now)
            self._mhz, self._looked = None if draw is None else draw.mhz, now
        peak = self._peak(self._mhz)
        return None if peak is None else tokens_per_second * self._flops.total / peak

    def record(self, layers: Iterable[Mapping[str, Any]]) -> dict[str, float | None] | None:
        """Return the figures by which `RunFigures` has its shares; None where the limit is not known.

        "flops_per_token": model FLOPs. Of one GPU: "clock_mhz", at the last step; "peak_flops", of FP8 at this clock;
        "reachable_flops", what the run's products reach at the rates that were measured, None without these.

        Args:
            layers: rows of `fp8booster.report` after the last step, those of linear layers and others.
        """
        peak = self._peak(self._mhz)
        if self._flops is None or peak is None:
            return None
        rates = measured_rates(self._device)
        passes = {row["name"]: row["passes"] for row in layers}
        return {
            "flops_per_token": self._flops.total,
            "clock_mhz": self._mhz,
            "peak_flops": peak,
            "reachable_flops": None if rates is None else self._flops.reachable(passes, rates),
        }

    def _peak(self, mhz: float | None) -> float | None:
        if self._device.type != "cuda" or not mhz:
            return None
        gpu = torch.cuda.get_device_properties(self._device)
        return peak_flops((gpu.major, gpu.minor), gpu.multi_processor_count, 1e6 * mhz, "FP8")


def _counted(network: nn.Module, sequence: int) -> TokenFlops | None:
    try:
        return token_flops(network, sequence)
    except ValueError:  # a run is not to fail for a figure about it
        return None
