"""Versions, GPUs and backends, as found; no judgement."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
from dataclasses import dataclass

import torch
from torch import distributed

from fp8booster.cli.instructions import avoid_trapping_instructions
from fp8booster.version import __version__

PACKAGES = ("triton", "transformers", "tokenizers", "peft", "colossalai", "datasets", "torchao")
"""Whose versions are shown beside those of Python, PyTorch and fp8booster."""


@dataclass(frozen=True)
class GPU:
    """One visible GPU."""

    index: int
    name: str
    capability: str
    """Compute capability, as in "9.0"."""
    memory: int
    """Total, in bytes."""


@dataclass(frozen=True)
class Environment:
    """What is installed and what the machine has; None stands for "not there"."""

    versions: dict[str, str | None]
    cuda: str | None
    """CUDA (or ROCm) that PyTorch was built with."""
    driver: str | None
    nccl: str | None
    gpus: list[GPU]
    backends: list[str]
    """What torch.distributed can communicate with."""
    instructions: str | None = None
    """What is wrong with the CPU's instructions, and was done about it in this process."""


def look_around() -> Environment:
    """Describe this process's environment."""
    packages = {name: _installed(name) for name in PACKAGES}
    has_nccl = distributed.is_nccl_available()
    return Environment(
        versions={
            "python": platform.python_version(),
            "fp8booster": __version__,
            "torch": torch.__version__,
            **packages,
        },
        cuda=torch.version.cuda or torch.version.hip,
        driver=_driver(),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if has_nccl else None,
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        instructions=avoid_trapping_instructions(),
        backends=[name for name in ("nccl", "gloo", "mpi") if distributed.is_backend_available(name)],
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """Version of the NVIDIA driver; it is there also where PyTorch is a CPU build."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(query, capture_output=True, text=True, check=False)
    return answer.stdout.partition("\n")[0].strip() or None if answer.returncode == 0 else None


def _gpu(index: int) -> GPU:
    properties = torch.cuda.get_device_properties(index)
    return GPU(index, properties.name, f"{properties.major}.{properties.minor}", properties.total_memory)
