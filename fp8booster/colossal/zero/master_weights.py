"""Save and restore the FP32 master weights of Colossal-AI's ZeRO optimizers, and of its hybrid parallelism.

Its own checkpoints hold the BF16 working weights and the optimizer's states, and loading them makes new masters from
the working weights (LowLevelZeroOptimizer.update_master_params, zero/low_level/low_level_optim.py:862): the 16 bits
below BF16 are lost and a resumed run leaves the path of the uninterrupted one. Here each rank keeps its own shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from colossalai.interface import OptimizerWrapper
from colossalai.zero.low_level import LowLevelZeroOptimizer
from colossalai.zero.low_level._utils import get_nd_rank, get_nd_world_size
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.reading import COPY_AGAIN, faults_named


def save_master_weights(model: nn.Module, optimizer: OptimizerWrapper, folder: Path) -> None:
    """Write this rank's shards to `folder` as `rank-<rank>-of-<ranks>.safetensors`; every rank calls it.

    One entry for each trained parameter that this rank holds a part of: with ZeRO its flat shard
    [ceil(numel / ranks)], the last one padded with zeros, else all it holds of it; FP32. The file's metadata says
    which rank wrote it.
    """
    rank, ranks = _place(optimizer)
    shards = {name: master.detach().cpu().contiguous() for name, _, master in _pairs(model, optimizer)}
    metadata = {_SHARDING: _sharding(optimizer), _WRITER: _writer(rank, ranks)}
    save_file(shards, _file(folder, rank, ranks), metadata=metadata)


def load_master_weights(model: nn.Module, optimizer: OptimizerWrapper, folder: Path) -> None:
    """Set the masters to what `save_master_weights` wrote; every rank calls it, after the working weights were loaded.

    Under ZeRO alone, the number of ranks may have changed since. Weights that are sent in FP8 are sent anew: they
    are cast from the masters.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the masters were sharded in another way, or a file is another rank's, of another model or damaged.
    """
    rank, ranks = _place(optimizer)
    files = sorted(folder.glob("rank-*-of-*.safetensors"))
    written = int(files[0].stem.rpartition("-")[2]) if files else 0
    if not files or files != [_file(folder, writer, written) for writer in range(written)]:
        raise FileNotFoundError(
            f"{folder} holds {len(files)} of {written} files of master weights; copy the whole checkpoint."
        )
    sharding = _metadata(files[0]).get(_SHARDING, _ZERO_ALONE)
    if sharding != _sharding(optimizer) or (written != ranks and sharding != _ZERO_ALONE):
        raise ValueError(
            f"the master weights in {folder} were written by {written} ranks with {sharding}, and this run has {ranks} "
            f"with {_sharding(optimizer)}; resume with the same, or from the model and the optimizer's states alone"
        )
    for writer, file in enumerate(files):
        _require_writer(file, writer, written)
    pairs = list(_pairs(model, optimizer))
    with torch.no_grad():
        if written == ranks:
            shapes = {name: master.shape for name, _, master in pairs}
            with _opened(files[rank], shapes) as shards:
                for name, _, master in pairs:
                    master.copy_(shards.get_tensor(name))
        else:
            shapes = {name: torch.Size([-(-working.numel() // written)]) for name, working, _ in pairs}
            with ExitStack() as stack:
                opened = [stack.enter_context(_opened(file, shapes)) for file in files]
                for name, working, master in pairs:
                    whole = torch.cat([shards.get_tensor(name) for shards in opened])[: working.numel()]
                    padded = nn.functional.pad(whole, [0, master.numel() * ranks - whole.numel()])
                    master.copy_(padded.chunk(ranks)[rank])
    if isinstance(optimizer, FP8ZeroOptimizer):
        optimizer.publish_masters()


def _file(folder: Path, rank: int, ranks: int) -> Path:
    return folder / f"rank-{rank:05d}-of-{ranks:05d}.safetensors"


def _writer(rank: int, ranks: int) -> str:
    return f"{rank} of {ranks}"


def _metadata(file: Path) -> dict[str, str]:
    with faults_named(file), safe_open(file, framework="pt") as shards:
        return shards.metadata() or {}


def _require_writer(file: Path, rank: int, ranks: int) -> None:
    """Raise ValueError for a file that another rank wrote; an old one, which does not say who did, is taken."""
    writer = _metadata(file).get(_WRITER, _writer(rank, ranks))
    if writer != _writer(rank, ranks):
        raise ValueError(
            f"{file} holds the master weights of rank {writer}: files were renamed or mixed; {COPY_AGAIN}."
        )


@contextmanager
def _opened(file: Path, shapes: dict[str, torch.Size]) -> Iterator[Any]:
    """A file of masters. Raises ValueError unless it holds those of `shapes` and no others."""
    with faults_named(file), safe_open(file, framework="pt") as shards:
        names = set(shards.keys())
        for name in sorted({*names, *shapes}):
            found = tuple(shards.get_slice(name).get_shape()) if name in names else "missing"
            expected = tuple(shapes[name]) if name in shapes else "missing"
            if found != expected:
                raise ValueError(
                    f"{file} belongs to another model or run: {name} is {found} there and {expected} here; "
                    f"{COPY_AGAIN}."
                )
        yield shards


def _pairs(model: nn.Module, optimizer: OptimizerWrapper) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    masters = optimizer.get_working_to_master_map()
    for name, parameter in model.named_parameters():
        if id(parameter) in masters:
            yield name, parameter, masters[id(parameter)]


_SHARDING = "sharding"
"""What a file says in its metadata of how masters are divided."""

_WRITER = "rank"
"""Which rank wrote it, as "0 of 2"."""

_ZERO_ALONE = "ZeRO"


def _sharding(optimizer: OptimizerWrapper) -> str:
    """How the masters are divided."""
    zero = isinstance(optimizer, LowLevelZeroOptimizer)
    sizes = {
        name: get_nd_world_size(group)
        for name in ("tp", "pp")
        if (group := getattr(optimizer, f"{name}_pg", None)) is not None
    }
    if zero and all(size == 1 for size in sizes.values()):
        return _ZERO_ALONE
    return ", ".join([f"{name}_size={size}" for name, size in sizes.items()] + ["ZeRO" if zero else "zero_stage=0"])


def _place(optimizer: OptimizerWrapper) -> tuple[int, int]:
    """This rank and the number of ranks that write: under ZeRO alone those of the one group that shards."""
    if _sharding(optimizer) != _ZERO_ALONE:
        return dist.get_rank(), dist.get_world_size()
    (group,) = optimizer.pg_to_param_list
    return get_nd_rank(group), get_nd_world_size(group)
