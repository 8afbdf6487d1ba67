"""Versions, GPUs, backends, and Colossal-AI with its patches, as found; no judgement."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import shutil
import subprocess
import warnings
from dataclasses import dataclass

import torch
from torch import distributed

from fp8booster.cli.instructions import avoid_trapping_instructions
from fp8booster.nn.fused.attention import kernels
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
    attention: str
    """Which kernels attend there to heads of 128 features."""


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
    capability = f"{properties.major}.{properties.minor}"
    attention = kernels(torch.device("cuda", index))
    return GPU(index, properties.name, capability, properties.total_memory, attention)


@dataclass(frozen=True)
class Colossal:
    """What came of importing Colossal-AI."""

    error: str | None
    """What its import raised, or None."""
    missing: str | None
    """The package that it asked for and did not find."""
    patches: list[dict[str, str]]
    """Of each: its name, kind (why there is one), summary, place, when it is needed, and its state."""


def import_colossal() -> Colossal:
    """Apply the patches, import Colossal-AI's plugins, and list where each patch stands."""
    from fp8booster.colossal import compat

    error = missing = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream advertises optional packages
            importlib.import_module("colossalai.booster.plugin")  # which imports the whole training path
    except Exception as raised:  # an incompatible version fails with anything
        error = f"{type(raised).__name__}: {raised}"
        if isinstance(raised, ModuleNotFoundError):
            missing = raised.name.partition(".")[0]
    told = ("name", "summary", "place", "needed_when")
    rows = [
        {name: getattr(each, name) for name in told} | {"kind": each.kind.value, "state": each.state.value}
        for each in compat.patches()
    ]
    return Colossal(error, missing, rows)
