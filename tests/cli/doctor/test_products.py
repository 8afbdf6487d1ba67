"""The doctor's check of FP8 products tells a right product from a wrong one."""

from __future__ import annotations

import pytest
import torch

from fp8booster.cli.doctor import products
from fp8booster.kernels import device as capability

CPU = torch.device("cpu")


@pytest.mark.parametrize("operands", [products.FPROP, products.BACKWARD])
def test_a_right_product(operands):
    check = products.check(CPU, operands)
    assert check.reason is None
    assert check.error < products.TOLERANCE


@pytest.mark.parametrize("factor", [1.02, 2.0, float("nan")])
def test_a_wrong_product_is_called_wrong(monkeypatch, factor):
    right = products.product
    monkeypatch.setattr(products, "product", lambda *args, **options: right(*args, **options) * factor)
    assert "off the FP32 product" in products.check(CPU, products.FPROP).reason


def test_a_product_that_raises_is_reported(monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("CUBLAS_STATUS_NOT_SUPPORTED\nat line 7")

    monkeypatch.setattr(products, "product", refuse)
    assert products.check(CPU, products.FPROP).reason == "the product failed: CUBLAS_STATUS_NOT_SUPPORTED"


def test_a_gpu_without_fp8_is_named_and_pointed_to_emulation(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    capability.known_why_no_fp8.cache_clear()
    try:
        reason = products.check(torch.device("cuda", 0), products.FPROP).reason
    finally:
        capability.known_why_no_fp8.cache_clear()
    assert "NVIDIA A100-SXM4-80GB" in reason
    assert "8.9" in reason
    assert "FP8Config(emulate=True)" in reason


def test_one_gpu_of_each_kind_is_checked(monkeypatch):
    names = ["H200", "A100", "H200", "A100"]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(names))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: names[index])
    assert [str(device) for device in products.devices()] == ["cpu", "cuda:0", "cuda:1"]


def test_speed_counts_two_operations_a_multiplication():
    speed = products.Speed("cuda:0", 1000, 1000, 1000, bf16=2.0, fp8=1.0, fp8_fast=0.5)
    assert speed.teraflops(speed.bf16) == pytest.approx(1.0)
    assert speed.teraflops(speed.fp8_fast) == pytest.approx(4.0)


@pytest.mark.gpu
def test_fp8_is_faster_than_bf16_on_llama_shapes():
    for _ in range(3):  # other tests may have the GPU at the same time
        measured = products.speeds(torch.device("cuda", 0))
        assert [(speed.features_in, speed.features_out) for speed in measured] == list(products.LLAMA_7B)
        if all(speed.bf16 > speed.fp8_fast for speed in measured):
            return
    pytest.fail(f"FP8 was not faster in any of three tries: {measured}")
