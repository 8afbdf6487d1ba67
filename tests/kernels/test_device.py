from __future__ import annotations

import pytest
import torch

from fp8booster.kernels import device as devices


@pytest.fixture
def gpu_of_capability(monkeypatch: pytest.MonkeyPatch):
    """Pretend that every GPU is an A100 with the capability given."""

    def pretend(capability: tuple[int, int]) -> torch.device:
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
        return torch.device("cuda", 0)

    devices.known_why_no_fp8.cache_clear()
    yield pretend
    devices.known_why_no_fp8.cache_clear()


def test_the_cpu_needs_no_switch() -> None:
    devices.require_fp8(torch.device("cpu"), emulate=False)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_newer_gpus_have_fp8_products(capability, gpu_of_capability) -> None:
    devices.require_fp8(gpu_of_capability(capability), emulate=False)


@pytest.mark.parametrize("capability", [(7, 0), (8, 0), (8, 6)])
def test_an_older_gpu_is_named_with_the_way_out(capability, gpu_of_capability) -> None:
    device = gpu_of_capability(capability)
    have = ".".join(map(str, capability))
    with pytest.raises(
        ValueError, match=rf"A100 has compute capability {have} and FP8 products need 8.9; .*FP8Config\(emulate=True\)"
    ):
        devices.require_fp8(device, emulate=False)
    devices.require_fp8(device, emulate=True)


def test_another_kind_of_device_is_refused() -> None:
    with pytest.raises(ValueError, match="no FP8 products for meta devices; train on CUDA or on the CPU"):
        devices.require_fp8(torch.device("meta"), emulate=False)
