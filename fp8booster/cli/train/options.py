"""What a run is asked to do: `TrainOptions` and its checks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from fp8booster.reading import require_fields, require_known
from fp8booster.training import parallel
from fp8booster.training.batches import GlobalBatch
from fp8booster.training.parallel import Parallel

PRECISIONS = {"bf16": ("bf16",), "fp8": ("fp8",), "compare": ("bf16", "fp8")}
"""The runs, in order, that each value of `--precision` stands for."""

PLUGINS = tuple(name for name in parallel.PLUGINS if name != "moe")
"""The plugins whose runs can be saved and resumed."""

PROGRESS = ("auto", "bar", "lines", "none")


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """All settings of one run. A field that is None gets its value from the model and the machine (`defaults.py`)."""

    model: str = "tiny"
    """A size from `training.models.LLAMAS`, or a folder with a Hugging Face config or checkpoint."""
    data: str | None = None
    """A file, a folder or a saved dataset; None: the sources of Python's standard library."""
    text_column: str = "text"
    """Column that holds the text in JSON lines, Parquet and saved datasets."""
    vocabulary: int | None = None
    """Size of the tokenizer that is trained on the data when the model's folder brings none."""
    cache: str | None = None
    """Folder for tokenizers and token files; None: the user's cache folder."""
    out: str | None = None
    """Folder of the run."""
    plugin: str = "low_level_zero"
    """One of PLUGINS."""
    stage: int | None = None
    """ZeRO stage; None: the plugin's default."""
    tp: int = 1
    """Tensor parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    sp: int = 1
    """Ranks of their own that share a sequence."""
    sp_mode: str | None = None
    """A mode of Colossal-AI's sequence parallelism."""
    plugin_options: tuple[str, ...] = ()
    """`key=value` pairs for the plugin's constructor."""
    fp8_options: tuple[str, ...] = ()
    """`key=value` pairs for FP8Config."""
    precision: str = "compare"
    """A key of PRECISIONS."""
    steps: int | None = None
    """Optimizer steps."""
    batch: int | None = None
    """Sequences a replica of the model takes at once."""
    accumulate: int = 1
    """Micro-batches for each optimizer step, accumulated or passed through a pipeline."""
    sequence: int | None = None
    """Tokens of a sequence."""
    lr: float | None = None
    """Highest learning rate."""
    warmup: int | None = None
    """Steps of linear warm-up."""
    decay: int | None = None
    """Step at which the cosine reaches `min_lr`."""
    min_lr: float | None = None
    """Learning rate at the end of the decay."""
    weight_decay: float = 0.1
    max_norm: float = 1.0
    """Gradients are clipped to this norm; 0: not clipped."""
    seed: int = 0
    nproc: int | None = None
    """Processes on this machine, when the command starts them itself."""
    save: int = 0
    """Steps between checkpoints; 0: only at the end."""
    timeout: float | None = None
    """Seconds without a step after which a rank that hangs is named and the run ends; 0: never. None: `watch.SHORTEST`,
    or ten times the longest step."""
    keep: int = 2
    """Newest checkpoints that stay on disk; 0: all."""
    checkpointing: bool = False
    """Recompute activations in the backward pass."""
    deterministic: bool = False
    """Use deterministic kernels only."""
    progress: str = "auto"
    """One of PROGRESS."""

    def __post_init__(self) -> None:
        for name, is_allowed, requirement in _RULES:
            value = getattr(self, name)
            if value is not None and not is_allowed(value):
                flag = "--" + name.replace("_", "-")
                raise ValueError(f"{flag} is {value!r}; it must be {requirement}.")
        if self.lr is not None and self.min_lr is not None and self.min_lr > self.lr:
            raise ValueError(f"--min-lr is {self.min_lr}, above --lr {self.lr}; give one at or below it.")
        self.parallel.check(PLUGINS)

    @property
    def parallel(self) -> Parallel:
        """How ranks share model and data."""
        return Parallel(
            plugin=self.plugin,
            zero=self.stage,
            tp=self.tp,
            pp=self.pp,
            sp=self.sp,
            sp_mode=self.sp_mode,
            micro_batches=self.accumulate,
        )

    def global_batch(self, world_size: int) -> GlobalBatch:
        """How a step is spread over `world_size` processes; for resolved options.

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
    def from_mapping(cls, values: dict[str, Any]) -> TrainOptions:
        """Options from what `dataclasses.asdict` made of them, by way of JSON."""
        return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})

    @classmethod
    def from_file(cls, values: dict[str, Any], file: Path, remedy: str) -> TrainOptions:
        """`from_mapping` of what `file` holds. Raises ValueError for options that are none, or not of their type."""
        name = str(file)
        known = {field: _json_types(hint) for field, hint in get_type_hints(cls).items()}
        require_known(values, name, known)
        require_fields(values, name, {field: known[field] for field in values}, remedy)
        for pairs in ("plugin_options", "fp8_options"):
            if not all(isinstance(pair, str) for pair in values.get(pairs, ())):
                raise ValueError(f"{pairs!r} in {name} are not all text; {remedy}.")
        try:
            return cls.from_mapping(values)
        except ValueError as error:
            raise ValueError(f"The options in {name} are wrong ({error}); {remedy}.") from None


def _json_types(hint: Any) -> tuple[type, ...]:
    """The types of an option's value in JSON."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(list if get_origin(kind) is tuple else kind for kind in kinds)


def _at_least(least: float) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value >= least, f"at least {least}"


def _finite(least: float, itself: bool) -> tuple[Callable[[Any], bool], str]:
    """From `least` on, with or without it `itself`."""
    return (
        lambda value: math.isfinite(value) and (value >= least if itself else value > least),
        f"finite and {'at least' if itself else 'above'} {least}",
    )


def _within(least: int, most: int) -> tuple[Callable[[Any], bool], str]:
    return lambda value: least <= value <= most, f"from {least} to {most}"


def _one_of(allowed: Any) -> tuple[Callable[[Any], bool], str]:
    return lambda value: value in allowed, "one of " + ", ".join(str(choice) for choice in allowed)


_RULES = [
    ("precision", *_one_of(PRECISIONS)),
    ("progress", *_one_of(PROGRESS)),
    ("steps", *_at_least(1)),
    ("batch", *_at_least(1)),
    ("accumulate", *_at_least(1)),
    ("sequence", *_at_least(2)),
    ("vocabulary", *_at_least(272)),
    ("lr", *_finite(0, itself=False)),
    ("min_lr", *_finite(0, itself=True)),
    ("warmup", *_at_least(0)),
    ("decay", *_at_least(1)),
    ("weight_decay", *_finite(0, itself=True)),
    ("max_norm", *_at_least(0)),
    ("seed", *_within(0, 2**32 - 1)),  # what NumPy takes
    ("nproc", *_at_least(1)),
    ("save", *_at_least(0)),
    ("timeout", *_finite(0, itself=True)),
    ("keep", *_at_least(0)),
]
