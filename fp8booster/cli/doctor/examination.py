"""The whole examination: what was found, and the problems that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from fp8booster.cli.doctor import products
from fp8booster.cli.doctor.environment import Colossal, Environment, import_colossal, look_around
from fp8booster.cli.doctor.problems import Problem, find_problems


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
        """Whether FP8 training can run here: no problem stops it."""
        return not any(problem.stops_training for problem in self.problems)


def examine(speed: bool, announce: Callable[[str], object]) -> Examination:
    """Look at versions, devices, FP8 products and Colossal-AI; `announce` hears what is being done."""
    environment = look_around()
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
    colossal = import_colossal()
    return Examination(environment, checks, speeds, colossal, find_problems(environment, checks, colossal))
