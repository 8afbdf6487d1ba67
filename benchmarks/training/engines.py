"""List the engines that are compared: fp8booster, and the peers by the names that `--against` takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

from benchmarks.training.built_engine import BuiltEngine
from benchmarks.training.job import Job
from fp8booster.colossal.compat.environment import CONNECTIONS

_WEIGHTS, _ADAPTERS = "all weights", "adapters"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One way to train the job's model."""

    label: str
    """For tables."""

    build: str
    """module:function under `benchmarks.training`, imported where it runs: not all can be imported everywhere."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """For that function."""

    needs: tuple[str, ...] = ()
    """Packages."""

    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that CUDA reads when it begins."""

    trains: tuple[str, ...] = (_WEIGHTS,)
    """What it can train."""

    def why_missing(self) -> str | None:
        """Return the reason why it cannot run here, or None."""
        missing = [package for package in self.needs if find_spec(package) is None]
        return f"{', '.join(missing)} is not installed" if missing else None

    def load(self) -> Callable[[Job, torch.device], BuiltEngine]:
        """The function that builds it on a rank where torch.distributed runs.

        To be called before the GPU is touched: CUDA reads its environment once.
        """
        module, function = self.build.split(":")
        build = partial(getattr(import_module(f"benchmarks.training.{module}"), function), **self.options)
        os.environ |= self.environment
        return build


_COLOSSAL = ("colossalai",)
_TORCHAO = ("torchao",)
_ACCELERATE = ("accelerate",)


def _native(label: str, plugin: str, **options: Any) -> Engine:
    return Engine(
        label=f"Colossal-AI {label}",
        build="colossal:native",
        options={"plugin": plugin, **options},
        needs=_COLOSSAL,
        # as colossalai itself has it (initialize.py:10), which fp8booster takes back
        environment={CONNECTIONS: "1"},
    )


def _torch(label: str, *needs: str, **options: Any) -> Engine:
    return Engine(label=label, build="fsdp2:fsdp2", options=options, needs=needs)


OURS = {
    "fp8booster-bf16": Engine(
        label="fp8booster, BF16", build="colossal:ours", options={"use_fp8": False}, needs=_COLOSSAL
    ),
    "fp8booster-bf16-fused": Engine(
        label="fp8booster, BF16, fused blocks",
        build="colossal:ours",
        options={"use_fp8": False, "fused": True},
        needs=_COLOSSAL,
    ),
    "fp8booster-fp8": Engine(
        label="fp8booster, FP8", build="colossal:ours", options={"use_fp8": True}, needs=_COLOSSAL
    ),
    "fp8booster-plain": Engine(
        label="fp8booster, FP8, one GPU without a plugin", build="plain:plain", trains=(_WEIGHTS, _ADAPTERS)
    ),
    "fp8booster-fsdp2": Engine(label="fp8booster, FP8, FSDP2 by fully_shard", build="fsdp2:ours"),
    "fp8booster-autocast": Engine(label="fp8booster, FP8, a loop under autocast", build="plain:autocast"),
    "fp8booster-trainer": Engine(
        label="fp8booster, FP8, Trainer", build="trainer:trainer", options={"use_fp8": True}, needs=_ACCELERATE
    ),
}
PEERS = {
    "colossal-low_level_zero": _native("LowLevelZero, BF16", "low_level_zero"),
    "colossal-gemini": _native("Gemini, BF16", "gemini"),
    "colossal-hybrid": _native("HybridParallel, BF16", "hybrid"),
    "colossal-moe": _native("MoeHybridParallel, BF16", "moe"),
    "colossal-ddp": _native("DDP, BF16", "ddp"),
    "colossal-fsdp": _native("FSDP, BF16", "fsdp"),
    "colossal-low_level_zero-fp8": _native("LowLevelZero, native FP8 repaired", "low_level_zero", use_fp8=True),
    "fsdp2": _torch("FSDP2, BF16"),
    "fsdp2-compile": _torch("FSDP2, BF16, compiled", compiled=True),
    "fsdp2-graphs": _torch('FSDP2, BF16, compiled, mode="reduce-overhead"', compiled=True, mode="reduce-overhead"),
    "torchao": _torch(
        "torchao tensorwise, FP8 all-gather, FSDP2, compiled", *_TORCHAO, compiled=True, float8="tensorwise"
    ),
    "torchao-rowwise": _torch("torchao rowwise, FSDP2, compiled", *_TORCHAO, compiled=True, float8="rowwise"),
    "trainer": Engine(label="Trainer, BF16", build="trainer:trainer", options={"use_fp8": False}, needs=_ACCELERATE),
    "peft-lora": Engine(
        label="peft, BF16, one GPU without a plugin", build="plain:peft_lora", needs=("peft",), trains=(_ADAPTERS,)
    ),
}
ENGINES = {**PEERS, **OURS}
"""By name, in the order of the turns and of the tables."""

PRECISIONS = {
    "bf16": ("fp8booster-bf16",),
    "bf16-fused": ("fp8booster-bf16-fused",),
    "fp8": ("fp8booster-fp8",),
    "both": ("fp8booster-bf16", "fp8booster-fp8"),
    "all": ("fp8booster-bf16", "fp8booster-bf16-fused", "fp8booster-fp8"),
    "plain": ("fp8booster-plain",),
    "fsdp2": ("fp8booster-fsdp2",),
    "trainer": ("fp8booster-autocast", "fp8booster-trainer"),
}
"""The engines that each value of `--precision` stands for."""

_ALL = "all"


def chosen(precision: str, against: list[str], *, lora: bool = False) -> list[str]:
    """Names of the engines of one run, in the order of `ENGINES`.

    Args:
        precision: a key of `PRECISIONS`.
        against: keys of `PEERS`; "all" is those that train what the run does.
        lora: the run trains adapters.

    Raises:
        ValueError: a name that none has, or an engine that does not train what the run does.
    """
    trained = _ADAPTERS if lora else _WEIGHTS
    able = [name for name, engine in ENGINES.items() if trained in engine.trains]
    if precision not in PRECISIONS:
        raise ValueError(f"--precision is {precision!r}; use one of {', '.join(PRECISIONS)}")
    for name in against:
        if name not in (*PEERS, _ALL):
            raise ValueError(f"no peer is called {name!r}; --against takes {', '.join(PEERS)} or {_ALL}")
    wanted = {*PRECISIONS[precision], *against}
    if _ALL in wanted:
        wanted.update(name for name in PEERS if name in able)
    unable = [name for name in ENGINES if name in wanted and name not in able]
    if unable and lora:
        raise ValueError(f"{unable[0]} trains no adapters; give --lora with --precision plain and --against peft-lora")
    if unable:
        raise ValueError(f"{unable[0]} trains adapters; give their rank as --lora")
    return [name for name in ENGINES if name in wanted]
