"""Saved storages are counted once and named by who saves them; errors of codes are those of the codes."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks import saved_activations
from benchmarks.saved_activations import SETTINGS, layer_of, records_of, saved_by


def test_storages_that_grow_with_the_tokens_are_counted_once() -> None:
    model = layer_of(128, 344, 1)
    SETTINGS["BF16, fused"](model)
    found = {}
    for record in records_of(model, 16):
        found.setdefault(record["where"], []).append(record["units"])
    assert found["self_attn: attend"][0] == 3  # q, k and v are views of one
    assert found["mlp: activate"] == [2 * 344 / 128]
    assert found["mlp.down_proj: forward"] == [344 / 128]
    # the weights, which are saved too, do not grow
    assert not any(size > 2 * 344 / 128 for sizes in found.values() for size in sizes)


def test_what_is_saved_is_named_by_its_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    saved = saved_by(model, lambda: model(torch.ones(2, 4)))
    assert {each.where for each in saved} >= {"0: forward", "1: forward"}


def test_each_setting_is_timed() -> None:
    records = saved_activations.times_of((128, 344, 1), 16, torch.device("cpu"), rounds=1, sample_ms=0)
    assert [record["setting"] for record in records] == list(SETTINGS)
    assert all(record["ms"]["median"] > 0 for record in records)
    assert [r["over"]["median"] for r in records if r["setting"] == saved_activations.USUAL] == [1]


def test_roots_have_fewer_errors_than_e4m3_but_beside_outliers() -> None:
    for kind, values in saved_activations.drawn().items():
        records = {record["code"]: record for record in saved_activations.errors_of(kind, values[:64])}
        ours, e4m3 = records["roots in int8, groups of 128 (fp8booster)"], records["E4M3, groups of 128"]
        assert 31 < e4m3["snr"] < 33
        assert ours["snr"] > 42.9
        assert (ours["worst"] > e4m3["worst"] + 9) == (kind == "normal")
