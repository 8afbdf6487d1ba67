from __future__ import annotations

import pytest
import torch

from fp8booster.formats import E4M3
from fp8booster.kernels import grouped_product as kernel
from fp8booster.kernels.grouped_product import Groups, grouped_product, summed_product, why_no_grouped_product
from tests.kernels.grouped_stand_in import stand_in

ROWS = (32, 16, 48)
INPUTS, OUTPUTS = 64, 96


def groups() -> Groups:
    return Groups(sum(ROWS), torch.tensor(ROWS).cumsum(0).to(torch.int32))


def fp8(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(E4M3)


@pytest.fixture(params=["emulated", "group by group", "kernel"])
def emulate(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Each way to compute; the kernel is a stand-in that refuses what torch's does."""
    torch.manual_seed(0)
    if request.param == "kernel":
        stand_in(monkeypatch)
    return request.param == "emulated"


def test_each_group_meets_its_own_matrix(emulate: bool) -> None:
    a, b = fp8(sum(ROWS), INPUTS), fp8(len(ROWS), OUTPUTS, INPUTS)
    scale_a, scale_b = torch.tensor(0.5), torch.rand(len(ROWS), OUTPUTS) + 0.5
    y = grouped_product(a, b, scale_a, scale_b, groups(), fast_accumulation=True, emulate=emulate)
    expected = [
        0.5 * (part.float() @ b[group].float().t()) * scale_b[group] for group, part in enumerate(a.float().split(ROWS))
    ]
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), torch.cat(expected), rtol=1e-2, atol=1e-2)


def test_operands_may_be_columns_of_wider_ones(emulate: bool) -> None:
    """As in the gradient of gate's input, whose weights lie between those of up."""
    a = fp8(sum(ROWS), 2 * OUTPUTS)
    b = fp8(INPUTS, 2 * len(ROWS) * OUTPUTS)
    own_a = a.view(len(a), 2, OUTPUTS)[:, 1]
    own_b = b.view(INPUTS, len(ROWS), 2, OUTPUTS)[:, :, 1].transpose(0, 1)
    scale_a, scale_b = torch.tensor(0.5), torch.rand(len(ROWS), INPUTS) + 0.5
    dx = grouped_product(own_a, own_b, scale_a, scale_b, groups(), fast_accumulation=False, emulate=emulate)
    expected = [
        0.5 * (part.float() @ own_b[group].float().t()) * scale_b[group]
        for group, part in enumerate(own_a.float().split(ROWS))
    ]
    torch.testing.assert_close(dx.float(), torch.cat(expected), rtol=1e-2, atol=1e-2)


def test_each_group_sums_over_its_own_columns(emulate: bool) -> None:
    a, b = fp8(OUTPUTS, sum(ROWS)), fp8(INPUTS, sum(ROWS))
    scale_a, scale_b = torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.25)
    dw = summed_product(a, b, scale_a, scale_b, groups(), fast_accumulation=False, emulate=emulate)
    parts = zip(a.float().split(ROWS, 1), b.float().split(ROWS, 1), scale_a, strict=True)
    expected = torch.stack([0.25 * scale * (x @ y.t()) for x, y, scale in parts])
    assert dw.dtype is torch.bfloat16
    torch.testing.assert_close(dw.float(), expected, rtol=1e-2, atol=1e-2)


def test_devices_where_it_does_not_run_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_no_grouped_product(torch.device("cpu"), emulate=False) is None
    kernel._examined.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    assert "Hopper" in why_no_grouped_product(torch.device("cuda", 0), emulate=False)
    assert why_no_grouped_product(torch.device("cuda", 0), emulate=True) is None
    kernel._examined.cache_clear()
    monkeypatch.delattr(torch, "_scaled_grouped_mm")
    assert "version of torch" in why_no_grouped_product(torch.device("cuda", 0), emulate=False)
    kernel._examined.cache_clear()


@pytest.mark.gpu
def test_the_kernel_computes_what_group_by_group_does_on_a_gpu() -> None:
    device = torch.device("cuda", 0)
    reason = why_no_grouped_product(device, emulate=False)
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(0)
    on_device = Groups(sum(ROWS), groups().ends.to(device))
    a = fp8(sum(ROWS), 2 * OUTPUTS).to(device).view(-1, 2, OUTPUTS)[:, 1]
    b = fp8(INPUTS, 2 * len(ROWS) * OUTPUTS).to(device)
    b = b.view(INPUTS, len(ROWS), 2, OUTPUTS)[:, :, 1].transpose(0, 1)
    scales = torch.tensor(0.5, device=device), torch.rand(len(ROWS), INPUTS, device=device)
    found, expected = (
        grouped_product(a, b, *scales, on_device, fast_accumulation=False, emulate=emulate) for emulate in (False, True)
    )
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
