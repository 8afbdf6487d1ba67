"""Save and restore the FP32 master weights of Colossal-AI's ZeRO optimizer.

Its own checkpoints hold the BF16 working weights and the optimizer's states, and loading them makes new masters from
the working weights (LowLevelZeroOptimizer.update_master_params, zero/low_level/low_level_optim.py:862): the 16 bits
below BF16 are lost and a resumed run leaves the path of the uninterrupted one. Here each rank keeps its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from colossalai.zero.low_level import LowLevelZeroOptimizer
from colossalai.zero.low_level._utils import get_nd_rank, get_nd_world_size
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer


def save_master_weights(model: nn.Module, optimizer: LowLevelZeroOptimizer, folder: Path) -> None:
    """Write this rank's shards to `folder` as `rank-<rank>-of-<ranks>.safetensors`; every rank calls it.

    One entry for each trained parameter: its flat shard  [ceil(numel / ranks)], FP32, the last one padded with zeros.
    """
    rank, ranks = _place(optimizer)
    shards = {name: master.detach().cpu().contiguous() for name, _, master in _pairs(model, optimizer)}
    save_file(shards, folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors")


def load_master_weights(model: nn.Module, optimizer: LowLevelZeroOptimizer, folder: Path) -> None:
    """Set the masters to what `save_master_weights` wrote; the number of ranks may have changed since.

    Every rank calls it, after the working weights were loaded. Weights that travel in FP8 are sent anew, since they are
    cast from the masters. Raises FileNotFoundError when a shard is missing.
    """
    rank, ranks = _place(optimizer)
    files = sorted(folder.glob("rank-*-of-*.safetensors"))
    written = int(files[0].stem.rpartition("-")[2]) if files else 0
    if not files or len(files) != written:
        raise FileNotFoundError(
            f"{folder} holds {len(files)} of {written} files of master weights; copy the whole checkpoint."
        )
    with torch.no_grad():
        if written == ranks:
            with safe_open(files[rank], framework="pt") as shards:
                for name, _, master in _pairs(model, optimizer):
                    master.copy_(shards.get_tensor(name))
        else:
            opened = [safe_open(file, framework="pt") for file in files]
            for name, working, master in _pairs(model, optimizer):
                whole = torch.cat([shards.get_tensor(name) for shards in opened])[: working.numel()]
                padded = nn.functional.pad(whole, [0, master.numel() * ranks - whole.numel()])
                master.copy_(padded.chunk(ranks)[rank])
    if isinstance(optimizer, FP8ZeroOptimizer):
        optimizer.publish_masters()


def _pairs(
    model: nn.Module, optimizer: LowLevelZeroOptimizer
) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    masters = optimizer.get_working_to_master_map()
    for name, parameter in model.named_parameters():
        if id(parameter) in masters:
            yield name, parameter, masters[id(parameter)]


def _place(optimizer: LowLevelZeroOptimizer) -> tuple[int, int]:
    """This rank and the number of ranks in the group that shards the parameters: one group for all of them."""
    (group,) = optimizer.pg_to_param_list
    return get_nd_rank(group), get_nd_world_size(group)
