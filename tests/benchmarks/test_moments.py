"""The errors of codes of moments are those of the update's direction, and codes that flush show it."""

from __future__ import annotations

import pytest
import torch

from benchmarks import moments


def drawn(octaves: float) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    sizes = torch.exp2(octaves * torch.rand(64, 128))
    return [(sizes * torch.randn(64, 128), sizes.square())]


def test_each_code_is_measured_and_exact_ones_err_by_nothing(monkeypatch) -> None:
    monkeypatch.setattr(moments, "CODES", (*moments.CODES, ("FP32", moments.exact, moments.exact, 4.0)))
    records = {record["code"]: record for record in moments.measure(3, drawn(2))}
    assert records["FP32"]["error"] == records["FP32"]["relative"] == 0
    ours = records["8-bit, both (fp8booster.optim.AdamW)"]["error"]
    assert 0.003 < ours < 0.5 * records["E4M3, both"]["error"] < 0.1
    assert ours < records["E4M3 with range expansion, both (COAT)"]["error"]


def test_second_moments_that_e4m3_flushes_are_seen() -> None:
    records = {record["code"]: record for record in moments.measure(3, drawn(14))}
    assert records["E4M3, both"]["error"] > 1
    assert records["E4M3 first, 8-bit second"]["error"] < 0.05
    assert records["8-bit, both (fp8booster.optim.AdamW)"]["error"] < 0.3


@pytest.mark.parametrize("code", [moments.e4m3, moments.expanded])
def test_codes_of_others_keep_what_they_hold_exactly(code) -> None:
    assert torch.equal(code(torch.zeros(3, 50)), torch.zeros(150))
    powers = torch.full((2, 128), 0.5)
    torch.testing.assert_close(code(powers), powers.flatten())
