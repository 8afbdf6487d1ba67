"""What every engine of one run trains, and how."""

from __future__ import annotations

import ast
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.training.models import MODELS, Architecture
from fp8booster.cli.train.tokens import TokenFile

PLUGINS = {
    "low_level_zero": "LowLevelZeroPlugin",
    "gemini": "GeminiPlugin",
    "hybrid": "HybridParallelPlugin",
    "ddp": "TorchDDPPlugin",
    "fsdp": "TorchFSDPPlugin",
}
"""Name on the command line: class, the same in `fp8booster.plugins` and in Colossal-AI."""

PARALLEL = {"gemini": ("tp",), "hybrid": ("tp", "pp", "sp")}
"""The sizes that a plugin takes; another plugin takes none."""

ZERO_STAGES = {"low_level_zero": (2, 1), "hybrid": (1, 0, 2)}
"""The stages that a plugin takes, its default first."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training step, repeated. Frozen and made of plain values, so that it travels as JSON.

    Raises:
        ValueError: a value that is not allowed; the message says which are.
    """

    model: str = "7b"
    """A key of `MODELS`."""
    layers: int | None = None
    """Fewer or more layers than the model has."""
    sequence: int = 4096
    micro_batch: int = 2
    """Sequences that a model replica takes at once."""
    micro_batches: int = 1
    """Of one optimizer step: gradient accumulation, or what a pipeline is filled with."""
    checkpointing: bool = False
    warm_up: int = 4
    """Steps that are not timed."""
    steps: int = 8
    """Steps that are timed."""
    plugin: str = "low_level_zero"
    """A key of `PLUGINS`."""
    zero: int | None = None
    """ZeRO stage; None is the plugin's default."""
    tp: int = 1
    pp: int = 1
    sp: int = 1
    """With `sp_mode` "split_gather" or "ring" the tensor parallel ranks share the sequence, and this stays 1."""
    sp_mode: str | None = None
    """A mode of native's sequence parallelism; None is none."""
    lazy: bool = False
    """Materialise weights where they are sharded, for a model that one GPU cannot hold."""
    plugin_options: tuple[str, ...] = ()
    """`key=value` pairs for the constructor of the plugin, ours and native's."""
    fp8_options: tuple[str, ...] = ()
    """`key=value` pairs for FP8Config."""
    tokens: TokenFile | None = None
    """Text to train on; None is random tokens."""
    lr: float = 1e-4
    max_norm: float = 1.0
    seed: int = 0
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name, allowed in (("model", MODELS), ("plugin", PLUGINS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}")
        for name in ("sequence", "micro_batch", "micro_batches", "steps", "tp", "pp", "sp"):
            if getattr(self, name) < 1:
                raise ValueError(
                    f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1"
                )
        if self.warm_up < 0:
            raise ValueError(f"--warm-up is {self.warm_up}; it must be at least 0")
        for name in ("tp", "pp", "sp"):
            if getattr(self, name) > 1 and name not in PARALLEL.get(self.plugin, ()):
                able = ", ".join(plugin for plugin, sizes in PARALLEL.items() if name in sizes)
                raise ValueError(f"--plugin {self.plugin} takes no --{name}; {able} does")
        if self.sp > 1 and self.sp_mode is None:
            raise ValueError("--sp needs --sp-mode, such as all_to_all")
        if self.sp_mode is not None and self.plugin != "hybrid":
            raise ValueError(f"--plugin {self.plugin} takes no --sp-mode; hybrid does")
        if self.zero is not None and self.zero not in ZERO_STAGES.get(self.plugin, ()):
            stages = " or ".join(map(str, sorted(ZERO_STAGES.get(self.plugin, ()))))
            raise ValueError(
                f"--zero is {self.zero}; --plugin {self.plugin} takes " + (stages or "none: leave it out")
            )
        if self.lazy and self.plugin not in PARALLEL:
            raise ValueError(
                f"--plugin {self.plugin} cannot make weights late: leave out --lazy, or use {', '.join(PARALLEL)}"
            )
        parse_options(self.plugin_options)

    @property
    def architecture(self) -> Architecture:
        return MODELS[self.model].shortened(self.layers)

    @property
    def total_steps(self) -> int:
        """Warm-up and timed ones."""
        return self.warm_up + self.steps

    def zero_stage(self, plugin: str) -> int:
        """The stage of a plugin that has stages: the one asked for where it is the job's plugin, else its default."""
        return self.zero if self.zero is not None and plugin == self.plugin else ZERO_STAGES[plugin][0]

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {"tokens": None if self.tokens is None else _as_record(self.tokens)}

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Job:
        """The job that `as_record` wrote, by way of JSON."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
        if values["tokens"] is not None:
            values["tokens"] = TokenFile(**values["tokens"] | {"folder": Path(values["tokens"]["folder"])})
        return cls(**values)


def _as_record(tokens: TokenFile) -> dict[str, Any]:
    return dataclasses.asdict(tokens) | {"folder": str(tokens.folder)}


def parse_options(pairs: tuple[str, ...]) -> dict[str, Any]:
    """`key=value` pairs as arguments: Python literals, true and false, else strings.

    Raises:
        ValueError: a pair without `=`.
    """
    arguments = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--plugin-option {pair!r} has no '='; write it as key=value")
        try:
            arguments[key] = ast.literal_eval(text.title() if text in ("true", "false") else text)
        except (ValueError, SyntaxError):
            arguments[key] = text
    return arguments
