"""Files that each rank saves by itself under ZeRO and hybrid parallelism: FP32 masters, and moments in 8 bits.

Colossal-AI's own checkpoints hold the BF16 working weights and the optimizer's states, and loading them makes new
masters from the working weights (LowLevelZeroOptimizer.update_master_params, zero/low_level/low_level_optim.py:862):
the 16 bits below BF16 are lost and a resumed run leaves the path of the uninterrupted one. States are FP32 there, 8
bytes a parameter. Here each rank keeps its own shards, and of moments in 8 bits their codes, 2.05 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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

from fp8booster.checkpoints import SHARDING, ZERO_ALONE, rank_file, rank_files
from fp8booster.colossal.zero.optimizer import FP8ZeroOptimizer
from fp8booster.optim import AdamW
from fp8booster.optim.states_8bit import MOMENTS, State, as_tensor
from fp8booster.reading import COPY_AGAIN, faults_named


def save_master_weights(model: nn.Module, optimizer: OptimizerWrapper, folder: Path) -> None:
    """Write this rank's shards to `folder` as `rank-<rank>-of-<ranks>.safetensors`; every rank calls it.

    One entry for each trained parameter that this rank holds a part of: with ZeRO its flat shard
    [ceil(numel / ranks)], the last one padded with zeros, else all it holds of it; FP32. The file's metadata says
    which rank wrote it.
    """
    _save(optimizer, folder, {name: master.detach() for name, _, master in _pairs(model, optimizer)})


def save_moments(model: nn.Module, optimizer: OptimizerWrapper, folder: Path) -> None:
    """Write the codes of this rank's states, and their steps, as `save_master_weights` does masters.

    Args:
        optimizer: around an `fp8booster.optim.AdamW`.
    """
    states = optimizer.optim.state
    codes = {}
    for name, _, master in _pairs(model, optimizer):
        for entry, value in states[master].codes.items() if master in states else ():
            codes[f"{name}:{entry}"] = _as_tensor(value)
    _save(optimizer, folder, codes)


def load_master_weights(model: nn.Module, optimizer: OptimizerWrapper, folder: Path) -> None:
    """Set the masters to what `save_master_weights` wrote; every rank calls it, after the working weights were loaded.

    Under ZeRO alone, the number of ranks may have changed since. Weights that are sent in FP8 are sent anew: they
    are cast from the masters.

    Raises:
        FileNotFoundError: a shard is missing.
        ValueError: the masters were sharded in another way, or a file is another rank's, of another model or damaged.
    """
    # names, shapes and writers are compared before a master changes: half of a checkpoint is worse than none
    written = _Written.by_all(folder, optimizer, "master weights")
    pairs = list(_pairs(model, optimizer))
    shapes = {name: written.shape(working, master) for name, working, master in pairs}
    with torch.no_grad(), written.opened(shapes) as files:
        for name, working, master in pairs:
            master.copy_(written.own_part([shards.get_tensor(name) for shards in files], working, master))
    if isinstance(optimizer, FP8ZeroOptimizer):
        # working weights were loaded from 16 bits, and the layers' FP8 bytes must come from these masters
        optimizer.publish_masters()


def load_moments(model: nn.Module, optimizer: OptimizerWrapper, folder: Path) -> None:
    """Give the optimizer the states that `save_moments` wrote; every rank calls it.

    On as many ranks they are the same codes. Under ZeRO alone, the number of ranks may have changed since; then, or
    where the optimizer is another AdamW, values are decoded.

    Raises:
        FileNotFoundError, ValueError: as `load_master_weights`.
    """
    written = _Written.by_all(folder, optimizer, "moments")
    in_codes = isinstance(optimizer.optim, AdamW)
    codes = {}
    for name, working, master in _pairs(model, optimizer):
        if f"{name}:step" in written.names:
            # without memory: nothing but the shapes of codes is asked of this state
            values = torch.empty(written.shape(working, master), dtype=master.dtype, device="meta")
            codes[name] = State.zeros(values).codes
    shapes = {
        f"{name}:{entry}": _as_tensor(value).shape
        for name, of_name in codes.items()
        for entry, value in of_name.items()
    }
    with torch.no_grad(), written.opened(shapes) as files:
        for name, working, master in _pairs(model, optimizer):
            if name not in codes:
                continue
            parts = []
            for shards in files:
                found = {entry: shards.get_tensor(f"{name}:{entry}") for entry in codes[name]}
                parts.append(State({**found, "step": int(found["step"])}))
            state: State | dict[str, torch.Tensor] = parts[0]
            # codes are groups of values, and another division into shards cuts through groups
            if in_codes and not written.resharded:
                parts[0].fit(master)
            else:
                state = {"step": as_tensor(parts[0]["step"]).to(master.device)}
                for entry in [each for each in parts[0] if each in MOMENTS or (in_codes and each != "step")]:
                    own = written.own_part([part[entry] for part in parts], working, master)
                    state[entry] = own.view(master.shape).to(master.device)
            optimizer.optim.state[master] = state


def _as_tensor(value: torch.Tensor | int) -> torch.Tensor:
    # safetensors holds tensors alone; int64 has every count of steps
    return value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.int64, device="cpu")


def _save(optimizer: OptimizerWrapper, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    rank, ranks = _place(optimizer)
    metadata = {SHARDING: _sharding(optimizer), _WRITER: f"{rank} of {ranks}"}
    # safetensors refuses views that are not contiguous
    on_host = {name: value.cpu().contiguous() for name, value in tensors.items()}
    save_file(on_host, rank_file(folder, rank, ranks), metadata=metadata)


@dataclass(frozen=True)
class _Written:
    """The files of the ranks that wrote: this rank's own where as many ranks wrote, else all."""

    files: list[Path]

    names: set[str]
    """Of the tensors in the first file."""

    by: int
    """Ranks that wrote."""

    rank: int
    ranks: int

    @classmethod
    def by_all(cls, folder: Path, optimizer: OptimizerWrapper, what: str) -> _Written:
        """Find the files in a folder. Errors as `load_master_weights`."""
        rank, ranks = _place(optimizer)
        files, by = rank_files(folder)
        if not files or files != [rank_file(folder, writer, by) for writer in range(by)]:
            raise FileNotFoundError(f"{folder} holds {len(files)} of {by} files of {what}; copy the whole checkpoint.")
        metadata = []
        for file in files:
            with faults_named(file), safe_open(file, framework="pt") as shards:
                metadata.append(shards.metadata() or {})
                if file is files[rank if by == ranks else 0]:
                    names = set(shards.keys())
        sharding = metadata[0].get(SHARDING, ZERO_ALONE)
        if sharding != _sharding(optimizer) or (by != ranks and sharding != ZERO_ALONE):
            raise ValueError(
                f"the {what} in {folder} were written by {by} ranks with {sharding}, and this run has {ranks} with "
                f"{_sharding(optimizer)}; resume with the same ranks, --tp, --pp, --ep and --zero, or begin anew from "
                "the model that was saved beside them"
            )
        for writer, (file, of_file) in enumerate(zip(files, metadata, strict=True)):
            if (said := of_file.get(_WRITER, f"{writer} of {by}")) != f"{writer} of {by}":  # old files say nothing
                raise ValueError(f"{file} holds the {what} of rank {said}: files were renamed or mixed; {COPY_AGAIN}.")
        # on as many ranks each needs its own file alone
        return cls([files[rank]] if by == ranks else files, names, by, rank, ranks)

    @property
    def resharded(self) -> bool:
        """Tell whether another number of ranks wrote."""
        return self.by != self.ranks

    def shape(self, working: torch.Tensor, master: torch.Tensor) -> torch.Size:
        """Return the shape of the part of a parameter that a file holds."""
        return torch.Size([-(-working.numel() // self.by)]) if self.resharded else master.shape

    @contextmanager
    def opened(self, shapes: dict[str, torch.Size]) -> Iterator[list[Any]]:
        """Open the files. Raises ValueError unless each holds those of `shapes` and no others."""
        with ExitStack() as stack:
            files = []
            for file in self.files:
                stack.enter_context(faults_named(file))
                shards = stack.enter_context(safe_open(file, framework="pt"))
                names = set(shards.keys())
                for name in sorted({*names, *shapes}):
                    found = tuple(shards.get_slice(name).get_shape()) if name in names else "missing"
                    expected = tuple(shapes[name]) if name in shapes else "missing"
                    if found != expected:
                        raise ValueError(
                            f"{file} belongs to another model or run: {name} is {found} there and {expected} here; "
                            f"{COPY_AGAIN}."
                        )
                files.append(shards)
            yield files

    def own_part(self, parts: list[torch.Tensor], working: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a parameter, of those in the files."""
        if not self.resharded:
            return parts[0]
        # padding depends on the number of ranks, so the writers' is cut off before ours is added
        whole = torch.cat(parts)[: working.numel()]
        padded = nn.functional.pad(whole, [0, master.numel() * self.ranks - whole.numel()])
        return padded.chunk(self.ranks)[self.rank]


def _pairs(model: nn.Module, optimizer: OptimizerWrapper) -> Iterator[tuple[str, nn.Parameter, torch.Tensor]]:
    masters = optimizer.get_working_to_master_map()
    for name, parameter in model.named_parameters():
        if id(parameter) in masters:
            yield name, parameter, masters[id(parameter)]


_WRITER = "rank"
"""Key of the rank that wrote it, as "0 of 2"."""


def _sharding(optimizer: OptimizerWrapper) -> str:
    """Name how the masters are divided."""
    zero = isinstance(optimizer, LowLevelZeroOptimizer)
    sizes = {
        name: get_nd_world_size(group)
        for name in ("tp", "pp")
        if (group := getattr(optimizer, f"{name}_pg", None)) is not None
    }
    # experts that are spread over ranks have fewer copies than other weights, and so a group of their own
    shards = [get_nd_world_size(group) for group in optimizer.pg_to_param_list] if zero else []
    if len(shards) == 1 and all(size == 1 for size in sizes.values()):
        return ZERO_ALONE
    of_zero = (
        "zero_stage=0" if not zero else "ZeRO" if len(shards) == 1 else f"ZeRO over {' and '.join(map(str, shards))}"
    )
    return ", ".join([f"{name}_size={size}" for name, size in sizes.items()] + [of_zero])


def _place(optimizer: OptimizerWrapper) -> tuple[int, int]:
    """Return this rank and the number of ranks that write: under ZeRO alone those of the one group that shards."""
    if _sharding(optimizer) != ZERO_ALONE:
        return dist.get_rank(), dist.get_world_size()
    (group,) = optimizer.pg_to_param_list
    return get_nd_rank(group), get_nd_world_size(group)
