"""Describe what every engine of one run trains, and how."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.key_values import parse_pairs
from fp8booster.training.models import MODELS, Architecture
from fp8booster.training.optimizers import OPTIMIZERS
from fp8booster.training.parallel import PARALLEL, PLUGINS, Parallel
from fp8booster.training.plugins import with_chunks

MOE = "moe"


@dataclass(frozen=True, kw_only=True)
class Job:
    """One training step, repeated. Frozen and made of plain values, so that it can be sent as JSON.

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
    checkpointed_layers: int | None = None
    """With `checkpointing`, the first so many; None is all."""
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
    ep: int = 1
    """Expert parallel ranks, among the replicas of what is not in experts; for the plugin `MOE`."""
    sp_mode: str | None = None
    """A mode of Colossal-AI's sequence parallelism; None is none."""
    lazy: bool = False
    """Materialise weights where they are sharded, for a model that one GPU cannot hold."""
    plugin_options: tuple[str, ...] = ()
    """`key=value` pairs for the constructor of the plugin, ours and Colossal-AI's."""
    fp8_options: tuple[str, ...] = ()
    """`key=value` pairs for FP8Config."""
    record: int = 0
    """Steps between samples of what FP8 does to each tensor, of ours (`fp8booster.record`); 0 is none."""
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`, for engines of fp8booster; peers have torch's AdamW."""
    update_in_backward: bool = False
    """Of fp8booster's 8-bit moments; gradients are not clipped then."""
    lora: int | None = None
    """Rank of adapters on all linear layers of a frozen model, which alone train; None: all weights do."""
    tokens: TokenFile | None = None
    """Text to train on; None is random tokens."""
    held_out: float = 0.0
    """Share of the text, its end, that no step trains on."""
    kinds: tuple[tuple[str, TokenFile], ...] = ()
    """Names and texts of other kinds, to evaluate on."""
    evaluate_every: int = 0
    """Steps from one evaluation on these texts to the next; 0: after the last step alone."""
    forwards: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Names of ways to run the weights after the last step, besides as they trained and in plain BF16, and
    `key=value` pairs for FP8Config of each."""
    outlier: tuple[int, float] | None = None
    """An output channel of the middle layer's gate and up, and a factor on its initial weights."""
    gradient_scale: float | None = None
    """Factor on the loss, and on AdamW's eps, so that gradients are smaller and steps the same; none are clipped."""
    fp32_start: bool = False
    """Master weights begin between 16-bit values, as those of a model that was made in FP32."""
    lr: float = 1e-4
    max_norm: float = 1.0
    seed: int = 0
    device: str = "cuda"

    def __post_init__(self) -> None:
        for name, allowed in (("model", MODELS), ("plugin", PLUGINS), ("optimizer", OPTIMIZERS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"--{name} is {getattr(self, name)!r}; use one of {', '.join(allowed)}")
        for name in ("sequence", "micro_batch", "micro_batches", "steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"--held-out is {self.held_out}; give the share of the text, at least 0 and below 1")
        if self.outlier is not None and not 0 <= self.outlier[0] < self.architecture.feed_forward:
            raise ValueError(
                f"--outlier names channel {self.outlier[0]}; {self.model} has 0 to {self.architecture.feed_forward - 1}"
            )
        if self.gradient_scale is not None and not self.gradient_scale > 0:
            raise ValueError(f"--gradient-scale is {self.gradient_scale}; it must be above 0")
        if self.fp32_start and (self.plugin != "low_level_zero" or self.optimizer != "adamw"):
            raise ValueError("--fp32-start is for master weights in FP32: --plugin low_level_zero, --optimizer adamw")
        if self.update_in_backward and (self.optimizer != "adamw-8bit" or self.micro_batches > 1):
            raise ValueError("--update-in-backward goes with --optimizer adamw-8bit and --micro-batches 1")
        if self.lora is not None and self.lora < 1:
            raise ValueError(f"--lora is {self.lora}; it must be at least 1")
        if self.lora is not None and self.architecture.experts > 1:
            raise ValueError(f"--lora is not for mixtures of experts, as {self.model}; use another --model")
        if self.checkpointed_layers is not None and not (self.checkpointing and self.checkpointed_layers >= 1):
            raise ValueError("--checkpointed-layers takes --checkpointing, and 1 layer or more")
        if self.record < 0:
            raise ValueError(f"--record is {self.record}; give the steps between samples, or 0 for none")
        if self.evaluate_every < 0:
            raise ValueError(
                f"--evaluate-every is {self.evaluate_every}; give the steps between evaluations, or 0 for the end alone"
            )
        names = [name for name, _ in self.kinds]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"--kind has two texts named {twice[0]!r}; give each a name of its own, as NAME=PATH")
        if self.warm_up < 0:
            raise ValueError(f"--warm-up is {self.warm_up}; it must be at least 0")
        self.parallel(self.plugin).check()
        self._check_experts()
        if self.lazy and self.plugin not in PARALLEL:
            raise ValueError(
                f"--plugin {self.plugin} cannot make weights late: leave out --lazy, or use {', '.join(PARALLEL)}"
            )
        with_chunks(parse_pairs(self.plugin_options, "--plugin-option"), self.parallel(self.plugin))

    def _check_experts(self) -> None:
        experts = self.architecture.experts
        if self.plugin == MOE and experts == 1:
            mixtures = ", ".join(name for name, model in MODELS.items() if model.experts > 1)
            raise ValueError(f"--plugin {MOE} trains mixtures of experts; use --model {mixtures}")
        if experts % self.ep:
            raise ValueError(f"--ep is {self.ep}, which cannot divide the {experts} experts of a layer")

    @property
    def architecture(self) -> Architecture:
        return MODELS[self.model].shortened(self.layers)

    @property
    def recomputed(self) -> bool | int:
        """Return whether layers compute their activations again in backward, or how many do."""
        return self.checkpointed_layers or self.checkpointing

    @property
    def total_steps(self) -> int:
        """Warm-up and timed ones."""
        return self.warm_up + self.steps

    def parallel(self, plugin: str) -> Parallel:
        """Return how a plugin's ranks share model and data; the ZeRO stage is for the job's own plugin alone."""
        return Parallel(
            plugin=plugin,
            zero=self.zero if plugin == self.plugin else None,
            tp=self.tp,
            pp=self.pp,
            sp=self.sp,
            sp_mode=self.sp_mode,
            ep=self.ep,
            micro_batches=self.micro_batches,
        )

    @classmethod
    def from_options(cls, given: Mapping[str, Any], **fixed: Any) -> Job:
        """A job from a command's options that have the names of its fields, and from `fixed` fields."""
        names = {field.name for field in dataclasses.fields(cls)}
        lists = {f"{name}s": tuple(given.get(name, ())) for name in ("plugin_option", "fp8_option")}
        return cls(**{name: value for name, value in given.items() if name in names}, **lists, **fixed)

    def as_record(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self) | {
            "tokens": None if self.tokens is None else _as_record(self.tokens),
            "kinds": [[name, _as_record(tokens)] for name, tokens in self.kinds],
        }

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> Job:
        """The job that `as_record` wrote, by way of JSON."""
        values = {name: tuple(value) if isinstance(value, list) else value for name, value in record.items()}
        if values["tokens"] is not None:
            values["tokens"] = _from_record(values["tokens"])
        values["kinds"] = tuple((name, _from_record(tokens)) for name, tokens in values.get("kinds", ()))
        values["forwards"] = tuple((name, tuple(options)) for name, options in values.get("forwards", ()))
        return cls(**values)


def _as_record(tokens: TokenFile) -> dict[str, Any]:
    return dataclasses.asdict(tokens) | {"folder": str(tokens.folder)}


def _from_record(record: dict[str, Any]) -> TokenFile:
    return TokenFile(**record | {"folder": Path(record["folder"])})
