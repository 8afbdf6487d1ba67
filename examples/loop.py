"""Share between both scripts: their options, the loop, checkpoints that are whole or not there, and a stop that
saves.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# fp8booster comes before colossalai, which it patches
import fp8booster.plugins
from fp8booster.checkpoints import checkpoints_in, is_finite, new_checkpoint, what_is_broken
from fp8booster.training.boosted import BoostedModel
from fp8booster.training.optimizers import WarmupCosine
from fp8booster.training.parallel import MODES_OF_OWN_RANKS, MODES_OF_TENSOR_RANKS, PLUGINS, Parallel
from fp8booster.training.plugins import FP32_WEIGHTS, PIPELINE_STYLES, make_plugin, with_chunks
from fp8booster.training.ranks import StopRequest, over_ranks

import colossalai  # isort: skip
import torch  # isort: skip
import torch.distributed as dist
from colossalai.accelerator import get_accelerator
from torch import nn
from torch.utils.data import DataLoader, Dataset

KEPT = 2
"""Checkpoints that stay: where the newest turns out to be broken, the one before is left."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that say how to train."""
    parser.add_argument("--plugin", choices=PLUGINS, default="low_level_zero")
    parser.add_argument("--bf16", action="store_true", help="train in BF16, to compare")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel ranks (gemini, hybrid, moe)")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages (hybrid, moe)")
    parser.add_argument(
        "--pp-style",
        choices=PIPELINE_STYLES,
        default="1f1b",
        help="schedule of a pipeline; the latter two cut each stage in two (hybrid)",
    )
    parser.add_argument("--sp-mode", choices=(*MODES_OF_TENSOR_RANKS, *MODES_OF_OWN_RANKS))
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


def parallel_of(args: argparse.Namespace) -> Parallel:
    """Return how the ranks share model and data."""
    sizes = {name: getattr(args, name) for name in ("plugin", "tp", "pp", "sp", "sp_mode", "ep", "micro_batches")}
    return Parallel(**sizes)


def parse_arguments(parser: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """The command line; what does not go together ends it with a sentence."""
    args = parser.parse_args(arguments)
    try:
        if min(args.batch, args.micro_batches, args.steps) < 1:
            raise ValueError("--batch, --micro-batches and --steps must be at least 1")
        parallel = parallel_of(args)
        parallel.check()
        parallel.replicas(int(os.environ.get("WORLD_SIZE", "1")))
        parallel.require_sequence(args.sequence)
        with_chunks({"pp_style": args.pp_style}, parallel)
    except ValueError as error:
        parser.error(str(error))
    return args


def what_files_miss(args: argparse.Namespace) -> str | None:
    """Return a sentence about files that are not as the arguments say; None if all are."""
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


def weights_dtype(args: argparse.Namespace) -> torch.dtype:
    """DDP and FSDP train the weights as they are given; the other plugins keep FP32 masters of 16-bit ones."""
    return torch.float32 if args.plugin in FP32_WEIGHTS else torch.bfloat16


def train_and_save(
    args: argparse.Namespace,
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Dataset,
    save_config: Callable[[Path], object],
) -> list[float]:
    """Boost, and train to the last step or until SIGTERM; save on the way as the arguments say, and at the end.

    Args:
        data: samples with `input_ids` and `labels`  [sequence] each.
        save_config: writes to a folder what transformers wants beside the weights; rank 0 calls it.

    Returns:
        the loss of each step.
    """
    plugin_class = getattr(fp8booster.plugins, PLUGINS[args.plugin])
    # `use_fp8=True` is all that FP8 takes; every other argument is Colossal-AI's own
    options = {"use_fp8": not args.bf16} | ({"pp_style": args.pp_style} if args.pp > 1 else {})
    plugin = make_plugin(plugin_class, parallel_of(args), network, args.max_norm, options)
    loader = plugin.prepare_dataloader(data, batch_size=args.batch * args.micro_batches, shuffle=True, drop_last=True)
    boosted = BoostedModel(args.plugin, plugin, network, optimizer)

    out, device, stop = Path(args.out), get_accelerator().get_current_device(), StopRequest()
    done = load(find_checkpoint(out), boosted) if args.resume else 0
    schedule = WarmupCosine.over(args.steps, args.lr)
    losses = []
    batches = endless(loader, skip=done)
    for step in range(done + 1, args.steps + 1):
        for group in boosted.optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        batch = {name: tensor.to(device).chunk(args.micro_batches) for name, tensor in next(batches).items()}
        parts = [dict(zip(batch, tensors, strict=True)) for tensors in zip(*batch.values(), strict=True)]
        loss = boosted.forward_backward(parts)
        boosted.update(args.max_norm)
        mean, stopped = over_ranks(loss, stop.wanted, device)
        losses.append(mean)
        if dist.get_rank() == 0:
            print(f"step {step}/{args.steps}  loss {mean:.4f}", flush=True)
        due = args.save_every and step % args.save_every == 0
        if due or stopped or step == args.steps:
            save(out, step, boosted, save_config)
        if stopped:
            if dist.get_rank() == 0:
                print(f"stopped by a signal; go on from step {step} with --resume", flush=True)
            break
    return losses


def save(out: Path, step: int, boosted: BoostedModel, save_config: Callable[[Path], object]) -> None:
    """Write the checkpoint of a step; a kill on the way leaves the former ones as they were. Every rank calls it."""
    with new_checkpoint(out, step, keep=KEPT, finite=boosted.is_finite()) as folder:
        boosted.save(folder)
        if dist.get_rank() == 0:
            save_config(folder / "model")
            (folder / "state.json").write_text(json.dumps({"step": step}))


def load(checkpoint: Path, boosted: BoostedModel) -> int:
    """Set model and optimizer to a checkpoint's; returns its step. Every rank calls it."""
    boosted.load(checkpoint)
    return json.loads((checkpoint / "state.json").read_text())["step"]


def find_checkpoint(out: Path) -> Path:
    """The newest checkpoint whose files were saved together, with finite values; rank 0 looks, and names the others.

    Raises:
        ValueError: there is none.
    """
    found: list[str | None] = [None, None]  # the checkpoint, or why there is none
    if dist.get_rank() == 0:
        faults = []
        for checkpoint in reversed(checkpoints_in(out)):
            fault = what_is_broken(checkpoint)
            if fault is None and not is_finite(checkpoint):
                fault = f"{checkpoint} has values that are NaN or infinite"
            if fault is None:
                print(f"going on from {checkpoint}", flush=True)
                found[0] = str(checkpoint)
                break
            print(f"{fault}; it is passed over", flush=True)
            faults.append(fault)
        found[1] = "; ".join(faults)
    dist.broadcast_object_list(found)
    if found[0] is None:
        raise ValueError(f"{found[1]}; no checkpoint in {out} is whole, so give another --out")
    return Path(found[0])


def endless(loader: DataLoader, skip: int) -> Iterator[dict[str, torch.Tensor]]:
    """Batches, epoch after epoch, in an order that depends on the epoch alone; the first `skip` are left out."""
    epoch, taken = 0, 0
    while True:
        loader.sampler.set_epoch(epoch)
        for batch in loader:
            taken += 1
            if taken > skip:
                yield batch
        if taken == 0:
            raise ValueError("the data does not fill one batch; give more, or a smaller --batch or --sequence")
        epoch += 1
