"""One rank of one engine's turn, in a process that `host.serve` forks: `python -m benchmarks.training.worker`."""

from __future__ import annotations

import faulthandler
import json
import os
import time
import traceback
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.training.engines import ENGINES
from benchmarks.training.host import serve
from benchmarks.training.job import Job
from benchmarks.training.measure import measure

PRELOADED = ("torch._inductor.compile_fx", "torch.distributed.fsdp", "transformers.models.llama.modeling_llama", "peft")
"""What engines import that takes seconds. Not colossalai: it asks for the current GPU (gemini_optimizer.py:578), and
fp8booster changes it, which a peer must not see."""


def run(task: dict[str, Any]) -> dict[str, Any]:
    """Build the task's engine and measure it; every rank does it at once."""
    job = Job.from_record(task["job"])
    build = ENGINES[task["engine"]].load()
    cuda = job.device == "cuda"
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    began = time.perf_counter()
    dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=task["limit_s"]))
    built = build(job, device)
    ready = time.perf_counter()
    trace = None if task["trace"] is None else Path(task["trace"])
    outcome = measure(built, job, device, trace)
    return (
        outcome
        | of_all_ranks(facts_of(built.model))
        | {"build_s": ready - began, "measure_s": time.perf_counter() - ready}
    )


def facts_of(model: torch.nn.Module) -> dict[str, str | None]:
    """Say what of a model computes in FP8, and what is fused."""
    return {"layers": _layers(model), "fused": _fused(model)}


def of_all_ranks(facts: dict[str, str | None]) -> dict[str, str | None]:
    """Return facts of this rank's model, by rank where they differ, as where some ranks alone replay CUDA graphs."""
    found: list[dict[str, str | None]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(found, facts)
    return {name: _by_rank([each[name] for each in found]) for name in facts}


def _by_rank(told: list[str | None]) -> str | None:
    if len(set(told)) == 1:
        return told[0]
    return "; ".join(f"rank {number}: {each or 'none'}" for number, each in enumerate(told))


def _layers(model: torch.nn.Module) -> str | None:
    """Say which of fp8booster's layers compute in FP8, if there are any."""
    from fp8booster import report

    found = report(model)
    return found.summary() if found.fp8 else None


def _fused(model: torch.nn.Module) -> str | None:
    """Say what is fused, if anything is."""
    from fp8booster.nn.fused import fused_summary
    from fp8booster.nn.fused.decoder import FusedDecoderLayer

    network = model.unwrap() if hasattr(model, "unwrap") else model
    if not any(isinstance(module, FusedDecoderLayer) for module in network.modules()):
        return None
    return fused_summary(network)


def reason_of(error: BaseException) -> str:
    """An error as one line."""
    first = (str(error).strip() or "no message").splitlines()[0]
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of GPU memory: {first.partition('. ')[0]}"
    return f"{type(error).__name__}: {first}"


def do(task: dict[str, Any]) -> int:
    """Measure and write the outcome, or the reason why there is none; returns the exit status."""
    outcome = Path(task["outcome"])
    warnings.filterwarnings("ignore", message="Please install")  # colossalai's advertisements
    try:
        outcome.write_text(json.dumps(run(task)))
    except BaseException as error:
        traceback.print_exception(error)
        outcome.write_text(json.dumps({"failed": reason_of(error), "at": time.time()}))
        return 1
    return 0


def cuda_begins_in_a_fork() -> bool:
    """Tell whether it does: torch refuses if this process has asked for a GPU."""
    child = os.fork()
    if child == 0:
        os._exit(torch.cuda._is_in_bad_fork())
    return os.waitpid(child, 0)[1] == 0


if __name__ == "__main__":
    faulthandler.enable()
    serve(do, preload=PRELOADED, may_fork=cuda_begins_in_a_fork)
