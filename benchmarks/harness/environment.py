"""Describe the machine and the versions of a result: the head of every result file."""

from __future__ import annotations

import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

import torch

from fp8booster.monitor.power import peak_flops
from fp8booster.version import __version__

PEERS = ("torchao", "transformer_engine", "colossalai")
REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Gpu:
    """The device that is measured."""

    name: str
    capability: tuple[int, int]
    processors: int
    driver: str
    max_clock_hz: float
    power_limit: str

    def peak_flops(self, precision: str) -> float | None:
        """Return the peak at the highest clock, as `fp8booster.monitor.power.peak_flops`: long products stay below."""
        return peak_flops(self.capability, self.processors, self.max_clock_hz, precision)


def gpu_of(device: torch.device) -> Gpu:
    """The facts of a CUDA device, from torch and from nvidia-smi; of the CPU, its name.

    Raises:
        RuntimeError: nvidia-smi does not answer.
    """
    if device.type == "cpu":
        return Gpu(f"CPU {platform.machine()}", (0, 0), 0, "none", 0.0, "unknown")
    properties = torch.cuda.get_device_properties(device)
    query = [
        "nvidia-smi",
        f"--id=GPU-{properties.uuid}",
        "--query-gpu=driver_version,clocks.max.sm,power.limit",
        "--format=csv,noheader,nounits",
    ]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError("nvidia-smi did not answer; it comes with the driver and must be on the PATH") from error
    driver, megahertz, watts = (field.strip() for field in answer.split(","))
    return Gpu(
        properties.name,
        (properties.major, properties.minor),
        properties.multi_processor_count,
        driver,
        float(megahertz) * 1e6,
        f"{watts} W",
    )


def head(gpu: Gpu, *, commit: str | None = None) -> dict[str, str]:
    """Every fact that one needs to repeat a measurement, in the order in which it is shown.

    Args:
        gpu: what is measured.
        commit: the git commit of the sources, where they were copied without their `.git`; None reads it there.
    """
    return {
        "GPU": gpu.name,
        "compute capability": ".".join(map(str, gpu.capability)),
        "processors": str(gpu.processors),
        "power limit": gpu.power_limit,
        "highest clock": f"{gpu.max_clock_hz / 1e6:.0f} MHz",
        "driver": gpu.driver,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version_of("triton"),
        "fp8booster": __version__,
        **{peer: version_of(peer) for peer in PEERS},
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit or git_commit(REPOSITORY),
        "command": command_line(),
    }


def version_of(package: str) -> str:
    """An installed package's version, or "not installed"."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def git_commit(repository: Path) -> str:
    """The commit that is checked out, marked where tracked files differ from it; "unknown" outside a repository."""
    git = ["git", "-C", str(repository)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no"], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + (" with changes" if changes.stdout.strip() else "")


def command_line() -> str:
    """The command that runs this process, as one would type it in the repository."""
    module = sys.modules["__main__"].__spec__
    program = ["python", "-m", module.name] if module is not None else ["python", sys.argv[0]]
    return shlex.join([*program, *sys.argv[1:]])
