"""`TrainOptions`, the settings of a run: their flags, defaults and checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fp8booster.levels import LEVELS, level
from fp8booster.monitor.watchdog import ON_NONFINITE
from fp8booster.reading import require_fields, require_known
from fp8booster.training.batches import GlobalBatch
from fp8booster.training.models import SIZES
from fp8booster.training.optimizers import OPTIMIZERS
from fp8booster.training.parallel import MODES_OF_OWN_RANKS, MODES_OF_TENSOR_RANKS, PLUGINS, WITH_MASTERS, Parallel

PRECISIONS = {"bf16": ("bf16",), "fp8": ("fp8",), "compare": ("bf16", "fp8")}
"""The runs, in order, of each value of `--precision`."""

FUSED_IN_BF16 = ("low_level_zero", "ddp")
"""The plugins under which a model that is fused can train in BF16."""

WITH_ADAPTERS = ("low_level_zero", "ddp", "fsdp")
"""The plugins whose runs can have `--lora`."""

PROGRESS = ("auto", "bar", "lines", "none")

PANELS = {"model": "Model and data", "precision": "Training", "plugin": "Machine", "out": "Run"}
"""The parts of `fp8booster train --help`, by the field of `TrainOptions` that each begins with."""

MOST_PROCESSES = 2**16
"""The most of a run, or of a plan."""

Rule = tuple[Callable[[Any], bool], str]
"""A test of a value, and the allowed values in words."""


def at_least(least: float) -> Rule:
    return lambda value: value >= least, f"at least {least}"


def finite(least: float) -> Rule:
    return lambda value: least <= value < math.inf, f"finite and at least {least}"


def above(least: float) -> Rule:
    return lambda value: least < value < math.inf, f"finite and above {least}"


def within(least: int, most: int) -> Rule:
    return lambda value: least <= value <= most, f"at least {least}, and at most {most}"


def one_of(allowed: Any) -> Rule:
    return lambda value: value in allowed, "one of " + ", ".join(str(choice) for choice in allowed)


_PROCESSES = within(1, MOST_PROCESSES)
_STEPS = within(1, 10**12)


def _option(
    help: str, value: Any = None, *, rule: Rule | None = None, shown: str = "", flags: tuple[str, ...] = ()
) -> Any:
    """Return a field with its flag.

    Args:
        value: the default; None: it comes from the model and the machine.
        shown: the default for `--help`, where `value` does not say it.
        flags: where not the field's name alone.
    """
    default = shown or ("no" if value is False else str(value))
    help = f"{help} (default: {default})." if value != () else f"{help}; may be repeated."
    return dataclasses.field(default=value, metadata={"help": help, "rule": rule, "flags": flags})


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """All settings of one run. A field that is None gets its value from the model and the machine (`defaults.py`)."""

    model: str = _option(f"{', '.join(SIZES)}, or a folder with a Hugging Face config or checkpoint", "tiny")
    data: str | None = _option("Text, JSON-lines or Parquet file, folder or saved dataset", shown="Python's sources")
    text_column: str = _option("Column with the text in tables", "text")
    vocabulary: int | None = _option(
        "Tokens of a tokenizer that is trained, where the model has none", rule=within(272, 2**24), shown="by model"
    )
    cache: str | None = _option("Folder for tokenizers and token files", shown="~/.cache/fp8booster")

    precision: str = _option(
        f"{', '.join(PRECISIONS)}; compare: BF16, then FP8, same seed and batches", "compare", rule=one_of(PRECISIONS)
    )
    steps: int | None = _option("Optimizer steps", rule=_STEPS, shown="by model; on a CPU what 150 seconds allow")
    batch: int | None = _option("Sequences of a micro-batch of a replica", rule=within(1, 2**20), shown="by model")
    accumulate: int = _option(
        "Micro-batches of an optimizer step, accumulated or passed through a pipeline",
        1,
        rule=within(1, 2**12),
        flags=("--accumulate", "--micro-batches"),
    )
    sequence: int | None = _option("Tokens of a sequence", rule=within(2, 2**24), shown="by model")
    packing: bool = _option("Let tokens attend to their own document alone, in sequences with several", False)
    lr: float | None = _option("Highest learning rate", rule=above(0), shown="by model")
    warmup: int | None = _option("Steps of linear warm-up", rule=within(0, 10**12), shown="a tenth of the steps")
    decay: int | None = _option("Step at which the cosine decay ends", rule=_STEPS, shown="the last")
    min_lr: float | None = _option("Learning rate after the decay", rule=finite(0), shown="lr / 10")
    level: str | None = _option(
        f"{', '.join(LEVELS)}: what the FP8 run sends and keeps in FP8 and in 8 bits; other options win",
        rule=one_of(LEVELS),
        shown="none",
    )
    optimizer: str | None = _option(
        f"{', '.join(OPTIMIZERS)}; the last has moments of one byte each",
        rule=one_of(OPTIMIZERS),
        shown="that of --level, else adamw",
    )
    weight_decay: float = _option("AdamW's weight decay", 0.1, rule=finite(0))
    max_norm: float = _option("Clip gradients to this norm; 0: do not", 1.0, rule=at_least(0))
    seed: int = _option("Seed of weights and batches", 0, rule=within(0, 2**32 - 1))  # NumPy takes no more
    checkpointing: bool = _option("Recompute activations in the backward pass", False)
    checkpointed_layers: int | None = _option(
        "Of the first so many layers, with --checkpointing", rule=at_least(1), shown="all"
    )
    lora: int | None = _option(
        "Rank of LoRA adapters, which train alone; in FP8 the frozen weights take one byte a value",
        rule=within(1, 2**16),
        shown="none: all weights train",
    )
    lora_alpha: float | None = _option("LoRA's alpha: alpha / rank scales adapters", rule=above(0), shown="2 * rank")
    lora_targets: str | None = _option("Layers with adapters, as q_proj,v_proj, or all-linear", shown="all-linear")
    deterministic: bool = _option("Deterministic kernels only, at some cost", False)

    plugin: str = _option(f"Colossal-AI plugin: {', '.join(PLUGINS)}", "low_level_zero")
    stage: int | None = _option(
        "ZeRO stage: low_level_zero 1, 2, hybrid 0, 1, 2, moe 0, 1",
        shown="2; hybrid, moe 1",
        flags=("--stage", "--zero"),
    )
    tp: int = _option("Tensor parallel ranks: gemini, hybrid, moe", 1, rule=_PROCESSES)
    pp: int = _option("Pipeline stages: hybrid, moe", 1, rule=_PROCESSES)
    sp: int = _option(f"Ranks of a sequence in --sp-mode {' and '.join(MODES_OF_OWN_RANKS)}", 1, rule=_PROCESSES)
    sp_mode: str | None = _option(
        f"Sequence parallelism: hybrid; {', '.join(MODES_OF_TENSOR_RANKS)} among --tp ranks, "
        f"{', '.join(MODES_OF_OWN_RANKS)} among --sp",
        shown="none",
    )
    ep: int = _option("Ranks over which the experts of a mixture are spread: moe", 1, rule=_PROCESSES)
    plugin_options: tuple[str, ...] = _option(
        "key=value for the plugin's constructor, as pp_style=zbv (zero-bubble) or pp_style=interleaved with --pp",
        (),
        flags=("--plugin-option",),
    )
    fp8_options: tuple[str, ...] = _option("key=value for FP8Config, as scaling=rowwise", (), flags=("--fp8-option",))
    nproc: int | None = _option(
        "Processes to start, when not under torchrun", rule=_PROCESSES, shown="one a GPU; without a GPU 2"
    )

    out: str | None = _option("Folder of the run", shown="runs/<model>-<precision>-<time>")
    save: int = _option("Steps between checkpoints; 0: only at the end", 0, rule=at_least(0))
    keep: int = _option("Newest checkpoints that stay on disk; 0: all", 2, rule=at_least(0))
    save_codes: bool = _option("Save 8-bit moments as they are, in place of Colossal-AI's FP32 states", False)
    record: int = _option(
        "Steps between samples of what FP8 does to each tensor, kept in scales.jsonl; 0: none", 0, rule=at_least(0)
    )
    on_nonfinite: str = _option(
        f"{', '.join(ON_NONFINITE)}: end, leave out or take a step whose loss or gradients are NaN or infinite",
        "raise",
        rule=one_of(ON_NONFINITE),
    )
    progress: str = _option(", ".join(PROGRESS), "auto", rule=one_of(PROGRESS))

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, rule = getattr(self, field.name), field.metadata["rule"]
            if value is not None and rule is not None and not rule[0](value):
                raise ValueError(f"--{field.name.replace('_', '-')} is {value!r}; it must be {rule[1]}.")
        if self.lr is not None and self.min_lr is not None and self.min_lr > self.lr:
            raise ValueError(f"--min-lr is {self.min_lr}, above --lr {self.lr}; give one at or below it.")
        if self.precision == "bf16":
            for name, value in _OF_FP8.items():
                if getattr(self, name) != value:
                    flag, given = flag_of(name), getattr(self, name)
                    shown = " ".join(given) if isinstance(given, tuple) else given
                    raise ValueError(
                        f"{flag} {shown} is of runs in FP8; give --precision fp8 or compare, or leave it out."
                    )
        self.parallel.check()
        self._check_lora()
        if self.checkpointed_layers is not None and (self.pp > 1 or not self.checkpointing):
            raise ValueError(
                f"--checkpointed-layers {self.checkpointed_layers} takes --checkpointing, and all layers on one rank; "
                "give it, and leave --pp out."
            )
        if self.packing and "bf16" in PRECISIONS[self.precision] and self.plugin not in FUSED_IN_BF16:
            raise ValueError(
                f"--packing is done by fused attention, which runs in BF16 have with --plugin "
                f"{' and '.join(FUSED_IN_BF16)} alone; give one of them, or --precision fp8."
            )
        if self.save_codes and not any(map(self.saves_codes, PRECISIONS[self.precision])):
            raise ValueError(
                "--save-codes is for moments in 8 bits that ranks save by themselves; give --optimizer adamw-8bit or a "
                f"--level with it, and --plugin {' or '.join(WITH_MASTERS)}, or --no-save-codes."
            )

    def _check_lora(self) -> None:
        """Raise ValueError for options of adapters without adapters, and for a plugin that does not train them."""
        if self.lora is None:
            for name in ("lora_alpha", "lora_targets"):
                if getattr(self, name) is not None:
                    raise ValueError(f"--{name.replace('_', '-')} is about adapters; give their rank as --lora.")
        elif self.plugin not in WITH_ADAPTERS:
            raise ValueError(
                f"--lora does not train with --plugin {self.plugin}; give --plugin {' or '.join(WITH_ADAPTERS)}."
            )
        elif self.plugin == "fsdp" and "bf16" in PRECISIONS[self.precision]:
            raise ValueError(
                "FSDP shards no layer of which a part is frozen in 16 bits; give --lora with --precision fp8, where "
                "what is frozen stays whole on each rank, or with another --plugin."
            )

    def of_precision(self, precision: str) -> TrainOptions:
        """Return the options of the run in one precision, without those of others alone."""
        return dataclasses.replace(self, precision=precision, **(_OF_FP8 if precision == "bf16" else {}))

    @property
    def recomputed(self) -> bool | int:
        """True, or the number of layers, where activations are computed again in backward."""
        return self.checkpointed_layers or self.checkpointing

    def saves_codes(self, precision: str) -> bool:
        """Tell whether the run in one precision saves codes of moments."""
        return self.save_codes and self.optimizer_of(precision) == "adamw-8bit" and self.plugin in WITH_MASTERS

    def optimizer_of(self, precision: str) -> str:
        """Return the optimizer's name in a run in one precision; a level has one for FP8."""
        if self.optimizer is not None or self.level is None or precision != "fp8":
            return self.optimizer or "adamw"
        of_level = level(self.level).optimizer
        return next(name for name, kind in OPTIMIZERS.items() if kind is of_level)

    @property
    def parallel(self) -> Parallel:
        """The division of model and data among the ranks."""
        return Parallel(
            plugin=self.plugin,
            zero=self.stage,
            tp=self.tp,
            pp=self.pp,
            sp=self.sp,
            sp_mode=self.sp_mode,
            ep=self.ep,
            micro_batches=self.accumulate,
        )

    def global_batch(self, world_size: int) -> GlobalBatch:
        """Return the division of a step among `world_size` processes, from resolved options.

        Raises ValueError when the processes or the sequence cannot be divided as the options want.
        """
        self.parallel.require_sequence(self.sequence)
        return GlobalBatch(
            sequence=self.sequence,
            batch=self.batch,
            accumulate=self.accumulate,
            replicas=self.parallel.replicas(world_size),
        )

    @classmethod
    def from_file(cls, values: dict[str, Any], file: Path, remedy: str) -> TrainOptions:
        """Return options from their `dataclasses.asdict`, by way of the JSON in `file`.

        Raises ValueError for unknown options and for values of another type.
        """
        name = str(file)
        known = {field: _json_types(hint) for field, hint in get_type_hints(cls).items()}
        require_known(values, name, known)
        require_fields(values, name, {field: known[field] for field in values}, remedy)
        for pairs in ("plugin_options", "fp8_options"):
            if not all(isinstance(pair, str) for pair in values.get(pairs, ())):
                raise ValueError(f"{pairs!r} in {name} are not all text; {remedy}.")
        try:
            return cls(**{field: tuple(value) if isinstance(value, list) else value for field, value in values.items()})
        except ValueError as error:
            raise ValueError(f"The options in {name} are wrong ({error}); {remedy}.") from None


_OF_FP8: dict[str, Any] = {"level": None, "fp8_options": (), "record": 0}
"""Options of runs in FP8 alone, with their defaults."""


def flag_of(name: str) -> str:
    """Return the flag of a field of `TrainOptions`."""
    field = next(each for each in dataclasses.fields(TrainOptions) if each.name == name)
    return (field.metadata["flags"] or (f"--{name.replace('_', '-')}",))[0]


def _json_types(hint: Any) -> tuple[type, ...]:
    """Return the types of an option's value in JSON."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(list if get_origin(kind) is tuple else kind for kind in kinds)
