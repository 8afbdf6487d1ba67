"""The share of a GPU's limit, on a stand-in for the GPU and for nvidia-smi."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fp8booster import FP8Config, convert_to_fp8, report
from fp8booster.cli.train import speed
from fp8booster.cli.train.speed import ChipLimit
from fp8booster.nn.linear.speed_model import MEASURED
from fp8booster.training.arithmetic import token_flops
from fp8booster.training.models import MODELS, build

GPU = torch.device("cuda", 0)
SEQUENCE = 64


@pytest.fixture
def network() -> torch.nn.Module:
    return build(MODELS["micro"].config(SEQUENCE), device=torch.device("cpu"))


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What torch tells of a GPU: an H100 whose clock is 1500 MHz."""
    properties = SimpleNamespace(uuid="a-b", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (properties.major, properties.minor))
    monkeypatch.setattr(speed, "_PERIOD", 0.01)
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nwhile sleep 0.02; do echo 1500, 600.0, 0x4; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return properties


def share_of(limit: ChipLimit, tokens_per_second: float) -> float | None:
    """The share as soon as there is a look at the clock."""
    deadline = time.perf_counter() + 20
    while (share := limit.share(tokens_per_second)) is None and time.perf_counter() < deadline:
        time.sleep(0.02)
    return share


def test_speed_is_compared_with_the_peak_at_the_clock_that_the_gpu_has(gpu, network):
    flops = token_flops(network, SEQUENCE)
    peak = 8192 * 132 * 1500e6
    with ChipLimit(network, SEQUENCE, GPU) as limit:
        assert share_of(limit, 1e6) == pytest.approx(1e6 * flops.total / peak)
        convert_to_fp8(network, FP8Config())
        record = limit.record([dataclasses.asdict(row) for row in report(network).rows])
    rates = MEASURED[9, 0]
    assert record["flops_per_token"] == flops.total
    assert (record["clock_mhz"], record["peak_flops"]) == (1500, pytest.approx(peak))
    # most of the products in FP8, the head and attention not
    assert rates.bf16 < record["reachable_flops"] < rates.fp8


def test_nothing_is_said_of_a_cpu(network, monkeypatch):
    monkeypatch.setattr(speed, "token_flops", None)  # nor is anything counted
    with ChipLimit(network, SEQUENCE, torch.device("cpu")) as limit:
        assert limit.share(1e6) is None
        assert limit.record([]) is None


def test_nothing_is_said_of_an_unknown_gpu(gpu, network):
    gpu.major = 8
    with ChipLimit(network, SEQUENCE, GPU) as limit:
        assert limit.share(1e6) is None
        assert limit.record([]) is None


def test_a_gpu_without_measured_rates_has_its_peak_alone(gpu, network):
    gpu.major = 10
    with ChipLimit(network, SEQUENCE, GPU) as limit:
        assert share_of(limit, 1e6) > 0
        record = limit.record([])
    assert record["peak_flops"] == pytest.approx(16384 * 132 * 1500e6)
    assert record["reachable_flops"] is None


def test_nothing_is_said_without_nvidia_smi(gpu, network, tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    with ChipLimit(network, SEQUENCE, GPU) as limit:
        assert limit.share(1e6) is None
        assert limit.record([]) is None


def test_nothing_is_said_of_a_model_that_cannot_be_counted(gpu, network):
    network.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(hidden_size=64, num_hidden_layers=2))
    with ChipLimit(network, SEQUENCE, GPU) as limit:
        assert limit.share(1e6) is None
