"""Whether Colossal-AI runs on the CPU here."""

from __future__ import annotations

from types import ModuleType
from typing import Any

NO_DEVICE = "no CUDA or NPU device"


def get_accelerator() -> Any:
    """colossalai's, once it can be imported."""
    from colossalai.accelerator import get_accelerator

    return get_accelerator()


def no_device(module: ModuleType) -> bool:
    """For `wrap(only_if=...)`."""
    return get_accelerator().name == "cpu"
