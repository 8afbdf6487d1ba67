"""The error of sums of gradients is that of what the optimizer reads."""

from __future__ import annotations

import math

import torch

from benchmarks.gradient_sums import measure
from benchmarks.gradients.collect import Bucket


def test_each_way_is_measured_on_the_parameters_as_they_are() -> None:
    torch.manual_seed(0)
    values = torch.randn(4, 4, 1024)
    values[..., 512:] *= 1e-4  # values of another parameter share no scale with them
    bucket = Bucket(7, 0.0, ["one", "other"], [512, 512], values.bfloat16())
    records = {record["way"]: record for record in measure(bucket, 3)}
    assert {(record["step"], record["micro_batches"]) for record in records.values()} == {(7, 3)}
    assert records["FP32"]["worst"] > 140 or records["FP32"]["worst"] == math.inf
    assert 50 < records["BF16, `AdamW`"]["worst"] < 60
    assert 38 < records["8-bit, `AdamW`"]["worst"] <= records["8-bit, `AdamW`"]["all"] < 46
    assert records["E4M3, a scale for 128 values"]["all"] < records["8-bit, ZeRO"]["all"] - 5
    assert records["8-bit, ZeRO"]["all"] < records["8-bit, `AdamW`"]["all"]
