"""The plugin that trains, and the ranks that share a model; checked without Colossal-AI and without a GPU."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from dataclasses import dataclass

PLUGINS = {
    "low_level_zero": "LowLevelZeroPlugin",
    "gemini": "GeminiPlugin",
    "hybrid": "HybridParallelPlugin",
    "ddp": "TorchDDPPlugin",
    "fsdp": "TorchFSDPPlugin",
    "moe": "MoeHybridParallelPlugin",
}
"""Name: class, the same in `fp8booster.plugins` and in Colossal-AI."""

PARALLEL = {"gemini": ("tp",), "hybrid": ("tp", "pp", "sp"), "moe": ("tp", "pp", "ep")}
"""The sizes that a plugin takes; another plugin takes none."""

ZERO_STAGES = {"low_level_zero": (2, 1), "hybrid": (1, 0, 2), "moe": (1, 0)}
"""The stages that a plugin takes, its default first."""

WITH_MASTERS = ("low_level_zero", "hybrid", "moe")
"""The plugins whose optimizers keep masters that each rank saves by itself, and whose moments it can."""

MODES_OF_TENSOR_RANKS = ("split_gather", "ring")
"""Sequence parallelism among the tensor parallel ranks."""

MODES_OF_OWN_RANKS = ("all_to_all", "ring_attn")
"""Sequence parallelism among ranks of its own."""


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The division of model and data among the ranks of a run."""

    plugin: str = "low_level_zero"
    """A key of `PLUGINS`."""
    zero: int | None = None
    """ZeRO stage; None is the plugin's default."""
    tp: int = 1
    """Tensor parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    sp: int = 1
    """Ranks of their own that share a sequence; 1 where the tensor parallel ranks do (`MODES_OF_TENSOR_RANKS`)."""
    sp_mode: str | None = None
    """A mode of Colossal-AI's sequence parallelism."""
    ep: int = 1
    """Expert parallel ranks, among the replicas of what is not in experts."""
    micro_batches: int = 1
    """Of one optimizer step: gradient accumulation, or what a pipeline is filled with."""

    def check(self, plugins: Collection[str] = tuple(PLUGINS)) -> None:
        """Raise ValueError, with a sentence that says what to give, for a combination that no plugin of these takes."""
        if self.plugin not in plugins:
            raise ValueError(f"There is no plugin {self.plugin!r}; {suggestion(self.plugin, plugins)}")
        for name in ("tp", "pp", "sp", "ep"):
            size = getattr(self, name)
            if size < 1:
                raise ValueError(f"--{name} is {size}; it must be at least 1")
            if size > 1 and name not in PARALLEL.get(self.plugin, ()):
                able = [plugin for plugin in plugins if name in PARALLEL.get(plugin, ())]
                listed = " and ".join([", ".join(able[:-1]), able[-1]] if len(able) > 1 else able)
                verb = "do" if len(able) > 1 else "does"
                raise ValueError(f"--plugin {self.plugin} takes no --{name}; {listed} {verb}")
        self._check_zero()
        self._check_sequence_parallelism()
        if self.pp > self.micro_batches:
            raise ValueError(
                f"--pp is {self.pp} and --micro-batches {self.micro_batches}; a pipeline takes at least one "
                "micro-batch for each stage, and keeps busy with several"
            )

    def _check_zero(self) -> None:
        stages = ZERO_STAGES.get(self.plugin, ())
        if self.zero is not None and self.zero not in stages:
            allowed = " or ".join(map(str, sorted(stages))) or "none: leave it out"
            raise ValueError(f"--zero is {self.zero}; --plugin {self.plugin} takes {allowed}")
        if self.pp > 1 and self.zero == 2:
            raise ValueError("--zero is 2 and --pp more than 1; a pipeline goes with --zero 0 or 1")
        if self.ep > 1 and self.zero == 0:
            raise ValueError("--zero is 0 and --ep more than 1; experts on several ranks go with --zero 1")

    def _check_sequence_parallelism(self) -> None:
        if self.sp_mode is None:
            if self.sp > 1:
                raise ValueError("--sp needs --sp-mode, such as all_to_all")
            return
        if self.plugin != "hybrid":
            raise ValueError(f"--plugin {self.plugin} takes no --sp-mode; hybrid does")
        modes = (*MODES_OF_TENSOR_RANKS, *MODES_OF_OWN_RANKS)
        if self.sp_mode not in modes:
            raise ValueError(f"--sp-mode is {self.sp_mode!r}; use one of {', '.join(modes)}")
        if self.sp_mode in MODES_OF_TENSOR_RANKS:
            if self.tp == 1:
                raise ValueError(f"--sp-mode {self.sp_mode} shares sequences among --tp ranks; give --tp")
            if self.sp > 1:
                raise ValueError(f"--sp-mode {self.sp_mode} shares sequences among --tp ranks; leave --sp out")
        elif self.sp == 1:
            raise ValueError(f"--sp-mode {self.sp_mode} needs --sp, the number of ranks that share a sequence")

    @property
    def zero_stage(self) -> int | None:
        """Return the stage asked for, or the plugin's default; None for a plugin without stages."""
        return self.zero if self.zero is not None else ZERO_STAGES.get(self.plugin, (None,))[0]

    @property
    def sharing(self) -> int:
        """Return the number of ranks that read the same tokens, for together they hold one replica of the model."""
        return self.tp * self.pp * self.sp

    def replicas(self, world_size: int) -> int:
        """Return how many different batches `world_size` ranks take at once; raise ValueError if they do not divide."""
        if world_size % self.sharing:
            raise ValueError(
                f"{world_size} processes cannot be divided into groups of {self.sharing} (--tp {self.tp} x --pp "
                f"{self.pp} x --sp {self.sp}); change these sizes or the number of processes"
            )
        if (world_size // self.sharing) % self.ep:
            raise ValueError(
                f"--ep is {self.ep}, which cannot divide the {world_size // self.sharing} ranks that read different "
                "tokens; give another --ep or number of processes"
            )
        return world_size // self.sharing

    def require_sequence(self, length: int) -> None:
        """Raise ValueError for sequences that cannot be divided among the ranks that share them."""
        ranks = self.tp if self.sp_mode in MODES_OF_TENSOR_RANKS else self.sp
        # zigzag ring attention gives each rank a piece from either end
        pieces = 2 * ranks if self.sp_mode == "ring_attn" else ranks
        if length % pieces:
            raise ValueError(
                f"--sequence is {length}; with --sp-mode {self.sp_mode} among {ranks} ranks it must be a multiple of "
                f"{pieces}"
            )

    def describe(self) -> str:
        """Return the head of a result, such as "hybrid, stage 1, tp 2"."""
        parts = [self.plugin]
        if self.zero_stage is not None:
            parts.append(f"stage {self.zero_stage}")
        parts += [f"{name} {size}" for name in ("tp", "pp", "sp", "ep") if (size := getattr(self, name)) > 1]
        if self.sp_mode is not None:
            parts.append(self.sp_mode)
        return ", ".join(parts)


def suggestion(wrong: str, names: Iterable[str]) -> str:
    """Return the end of a sentence about a name that is not among `names`."""
    names = list(names)
    close = difflib.get_close_matches(wrong, names, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"there are {', '.join(names)}."
