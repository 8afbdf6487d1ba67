"""What the ranks of the tests of `benchmarks.llama` do."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.training.engines import ENGINES, PRECISIONS
from benchmarks.training.job import Job
from benchmarks.training.launch import Crew, Turn

JOB = Job(
    model="micro",
    sequence=32,
    micro_batch=2,
    micro_batches=2,
    warm_up=1,
    steps=3,
    lr=1e-2,
    fp8_options=("emulate=true",),
    device="cpu",
)
MOE = replace(JOB, model="micro-mixtral", plugin="moe", ep=2)
RUNS = {
    "native": ("colossal-low_level_zero", JOB),
    "bf16": ("fp8booster-bf16", JOB),
    "bf16 fused": ("fp8booster-bf16-fused", JOB),
    "fp8": ("fp8booster-fp8", JOB),
    "8-bit moments": ("fp8booster-fp8", replace(JOB, optimizer="adamw-8bit")),
    "8-bit moments, updated in backward": (
        "fp8booster-fp8",
        replace(JOB, micro_batches=1, micro_batch=4, optimizer="adamw-8bit", update_in_backward=True),
    ),
    "stage 1": ("fp8booster-fp8", replace(JOB, zero=1)),
    "ddp": ("fp8booster-bf16", replace(JOB, plugin="ddp")),
    "ddp bf16 fused": ("fp8booster-bf16-fused", replace(JOB, plugin="ddp")),
    "ddp fp8": ("fp8booster-fp8", replace(JOB, plugin="ddp")),
    "checkpointing": ("fp8booster-bf16", replace(JOB, checkpointing=True)),
    "gemini": ("colossal-gemini", replace(JOB, micro_batches=1)),
    "tensor parallel": ("colossal-hybrid", replace(JOB, plugin="hybrid", tp=2)),
    "pipeline": ("colossal-hybrid", replace(JOB, plugin="hybrid", pp=2)),
    "zero-bubble pipeline": (
        "fp8booster-fp8",
        replace(JOB, layers=4, plugin="hybrid", pp=2, plugin_options=("pp_style=zbv",)),
    ),
    "cohere": ("colossal-low_level_zero", replace(JOB, model="micro-cohere")),
    "native moe": ("colossal-moe", MOE),
    "moe": ("fp8booster-bf16", MOE),
    "moe fp8": ("fp8booster-fp8", MOE),
    "moe, experts on each rank": ("fp8booster-fp8", replace(MOE, ep=1)),
    "fsdp2": ("fsdp2", JOB),
    "fsdp2 fp8": ("fp8booster-fsdp2", JOB),
}
"""Name: engine and job."""


def measure_all() -> dict[str, dict[str, Any]]:
    """Build and measure every run, one after the other; what failed has its reason."""
    from benchmarks.training.measure import measure
    from benchmarks.training.worker import _fused

    found = {}
    for name, (engine, job) in RUNS.items():
        built = ENGINES[engine].load()(job, torch.device("cpu"))
        found[name] = measure(built, job, torch.device("cpu"), None)
        found[name]["fused"] = _fused(built.model)
        del built
        gc.collect()
        dist.barrier()
    return found


def no_fused_model() -> str:
    """What is said of a plugin that takes no fused model."""
    try:
        ENGINES["fp8booster-bf16-fused"].load()(replace(JOB, plugin="gemini"), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    return "built"


def missing_plugin() -> str:
    """What is said of a plugin that `fp8booster.plugins` does not have."""
    import fp8booster.plugins

    name = "TorchDDPPlugin"
    former = vars(fp8booster.plugins).pop(name)
    try:
        ENGINES["fp8booster-fp8"].load()(replace(JOB, plugin="ddp"), torch.device("cpu"))
    except ValueError as error:
        return str(error)
    finally:
        setattr(fp8booster.plugins, name, former)
    return "built"


def measure_engines() -> tuple[dict[str, dict[str, Any]], list[str]]:
    return measure_all(), [missing_plugin(), no_fused_model()]


def take_turns() -> list[Turn]:
    """Turns of `llama_worker`, as each rank sees them."""
    crew = Crew("tests.benchmarks.llama_worker")
    turns = [
        crew.take_turn({"engine": task}, limit_s=limit, log=None)
        for task, limit in [
            ("well", 60),
            ("well", 60),
            ("fails on rank 1", 60),
            ("dies on rank 1", 60),
            ("its host dies on rank 1", 60),
            ("hangs", 2),
            ("well", 60),
        ]
    ]
    crew.close()
    return turns


def measure_plain() -> tuple[list[dict[str, Any]], str]:
    """Outcomes of one GPU without a plugin, and what it says of AdamW.

    They are of a micro-batch a step and of two; of adapters with either optimizer; of peft's adapters; and of a loop
    under autocast, the Trainer with FP8 and the Trainer in BF16.
    """
    from benchmarks.training.measure import measure
    from benchmarks.training.worker import facts_of

    build, device = ENGINES["fp8booster-plain"].load(), torch.device("cpu")
    jobs = [replace(JOB, micro_batches=count, optimizer="adamw-8bit") for count in (1, 2)]
    jobs += [replace(JOB, lora=16, steps=5, **more) for more in ({"checkpointing": True}, {"optimizer": "adamw-8bit"})]
    with pytest.raises(ValueError, match="updates in backward") as refused:
        build(replace(JOB, micro_batches=1, optimizer="adamw"), device)
    engines = [*((build, job) for job in jobs), (ENGINES["peft-lora"].load(), jobs[-1])]
    engines += [(ENGINES[name].load(), JOB) for name in (*PRECISIONS["trainer"], "trainer")]
    found = []
    for engine, job in engines:
        built = engine(job, device)
        found.append(measure(built, job, device, None) | facts_of(built.model))
    return found, str(refused.value)
