"""Problems of a machine with FP8 training: each in a sentence, with the command that solves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from packaging.version import Version

from fp8booster.cli.doctor.products import Check
from fp8booster.colossal.sharding import FAMILIES_OF_5, SHARDED_TRANSFORMERS
from fp8booster.kernels.instructions import BEFORE_AMX, VARIABLE

OLDEST_TORCH = "2.11"
COLOSSALAI = "0.5.0"


@dataclass(frozen=True)
class GPU:
    """One visible GPU."""

    index: int
    name: str
    capability: str  # compute capability, as in "9.0"
    memory: int  # total, in bytes
    attention: str  # kernels that attend to heads of 128 features


@dataclass(frozen=True)
class Environment:
    """Installed packages and the machine; None stands for "not there"."""

    versions: dict[str, str | None]
    cuda: str | None  # CUDA (or ROCm) that PyTorch was built with
    driver: str | None
    nccl: str | None
    gpus: list[GPU]
    backends: list[str]  # backends of torch.distributed
    instructions: str | None = None  # a defect of the CPU's instructions that this process works around
    bf16: str | None = None  # how BF16 products are computed on a CPU that has no instructions for them


@dataclass(frozen=True)
class Colossal:
    """The import of Colossal-AI."""

    error: str | None
    missing: str | None  # the package that it asked for and did not find
    patches: list[dict[str, str]]  # name, kind (why there is one), summary, place, needed_when and state of each


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong or missing."""

    sentence: str
    remedy: str | None  # the command that solves it, or None where the sentence says all there is to do
    stops_training: bool

    @property
    def is_installed_away(self) -> bool:
        """Tell whether training waits for a package alone."""
        return self.stops_training and (self.remedy or "").startswith("pip install ")


def find_problems(environment: Environment, checks: list[Check], colossal: Colossal) -> list[Problem]:
    """Judge what was found; problems that stop training come first."""
    found = [*_of_torch(environment), *_of_products(environment, checks), *_of_packages(environment, colossal)]
    return sorted(found, key=lambda problem: not problem.stops_training)


def _of_torch(environment: Environment) -> Iterator[Problem]:
    version, driver = environment.versions["torch"], environment.driver
    if Version(version).release < Version(OLDEST_TORCH).release:  # 2.11.0a0, a nightly build, is new enough
        remedy = f"pip install --upgrade 'torch>={OLDEST_TORCH}'"
        yield Problem(f"PyTorch {version} is older than {OLDEST_TORCH}.", remedy, True)
    if driver is not None and not environment.gpus and environment.cuda is None:
        sentence = f"There is an NVIDIA driver ({driver}), but PyTorch {version} was built for the CPU alone."
        yield Problem(sentence, "pip uninstall -y torch && pip install torch==2.13.0", False)
    elif driver is not None and not environment.gpus:
        yield Problem(
            f"There is an NVIDIA driver ({driver}), but PyTorch sees no GPU; look at CUDA_VISIBLE_DEVICES and whether "
            f"the driver is new enough for CUDA {environment.cuda}.",
            "nvidia-smi",
            False,
        )
    name, backend, kind = ("NCCL", "nccl", "GPU") if environment.gpus else ("gloo", "gloo", "CPU")
    if backend not in environment.backends:
        yield Problem(f"PyTorch has no {name}, through which {kind} processes train together.", None, True)


def _of_products(environment: Environment, checks: list[Check]) -> Iterator[Problem]:
    reasons: dict[str, Check] = {}  # one sentence a device, though both kinds of product may fail
    for check in checks:
        if check.reason is not None:
            reasons.setdefault(check.device, check)
    for device, check in reasons.items():
        trains_there = device.startswith("cuda" if environment.gpus else "cpu")
        yield Problem(f"FP8 products ({check.formats}) do not run on {device}: {check.reason}.", None, trains_there)
    if environment.instructions is not None:
        yield Problem(
            f"{environment.instructions} `fp8booster train` does the same; other programs need the variable.",
            f"export {VARIABLE}={BEFORE_AMX}",
            False,
        )
    if environment.bf16 is not None:
        yield Problem(
            f"{environment.bf16} Commands and plugins do so by themselves; other programs call "
            "fp8booster.kernels.instructions.multiply_bf16_in_fp32().",
            None,
            False,
        )


def _of_packages(environment: Environment, colossal: Colossal) -> Iterator[Problem]:
    versions = environment.versions
    version, install = versions["colossalai"], f"pip install --no-deps colossalai=={COLOSSALAI}"
    if version is None:
        yield Problem("colossalai is not installed, so there is no Booster and no plugin.", install, True)
    else:
        if version != COLOSSALAI:
            yield Problem(f"colossalai is {version}; the patches were written for {COLOSSALAI}.", install, False)
        if colossal.error is not None:
            remedy = None if colossal.missing is None else f"pip install {colossal.missing}"
            yield Problem(f"colossalai {version} cannot be imported: {colossal.error}.", remedy, True)
    if versions["transformers"] not in (None, SHARDED_TRANSFORMERS):
        yield Problem(
            f"transformers is {versions['transformers']}; plugins that shard models (tensor, sequence and pipeline "
            f"parallelism) need {SHARDED_TRANSFORMERS}, but for {', '.join(FAMILIES_OF_5.values())}, which they shard "
            "with transformers 5 too. LowLevelZero, Gemini, DDP and FSDP train with both.",
            f"pip install transformers=={SHARDED_TRANSFORMERS}",
            False,
        )
    if environment.gpus and versions["triton"] is None:
        yield Problem("triton is not installed, so casts take the slower torch path.", "pip install triton", False)
    if versions["datasets"] is None:
        sentence = "datasets is not installed, so `fp8booster train --data` reads plain text only."
        yield Problem(sentence, "pip install 'fp8booster[data]'", False)
