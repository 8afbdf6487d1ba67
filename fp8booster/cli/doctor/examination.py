"""`fp8booster doctor`: versions, GPUs, backends, FP8 products, Colossal-AI and its patches, and their problems."""

from __future__ import annotations

import importlib
import importlib.metadata
import platform
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import distributed
from torch.utils.collect_env import get_nvidia_driver_version, run

from fp8booster.cli.doctor import products
from fp8booster.cli.doctor.problems import GPU, Colossal, Environment, Problem, find_problems
from fp8booster.kernels.instructions import avoid_trapping_instructions, multiply_bf16_in_fp32
from fp8booster.nn.fused.attention import kernels
from fp8booster.version import __version__

PACKAGES = ("triton", "transformers", "tokenizers", "peft", "colossalai", "datasets", "torchao")
"""Packages whose versions are shown with those of Python, PyTorch and fp8booster."""


@dataclass(frozen=True)
class Examination:
    """All that `fp8booster doctor` found."""

    environment: Environment
    checks: list[products.Check]
    speeds: list[products.Speed]
    colossal: Colossal
    problems: list[Problem]

    @property
    def can_train(self) -> bool:
        return not any(problem.stops_training for problem in self.problems)


def examine(speed: bool, announce: Callable[[str], object]) -> Examination:
    """Look at versions, devices, FP8 products and Colossal-AI; `announce` hears what is being done."""
    environment = _look_around()
    checks, speeds = [], []
    for device in products.devices():
        announce(f"Multiplying in FP8 on {device}")
        tried = [products.check(device, operands) for operands in (products.FPROP, products.BACKWARD)]
        checks += tried
        if speed and all(check.reason is None for check in tried):
            announce(f"Timing FP8 and BF16 products on {device}")
            speeds += products.speeds(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    announce("Importing Colossal-AI")
    colossal = _import_colossal()
    return Examination(environment, checks, speeds, colossal, find_problems(environment, checks, colossal))


def _look_around() -> Environment:
    own = {"python": platform.python_version(), "fp8booster": __version__, "torch": torch.__version__}
    return Environment(
        versions={**own, **{name: _installed(name) for name in PACKAGES}},
        cuda=torch.version.cuda or torch.version.hip,
        driver=get_nvidia_driver_version(run),
        nccl=".".join(map(str, torch.cuda.nccl.version())) if distributed.is_nccl_available() else None,
        gpus=[_gpu(index) for index in range(torch.cuda.device_count())],
        instructions=avoid_trapping_instructions(),
        bf16=multiply_bf16_in_fp32(),
        backends=[name for name in ("nccl", "gloo", "mpi") if distributed.is_backend_available(name)],
    )


def _installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu(index: int) -> GPU:
    properties = torch.cuda.get_device_properties(index)
    capability = f"{properties.major}.{properties.minor}"
    return GPU(index, properties.name, capability, properties.total_memory, kernels(torch.device("cuda", index)))


def _import_colossal() -> Colossal:
    """Apply the patches, import Colossal-AI's plugins, and list the state of each patch."""
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
    rows = [
        {name: getattr(each, name) for name in ("name", "summary", "place", "needed_when")}
        | {"kind": each.kind.value, "state": each.state.value}
        for each in compat.patches()
    ]
    return Colossal(error, missing, rows)
