"""Runs of the ranks in the tests of `fp8booster train --plugin`."""

from __future__ import annotations

import dataclasses
import gc
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fp8booster.cli.train.data import TokenFile
from fp8booster.cli.train.launch import Task
from fp8booster.cli.train.options import TrainOptions
from fp8booster.monitor.sinks import FILE, read_scales

STEPS, SAVED, SAMPLED = 4, 2, 2

MODES: dict[str, dict[str, Any]] = {
    "low_level_zero": {"batch": 2},
    "gemini": {"plugin": "gemini", "batch": 2},
    "gemini, accumulating": {"plugin": "gemini", "batch": 1, "accumulate": 2},
    "gemini, TP": {"plugin": "gemini", "tp": 2, "batch": 4},
    "hybrid, ZeRO": {"plugin": "hybrid", "batch": 2},
    "hybrid, TP": {"plugin": "hybrid", "tp": 2, "stage": 0, "batch": 4},
    "hybrid, TP, sequence": {"plugin": "hybrid", "tp": 2, "sp_mode": "split_gather", "batch": 4},
    "hybrid, SP": {"plugin": "hybrid", "sp": 2, "sp_mode": "all_to_all", "batch": 4},
    "hybrid, PP": {"plugin": "hybrid", "pp": 2, "batch": 2, "accumulate": 2},
    "ddp": {"plugin": "ddp", "batch": 1, "accumulate": 2},
    "fsdp": {"plugin": "fsdp", "batch": 2},
    "low_level_zero, 8 bits": {"batch": 2, "optimizer": "adamw-8bit"},
    "low_level_zero, codes": {"batch": 2, "optimizer": "adamw-8bit", "save_codes": True},
    "hybrid, TP, codes": {"plugin": "hybrid", "tp": 2, "stage": 0, "batch": 4, "level": "O2", "save_codes": True},
    "fsdp, 8 bits": {"plugin": "fsdp", "batch": 2, "optimizer": "adamw-8bit"},
}
"""On two ranks, each with the same four sequences a step."""

REMEMBERING: dict[str, dict[str, Any]] = {
    "low_level_zero, delayed": {"batch": 2, "fp8_options": ("scaling=delayed", "always=true")},
    "low_level_zero, smooth": {"batch": 2, "fp8_options": ("scaling=smooth-swiglu", "always=true")},
    "low_level_zero, automatic": {"batch": 2, "fp8_options": ("messages.automatic_scaling=true",)},
}
"""Where scaling remembers earlier steps."""

SHORT: dict[str, dict[str, Any]] = {
    "low_level_zero, packed": {"batch": 2, "packing": True},
    "low_level_zero, joined": {"batch": 2},
}
"""On documents shorter than a sequence."""

_PIPELINE = {"plugin": "hybrid", "pp": 2, "batch": 2, "accumulate": 2}
DEEP_MODES: dict[str, dict[str, Any]] = {
    f"hybrid, PP, {style}": {**_PIPELINE, "plugin_options": (f"pp_style={style}",)} for style in ("interleaved", "zbv")
}
"""The same with a model of four layers: a stage holds two pieces of it."""

TIED_MODES: dict[str, dict[str, Any]] = {
    f"{name}, tied": MODES[name] for name in ("low_level_zero", "gemini", "hybrid, TP")
}
"""The same with a model whose head is its embeddings."""

_EXPERTS = {"plugin": "moe", "ep": 2, "batch": 2}
MIXTURE_MODES: dict[str, dict[str, Any]] = {
    "moe": _EXPERTS,
    "moe, codes": {**_EXPERTS, "optimizer": "adamw-8bit", "save_codes": True},
}
"""A mixture whose experts are spread over the ranks."""

ADAPTED: dict[str, dict[str, Any]] = {
    f"{name}, LoRA": {**mode, "lora": 16, "lora_targets": "q_proj,down_proj"}
    for name, mode in {
        "low_level_zero": MODES["low_level_zero"],
        "ddp": MODES["ddp"],
        "fsdp": {**MODES["fsdp"], "precision": "fp8"},
    }.items()
}
"""Where adapters train on a frozen model."""

UNPACKED = "low_level_zero, not fused"
"""Where sequences cannot be packed."""

DEEP = "low_level_zero, deep"
"""What they are compared with, in BF16."""


class Said:
    """The events of a rank."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def show(self, kind: str, **values: Any) -> None:
        self.events.append({"kind": kind, **values})


def train_each(options: TrainOptions, tokens: TokenFile, short: TokenFile, folder: str) -> dict[str, dict[str, Any]]:
    """Train in every mode in FP8, from the start and from the checkpoint in the middle, and some modes in BF16.

    By mode and kind of run: its steps and its folder, or the traceback.
    """
    import fp8booster.colossal  # noqa: F401  isort: skip
    import colossalai

    from fp8booster.cli.train.loop import Trainer
    from fp8booster.monitor.traffic import count_traffic

    colossalai.launch_from_torch(seed=options.seed, verbose=False)
    found: dict[str, dict[str, Any]] = {}
    modes = dict(MODES)
    for name, mode in {**DEEP_MODES, DEEP: MODES["low_level_zero"]}.items():
        modes[name] = {**mode, "model": f"{options.model}-deep"}

    modes |= ADAPTED | REMEMBERING | SHORT | {UNPACKED: {"batch": 2, "packing": True, "fp8_options": ("fused=false",)}}
    for kind, of_kind in {"tied": TIED_MODES, "mixture": MIXTURE_MODES}.items():
        for name, mode in of_kind.items():
            modes[name] = {**mode, "model": f"{options.model}-{kind}"}

    def train(name: str, precision: str, resume: str | None = None) -> None:
        kind = "resumed" if resume else precision
        out = Path(folder, name, kind)
        task = Task(
            options=dataclasses.replace(options, out=str(out), record=SAMPLED, **modes[name]),
            precision=precision,
            tokens=short if name in SHORT else tokens,
            resume=resume,
        )
        task.folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        colossalai.utils.set_seed(options.seed)
        said, sampled = Said(), {}

        def show(kind: str, **values: Any) -> None:
            said.show(kind, **values)
            # of what a kill right after a checkpoint leaves
            if kind == "checkpoint" and precision == "fp8":
                sampled[values["step"]] = {row.step for row in read_scales(task.folder / FILE)[1]}

        try:
            with count_traffic() as traffic:
                Trainer(task, show, lambda: False, traffic).run()
            steps = [event for event in said.events if event["kind"] == "step"]
            found.setdefault(name, {})[kind] = {"steps": steps, "folder": str(task.folder), "sampled": sampled}
        except Exception:
            found.setdefault(name, {})[kind] = {"failed": traceback.format_exc()}
        gc.collect()
        dist.barrier()

    for name in (*MODES, *DEEP_MODES, *TIED_MODES, *MIXTURE_MODES, *ADAPTED, *REMEMBERING, *SHORT):
        train(name, "fp8")
        train(name, "fp8", f"{folder}/{name}/fp8/fp8/checkpoints/step-{SAVED:08d}")
    for name in ("low_level_zero", "low_level_zero, packed", "low_level_zero, LoRA", DEEP, "ddp"):
        train(name, "bf16")
    train(UNPACKED, "fp8")
    return found
