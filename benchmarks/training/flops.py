"""Count the floating-point operations of a job's step, by this project's formula and by Colossal-AI's."""

from __future__ import annotations

import functools

import torch

from benchmarks.training.job import Job
from fp8booster.training.adapters import ALL_LINEAR, with_adapters
from fp8booster.training.arithmetic import token_flops
from fp8booster.training.models import Architecture, build

FORMULA = (
    "Model FLOPs of a token: 6 x (weights of linear layers, the head included, embeddings and norms not, of experts "
    "those that a token goes through) + 6 x "
    "layers x sequence x hidden for causal attention, which counts the half of its products that the mask leaves "
    "(scores and values, forward once and backward twice). Recomputation counts as nothing. Utilisation is that "
    "rate over the dense tensor-core peak at the highest clock. With --lora 4 in place of the first 6, as frozen "
    "weights have no gradients, and 6 x the adapters' weights. Colossal-AI's formula, for comparison with its "
    "published figures: batch x sequence x parameters x 2 x (3, or 4 with checkpointing), embeddings included and "
    "attention not."
)
"""For the tables."""


def model_flops(job: Job) -> int:
    """Return the floating-point operations that one token of a job's step needs, by `FORMULA`."""
    return _counts(job.architecture, job.sequence, job.lora)[0]


def native_flops(job: Job) -> int | None:
    """Count the operations of one token as Colossal-AI's benchmark does (examples/language/performance_evaluator.py,
    on_step_end).

    None for adapters and for some layers that recompute, which it does not know, and for a mixture of experts, of
    which it would count those too that a token does not go through.
    """
    if job.lora or job.checkpointed_layers or job.architecture.experts > 1:
        return None
    return _counts(job.architecture, job.sequence, None)[1] * 2 * (3 + int(job.checkpointing))


@functools.cache
def _counts(architecture: Architecture, sequence: int, lora: int | None) -> tuple[int, int]:
    """Operations of a token, and parameters."""
    network = build(architecture.config(sequence), device=torch.device("meta"))
    if lora is not None:
        network = with_adapters(network, lora, alpha=lora, targets=ALL_LINEAR)
    return token_flops(network, sequence).total, sum(each.numel() for each in network.parameters())
