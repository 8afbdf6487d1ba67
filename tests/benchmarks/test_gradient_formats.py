from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.gradients.collect import Bucket, collect, training_options
from benchmarks.gradients.errors import Scheme, measure, schemes
from fp8booster.cli.train.data import TokenFile

RANKS = 4


def bucket(values: torch.Tensor, sizes: list[int]) -> Bucket:
    names = [f"parameter {number}" for number in range(len(sizes))]
    return Bucket(1, 0.0, names, sizes, values.bfloat16())


def way(name: str) -> Scheme:
    (found,) = [way for way in schemes(RANKS) if way.name == name]
    return found


@pytest.fixture
def mixed() -> Bucket:
    """A parameter of ordinary gradients and one a million times smaller."""
    torch.manual_seed(0)
    values = torch.randn(RANKS, RANKS, 4096)
    values[..., 2048:] *= 1e-6
    return bucket(values, [2048, 2048])


def test_one_scale_flushes_the_small_parameter_and_blocks_keep_it(mixed) -> None:
    whole = measure(way("E4M3, a scale for a message"), mixed)
    assert whole["flushed"] == pytest.approx(0.5, abs=0.02)
    assert whole["worst"] == 0.0
    assert whole["worst parameter"] == "parameter 1"
    blocks = measure(way("E4M3, a scale for 256 values"), mixed)
    assert blocks["flushed"] < 0.001
    assert blocks["worst"] > 30
    assert blocks["bytes"] == 1 + 4 / 256
    assert blocks["clipped"] == 0.0
    assert blocks["sums at largest"] is None


def test_fp8_lm_has_a_scale_for_each_parameter_and_clips_where_mu_leaves_no_room(mixed) -> None:
    roomy, tight = (measure(way(f"FP8-LM, mu = {mu}"), mixed) for mu in ("1/4", "2"))
    assert roomy["worst"] > 20
    assert roomy["clipped"] == 0.0
    assert roomy["sums at largest"] == 0.0
    assert tight["clipped"] > 0.0
    assert tight["sums at largest"] > 0.0
    assert tight["mean"] < roomy["mean"]


def test_what_fp8_can_hold_is_sent_without_noise() -> None:
    values = torch.full((RANKS, RANKS, 512), 0.75)
    for each in schemes(RANKS):
        record = measure(each, bucket(values, [512]))
        if not each.name.endswith(("1/2", "mu = 1", "mu = 2")):
            assert record["mean"] > 100, each.name  # the scale's own rounding is left
    assert measure(way("FP8-LM, mu = 1"), bucket(values, [512]))["sums at largest"] == 1.0


def test_collected_gradients_are_those_of_each_rank_and_the_model_learns(tmp_path: Path) -> None:
    tokens = np.tile(np.arange(64, dtype=np.uint16), 40)
    tokens.tofile(tmp_path / "tokens.bin")
    file = TokenFile(tmp_path, "numbers", "none", 4096, len(tokens))
    options = training_options("tiny", steps=4, batch=1, sequence=32)
    first, last = collect(options, file, torch.device("cpu"), [1, 4], ranks=2)
    assert (first.step, last.step) == (1, 4)
    assert last.loss < first.loss - 0.5
    assert first.values.shape == (2, 2, sum(first.sizes))
    assert len(first.names) == len(first.sizes) > 30
    assert not torch.equal(first.values[0], first.values[1])
