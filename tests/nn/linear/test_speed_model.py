from __future__ import annotations

import pytest
import torch
from torch import nn

from fp8booster import FP8Config, FP8Linear, report
from fp8booster.nn.linear import speed_model

H200 = speed_model.MEASURED[9, 0]


@pytest.fixture
def small_layers_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this device has an H200's rates."""
    monkeypatch.setattr(speed_model, "_looked_up", lambda device: H200)


def count_products(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    calls, original = [], torch._scaled_mm
    monkeypatch.setattr(torch, "_scaled_mm", lambda *a, **k: calls.append(a) or original(*a, **k))
    return calls


def test_large_layers_gain_and_small_ones_lose() -> None:
    assert speed_model.speedup(8192, 4096, 11008, H200) > 1.5
    assert speed_model.speedup(1024, 512, 512, H200) < 0.8


@pytest.mark.parametrize("rows", [1024, 4096, 16384])
def test_more_features_gain_more(rows) -> None:
    gains = [speed_model.speedup(rows, size, size, H200) for size in (256, 512, 1024, 2048, 4096, 8192)]
    assert gains == sorted(gains)


def test_the_gain_stays_under_the_ratio_of_the_products() -> None:
    assert speed_model.speedup(2**20, 2**15, 2**15, H200) < H200.fp8 / H200.bf16


def test_unmeasured_devices_compute_in_fp8() -> None:
    assert speed_model.fp8_pays(1, 16, 16, torch.device("cpu"))


def test_a_small_layer_stays_in_bf16_and_the_report_says_so(small_layers_are_slow, monkeypatch) -> None:
    calls = count_products(monkeypatch)
    model = nn.Sequential(FP8Linear(32, 32, dtype=torch.bfloat16))
    x = torch.randn(48, 32, dtype=torch.bfloat16)
    y = model(x)
    y.sum().backward()
    assert torch.equal(y, nn.functional.linear(x, model[0].weight, model[0].bias))
    assert calls == []
    (row,) = report(model).other
    assert row.precision == "BF16"
    assert row.notes == "not in FP8 for 48 tokens, where it would take longer; FP8Config(always=True) does it"


def test_always_overrides(small_layers_are_slow, monkeypatch) -> None:
    calls = count_products(monkeypatch)
    layer = FP8Linear(32, 32, dtype=torch.bfloat16, config=FP8Config(always=True))
    layer(torch.randn(48, 32, dtype=torch.bfloat16)).sum().backward()
    assert len(calls) == 2  # fprop, wgrad
    (row,) = report(layer).fp8
    assert row.notes == ""


def test_one_layer_decides_by_its_tokens(small_layers_are_slow, monkeypatch) -> None:
    monkeypatch.setattr(speed_model, "speedup", lambda rows, *_: rows / 64)
    calls = count_products(monkeypatch)
    layer = FP8Linear(32, 32, dtype=torch.bfloat16)
    for rows in (128, 32, 256):
        layer(torch.randn(rows, 32, dtype=torch.bfloat16))
    assert [call[0].shape[0] for call in calls] == [128, 256]
    (row,) = report(layer).fp8
    assert "not in FP8 for 32 tokens" in row.notes


def test_token_counts_without_end_fill_no_memory(small_layers_are_slow, monkeypatch) -> None:
    """As of experts, to which every step sends other counts."""
    monkeypatch.setattr(speed_model, "speedup", lambda rows, *_: rows % 3)  # 3, 6, 9 ... tokens stay in BF16
    monkeypatch.setattr(speed_model, "MOST_TOKEN_COUNTS", 6)
    calls = count_products(monkeypatch)
    layer = FP8Linear(32, 32, bias=False, dtype=torch.bfloat16)
    for rows in (1, 2, 3, 4, 5, 6, 8, 9, 5):
        layer(torch.randn(rows, 32, dtype=torch.bfloat16))
    assert len(layer.in_fp8) == 6
    assert len(calls) == 4  # of 2, 5, 8 and 5 again; where nothing is gained, none
    (row,) = report(layer).fp8
    assert "tokens 5->16, of the first 6 token counts" in row.notes
    assert "not in FP8 for 1, 3, 4, 6 tokens, of the first 6 token counts, where it would take" in row.notes


def test_a_layer_that_moves_asks_anew_what_pays_where_it_is(small_layers_are_slow, monkeypatch) -> None:
    calls = count_products(monkeypatch)
    layer = FP8Linear(32, 32, dtype=torch.bfloat16)
    for gain in (0.5, 2.0):
        monkeypatch.setattr(speed_model, "speedup", lambda *_, gain=gain: gain)
        layer.to("cpu")(torch.randn(48, 32, dtype=torch.bfloat16))
    assert len(calls) == 1


def test_compiled_code_decides_alike(monkeypatch) -> None:
    monkeypatch.setattr(speed_model, "measured_rates", lambda device: H200)
    layer = FP8Linear(32, 32, dtype=torch.bfloat16)
    x = torch.randn(48, 32, dtype=torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")  # what is decided is traced
    torch.testing.assert_close(compiled(x), nn.functional.linear(x, layer.weight, layer.bias))
