"""The parallel modes of both examples: one plugin each, and one training step that suits all of them."""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

# fp8booster comes before colossalai, which it mends
from fp8booster.plugins import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

from fp8booster.colossal.pipeline import zero_bubble_schedule  # isort: skip
import colossalai  # isort: skip
import torch  # isort: skip
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from colossalai.booster import Booster
from colossalai.booster.plugin.plugin_base import Plugin
from colossalai.interface import ModelWrapper, OptimizerWrapper
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fp8booster.checkpoints import checkpoints_in

MODES = {
    "low_level_zero": (),
    "gemini": ("tp",),
    "hybrid": ("tp", "pp", "pp_style", "sp", "sp_mode"),
    "moe": ("tp", "pp", "ep"),
    "ddp": (),
    "fsdp": (),
}
"""Name: the options that only some modes take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how to train."""
    parser.add_argument("--plugin", choices=MODES, default="low_level_zero")
    parser.add_argument("--bf16", action="store_true", help="train in BF16, to compare")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks (gemini, hybrid, moe)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (hybrid, moe)")
    parser.add_argument(
        "--pp-style",
        choices=("1f1b", "interleaved", "zbv"),
        default="1f1b",
        help="schedule of a pipeline; the latter two cut each stage in two (hybrid)",
    )
    parser.add_argument("--sp-mode", choices=("split_gather", "ring", "all_to_all", "ring_attn"))
    parser.add_argument("--sp", type=int, default=1, help="ranks that share a sequence (all_to_all, ring_attn)")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts (moe)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a micro-batch")
    parser.add_argument("--micro-batches", type=int, default=1, help="of each optimizer step, on each replica")
    parser.add_argument("--sequence", type=int, default=2048, help="tokens of a sequence")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--save-every", type=int, default=0, help="steps; 0: at the end only")
    parser.add_argument("--out", default="checkpoint", help="folder, on a disk that all nodes share")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")


def parse_arguments(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The command line; an option that the mode does not take ends it with a sentence."""
    args = parser.parse_args(arguments)
    for name in ("tp", "pp", "pp_style", "sp", "sp_mode", "ep"):
        if getattr(args, name) != parser.get_default(name) and name not in MODES[args.plugin]:
            able = ", ".join(mode for mode, options in MODES.items() if name in options)
            parser.error(f"--plugin {args.plugin} takes no --{name.replace('_', '-')}; use {able}")
    if (wrong := what_is_wrong(args)) is not None:
        parser.error(wrong)
    return args


def what_is_wrong(args: argparse.Namespace) -> str | None:
    """What cannot be done as the arguments say, in a sentence; None where all can."""
    processes, sharing = int(os.environ.get("WORLD_SIZE", "1")), args.tp * args.pp * args.sp
    if min(args.tp, args.pp, args.sp, args.ep, args.batch, args.micro_batches, args.steps) < 1:
        return "sizes and --steps must be at least 1"
    if processes % sharing:
        return f"{processes} processes cannot be divided into groups of {sharing} (--tp x --pp x --sp)"
    if args.pp > args.micro_batches:
        return f"--pp {args.pp} takes --micro-batches {args.pp} or more"
    if args.pp_style != "1f1b" and (args.pp < 2 or args.micro_batches % args.pp):
        return f"--pp-style {args.pp_style} takes --pp 2 or more, and --micro-batches that are a multiple of it"
    if args.sp_mode in ("split_gather", "ring") and (args.tp < 2 or args.sp > 1):
        return f"--sp-mode {args.sp_mode} shares sequences among --tp ranks: give --tp, and no --sp"
    if (args.sp_mode in ("all_to_all", "ring_attn")) != (args.sp > 1):
        return "--sp goes with --sp-mode all_to_all or ring_attn, and they with --sp"
    return None


def what_files_miss(args: argparse.Namespace) -> str | None:
    """What of the files is not as the arguments say, in a sentence; None where all are."""
    if args.data is not None and not Path(args.data).is_file():
        return f"--data {args.data} is not a file"
    done = bool(checkpoints_in(Path(args.out)))
    if args.resume and not done:
        return f"--out {args.out} holds no checkpoint; leave --resume out"
    if done and not args.resume:
        return f"--out {args.out} holds a checkpoint; add --resume to go on from it, or give another --out"
    return None


def run(train: Callable[[argparse.Namespace], Any], args: argparse.Namespace) -> None:
    """Train on this rank; ends it with a sentence where data, model or options are not what they must be."""
    if (wrong := what_files_miss(args)) is not None:
        sys.exit(f"error: {wrong}")
    colossalai.launch_from_torch()
    try:
        train(args)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    dist.destroy_process_group()


def make_plugin(args: argparse.Namespace, model: nn.Module) -> Plugin:
    """The plugin of a mode. `use_fp8=True` is all that FP8 takes; every other argument is Colossal-AI's own."""
    use_fp8 = not args.bf16
    match args.plugin:
        case "low_level_zero":
            return LowLevelZeroPlugin(stage=2, precision="bf16", max_norm=args.max_norm, use_fp8=use_fp8)
        case "gemini":
            return GeminiPlugin(
                precision="bf16",
                max_norm=args.max_norm,
                tp_size=args.tp,
                enable_gradient_accumulation=args.micro_batches > 1,
                use_fp8=use_fp8,
            )
        case "hybrid":
            return HybridParallelPlugin(
                tp_size=args.tp,
                pp_size=args.pp,
                **pipeline_style(args),
                enable_sequence_parallelism=args.sp_mode is not None,
                sequence_parallelism_mode=args.sp_mode,
                sp_size=args.sp,
                zero_stage=1,
                num_microbatches=args.micro_batches,
                make_vocab_size_divisible_by=vocabulary_divisor(args, model),
                precision="bf16",
                max_norm=args.max_norm,
                use_fp8=use_fp8,
            )
        case "moe":
            return MoeHybridParallelPlugin(
                tp_size=args.tp,
                pp_size=args.pp,
                ep_size=args.ep,
                zero_stage=1,
                num_microbatches=args.micro_batches,
                make_vocab_size_divisible_by=vocabulary_divisor(args, model),
                precision="bf16",
                max_norm=args.max_norm,
                use_fp8=use_fp8,
            )
        case "ddp":
            return TorchDDPPlugin(use_fp8=use_fp8)
        case "fsdp":
            return TorchFSDPPlugin(
                mixed_precision=MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16),
                auto_wrap_policy=ModuleWrapPolicy({type(model.model.layers[0])}),
                use_fp8=use_fp8,
            )


def pipeline_style(args: argparse.Namespace) -> dict[str, Any]:
    """The schedule of a pipeline; zero-bubble wants to be told what each stage does when."""
    match args.pp_style:
        case "zbv":
            nodes = zero_bubble_schedule(args.pp, args.micro_batches)
            return {"pp_style": "zbv", "num_model_chunks": 2, "scheduler_nodes": nodes}
        case "interleaved":
            return {"pp_style": "interleaved", "num_model_chunks": 2}
    return {}


def vocabulary_divisor(args: argparse.Namespace, model: nn.Module) -> int:
    """Divides each tensor parallel rank's part of the vocabulary: Colossal-AI saves no optimizer of padded parts."""
    return math.gcd(64, model.config.vocab_size // args.tp)


def make_booster(args: argparse.Namespace, plugin: Plugin) -> Booster:
    """DDP leaves the 16-bit type to Booster; the other plugins were told."""
    return Booster(plugin=plugin, mixed_precision="bf16" if args.plugin == "ddp" else None)


def weights_dtype(args: argparse.Namespace) -> torch.dtype:
    """DDP and FSDP train the weights as they are given; the other plugins keep FP32 masters of 16-bit ones."""
    return torch.float32 if args.plugin in ("ddp", "fsdp") else torch.bfloat16


def train_step(
    args: argparse.Namespace,
    booster: Booster,
    model: ModelWrapper,
    optimizer: OptimizerWrapper,
    batch: dict[str, torch.Tensor],
) -> float:
    """One optimizer step on this replica's batch; returns the mean loss over all replicas.

    `batch` holds `input_ids` and `labels`  [micro_batches * batch, sequence].
    """
    device = get_accelerator().get_current_device()
    batch = {name: tensor.to(device) for name, tensor in batch.items()}
    if args.pp > 1:
        outputs = booster.execute_pipeline(
            iter([batch]), model, lambda outputs, _: outputs.loss, optimizer, return_loss=True
        )
        loss = outputs["loss"]  # None on all stages but the last
    else:
        loss = torch.zeros((), device=device)
        for number in range(args.micro_batches):
            part = {name: tensor.chunk(args.micro_batches)[number] for name, tensor in batch.items()}
            last = number == args.micro_batches - 1
            with nullcontext() if last or not may_wait(booster.plugin) else booster.no_sync(model, optimizer):
                micro_loss = model(**part).loss / args.micro_batches
                booster.backward(micro_loss, optimizer)
            loss += micro_loss.detach()
    if args.plugin in ("ddp", "fsdp"):
        optimizer.clip_grad_by_norm(args.max_norm)  # in the others step() clips
    optimizer.step()
    optimizer.zero_grad()
    return mean_over_ranks(loss, device)


def may_wait(plugin: Plugin) -> bool:
    """Whether gradients can stay on a rank until the last micro-batch; stage 2 keeps only shards of them."""
    return plugin.support_no_sync() and getattr(plugin, "zero_stage", 0) != 2


def mean_over_ranks(loss: torch.Tensor | None, device: torch.device) -> float:
    """The mean of the ranks that have a loss."""
    total = torch.zeros(2, device=device)
    if loss is not None:
        total += torch.stack([loss.detach().float().reshape(()), torch.ones((), device=device)])
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def learning_rate(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up over a tenth of the steps, then a cosine to a tenth of the peak; `step` counts from 0."""
    warm_up = max(1, args.steps // 10)
    if step < warm_up:
        return args.lr * (step + 1) / warm_up
    progress = (step - warm_up) / max(1, args.steps - warm_up)
    return args.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * progress)))
