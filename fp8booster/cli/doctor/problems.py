"""What is wrong or missing, whether it stops FP8 training, and the command that solves it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fp8booster.cli.doctor.environment import Colossal, Environment
from fp8booster.cli.doctor.products import Check
from fp8booster.cli.instructions import BEFORE_AMX, VARIABLE
from fp8booster.colossal.sharding import FAMILIES_OF_5, SHARDED_TRANSFORMERS

OLDEST_TORCH = (2, 11)
COLOSSALAI = "0.5.0"


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong or missing."""

    sentence: str
    remedy: str | None
    """The command that solves it, or None where a sentence says all there is to do."""
    stops_training: bool


def find_problems(environment: Environment, checks: list[Check], colossal: Colossal) -> list[Problem]:
    """Judge what was found, what stops training first."""
    found = [
        *_torch_problems(environment),
        *_product_problems(environment, checks),
        *_instruction_problems(environment),
        *_colossal_problems(environment, colossal),
        *_package_problems(environment),
    ]
    return sorted(found, key=lambda problem: not problem.stops_training)


def _torch_problems(environment: Environment) -> Iterator[Problem]:
    version = environment.versions["torch"]
    if _release(version) < OLDEST_TORCH:
        oldest = ".".join(map(str, OLDEST_TORCH))
        yield Problem(f"PyTorch {version} is older than {oldest}.", f"pip install --upgrade 'torch>={oldest}'", True)
    if environment.driver is not None and not environment.gpus:
        if environment.cuda is None:
            yield Problem(
                f"There is an NVIDIA driver ({environment.driver}), but PyTorch {version} was built for the CPU alone.",
                "pip uninstall -y torch && pip install torch==2.13.0",
                False,
            )
        else:
            yield Problem(
                f"There is an NVIDIA driver ({environment.driver}), but PyTorch sees no GPU; look at "
                f"CUDA_VISIBLE_DEVICES and whether the driver is new enough for CUDA {environment.cuda}.",
                "nvidia-smi",
                False,
            )
    if environment.gpus and "nccl" not in environment.backends:
        yield Problem("PyTorch has no NCCL, through which GPU processes train together.", None, True)
    if not environment.gpus and "gloo" not in environment.backends:
        yield Problem("PyTorch has no gloo, through which CPU processes train together.", None, True)


def _product_problems(environment: Environment, checks: list[Check]) -> Iterator[Problem]:
    trains_on = "cuda" if environment.gpus else "cpu"
    reasons = {}  # one sentence a device, though both kinds of product may fail
    for check in checks:
        if check.reason is not None:
            reasons.setdefault(check.device, check)
    for device, check in reasons.items():
        yield Problem(
            f"FP8 products ({check.formats}) do not run on {device}: {check.reason}.",
            None,
            device.startswith(trains_on),
        )


def _instruction_problems(environment: Environment) -> Iterator[Problem]:
    if environment.instructions is not None:
        yield Problem(
            f"{environment.instructions} `fp8booster train` does the same; other programs need the variable.",
            f"export {VARIABLE}={BEFORE_AMX}",
            False,
        )


def _colossal_problems(environment: Environment, colossal: Colossal) -> Iterator[Problem]:
    version = environment.versions["colossalai"]
    install = f"pip install --no-deps colossalai=={COLOSSALAI}"
    if version is None:
        yield Problem("colossalai is not installed, so there is no Booster and no plugin.", install, True)
        return
    if version != COLOSSALAI:
        yield Problem(f"colossalai is {version}; the patches were written for {COLOSSALAI}.", install, False)
    if colossal.error is not None:
        remedy = None if colossal.missing is None else f"pip install {colossal.missing}"
        yield Problem(f"colossalai {version} cannot be imported: {colossal.error}.", remedy, True)


def _package_problems(environment: Environment) -> Iterator[Problem]:
    versions = environment.versions
    transformers = versions["transformers"]
    if transformers is not None and transformers != SHARDED_TRANSFORMERS:
        yield Problem(
            f"transformers is {transformers}; plugins that shard models (tensor, sequence and pipeline parallelism) "
            f"shard those of {SHARDED_TRANSFORMERS}, and of transformers 5 {', '.join(FAMILIES_OF_5.values())}. "
            "LowLevelZero, Gemini, DDP and FSDP train with both.",
            f"pip install transformers=={SHARDED_TRANSFORMERS}",
            False,
        )
    if environment.gpus and versions["triton"] is None:
        yield Problem("triton is not installed, so casts take the slower torch path.", "pip install triton", False)
    if versions["datasets"] is None:
        yield Problem(
            "datasets is not installed, so `fp8booster train --data` reads plain text only.",
            "pip install 'fp8booster[data]'",
            False,
        )


def _release(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
