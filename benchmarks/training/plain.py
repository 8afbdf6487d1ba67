"""fp8booster without a plugin: one GPU, BF16 weights, and AdamW of 8-bit moments that updates in backward."""

from __future__ import annotations

import torch
import torch.distributed as dist

from benchmarks.training.built_engine import BuiltEngine
from benchmarks.training.job import Job
from fp8booster import capture_layers, convert_to_fp8, fuse
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.optim import AdamW
from fp8booster.training.batches import Replica
from fp8booster.training.models import build


def plain(job: Job, device: torch.device) -> BuiltEngine:
    """The job's model converted and fused; gradients are not clipped, since no two are there at once.

    Raises:
        ValueError: more than one process; another optimizer.
    """
    if dist.get_world_size() > 1:
        raise ValueError("--precision plain trains on one GPU; add --processes 1")
    if job.optimizer != "adamw-8bit":
        raise ValueError("--precision plain updates in backward; use --optimizer adamw-8bit")
    torch.manual_seed(job.seed)
    model = build(
        job.architecture.config(job.sequence), dtype=torch.bfloat16, device=device, checkpointing=job.recomputed
    )
    config = fp8_config(job.fp8_options)
    convert_to_fp8(model, config)
    fuse(model)
    if config.cuda_graphs is not False:
        capture_layers(model, only_where_host_limits=config.cuda_graphs is None)
    optimizer = AdamW(model.parameters(), lr=job.lr, update_in_backward=True, micro_batches=job.micro_batches)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        losses = []
        for part in tokens.split(job.micro_batch):
            loss = model(input_ids=part, labels=part).loss / job.micro_batches
            with torch.autograd.set_multithreading_enabled(False):  # as the plugins do: the host is faster so
                loss.backward()
            losses.append(loss.detach())
        return torch.stack(losses).sum()

    return BuiltEngine(model=model, optimizer=optimizer, step=step, replica=Replica(0, 1))
