"""Patches of imports, environment variables and torch.distributed."""

from __future__ import annotations

import builtins
import os
import re
import sys
import warnings
from abc import ABCMeta
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from fp8booster.colossal.compat.registry import Kind, Replacements, patch, wrap
from fp8booster.colossal.sharding import SHARDED_TRANSFORMERS
from fp8booster.nn.graphs import free_graphs

_PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "galore_torch": "galore-torch",
    "peft": "peft==0.13.2",
    "transformers": f"transformers=={SHARDED_TRANSFORMERS}",
}
"""The packages that are stood in for, and what to install for each."""


class _StandIn(ABCMeta):
    """The class of stand-ins: these can be named, tested and subclassed, beside abstract classes too.

    They refuse all else. Code that runs as Colossal-AI is imported, such as a decorator, a logger or the question
    whether a package is there, gets another stand-in instead, which counts as false.
    """

    importing = False
    refusal: str

    def __call__(cls, *_: Any, **__: Any) -> type:
        return cls._result()

    def __getitem__(cls, _: Any) -> type:
        return cls._result()

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):  # for which Python asks a class to see what it can do
            raise AttributeError(name)
        return cls._result()

    def __iter__(cls) -> Iterator[type]:
        cls._result()
        return iter(())

    def __bool__(cls) -> bool:
        return False

    def _result(cls) -> type:
        if not cls.importing:
            raise ImportError(cls.refusal)
        return _StandIn(cls.__name__, (), {"__module__": cls.__module__, "refusal": cls.refusal})


def _stand_in(module: str, name: str, importer: str) -> type:
    """Return the stand-in for `module.name`, which `importer`, a module or an argument, needs."""
    package = module.partition(".")[0]
    try:
        reason = f"which {package} {version(package)} does not have"
    except PackageNotFoundError:
        reason = f"and {package} is not installed"
    refusal = f"{importer} needs {module}.{name}, {reason}: pip install {_PACKAGES[package]}"
    return _StandIn(name, (), {"__module__": module, "refusal": refusal})


@patch(
    "colossalai",
    "nn/optimizer/__init__.py:1, nn/optimizer/galore.py:7, shardformer/modeling/llama.py:16, deepseek.py:10, ...",
    "galore_torch or bitsandbytes is not installed, or transformers or peft is newer than 4.51 or 0.13",
    during_import=True,
)
def missing_imports_are_late_errors(replacements: Replacements) -> None:
    """Without it `import colossalai.booster` raises ModuleNotFoundError: No module named 'galore_torch', then
    'bitsandbytes'; with transformers 5.24 'transformers.modeling_attn_mask_utils'.
    """
    native = builtins.__import__

    def lenient(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        importer = str((globals or {}).get("__name__"))
        # Only imports of colossalai's own modules get stand-ins: transformers and peft look for these packages
        # themselves, and must go on finding that they are not installed. At the top of a module the two dictionaries
        # are the same; in a function an ImportError comes when it is used.
        is_top = locals is globals and importer.partition(".")[0] == "colossalai"
        if not (is_top and fromlist and level == 0 and name.partition(".")[0] in _PACKAGES):
            return native(name, globals, locals, fromlist, level)
        try:
            found = native(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
            found = ModuleType(name)
        missing = [each for each in fromlist if not hasattr(found, each)]
        if not missing:
            return found
        # a module of its own: in the real one other packages would find the stand-ins
        filled = ModuleType(name)
        vars(filled).update((each, getattr(found, each)) for each in fromlist if each not in missing)
        vars(filled).update((each, _stand_in(name, each, importer)) for each in missing)
        return filled

    replacements.set(builtins, "__import__", lenient)
    replacements.set(_StandIn, "importing", True)


@patch("quantization.bnb", "24", "bitsandbytes is not installed")
def quantized_lora_names_bitsandbytes(module: ModuleType, replacements: Replacements) -> None:
    """Without it: NameError: name 'IS_8BIT_BNB_AVAILABLE' is not defined."""
    if not hasattr(module, "IS_4BIT_BNB_AVAILABLE"):
        replacements.set_function(module, "quantize_model", _stand_in("bitsandbytes", "nn", "quantize=True"))


class _Constructor:
    """Takes the place of a class of tensors for who calls it, and is the class where types are joined by `|`."""

    def __init__(self, call: Callable[..., Any], replaced: type) -> None:
        self._call, self._replaced = call, replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __or__(self, other: Any) -> Any:
        return self._replaced | other

    def __ror__(self, other: Any) -> Any:
        return other | self._replaced


@wrap("lazy.construction:ConstructorManager.apply", "47", "transformers >= 5, whose models are imported when asked for")
def lazy_constructors_are_types(upstream: Callable, overwrites: dict[str, tuple[Callable, Callable]]) -> None:
    """Without it a model that is first named within LazyInitContext raises TypeError: unsupported operand type(s) for
    |: 'function' and 'NoneType', from annotations such as `torch.LongTensor | None`.
    """
    classes = {name: (_Constructor(new, old), old) for name, (new, old) in overwrites.items() if isinstance(old, type)}
    upstream(overwrites | classes)


@wrap("lazy.lazy_init:LazyTensor.__torch_function__", "316", "transformers >= 5, whose models write buffers so")
def lazy_tensors_are_read_without_being_written(
    upstream: Callable, func: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> Any:
    """Without it `a.copy_(b)` counts as done to `b` too where both are lazy, and materialize raises RecursionError.

    `a.add_(a)` counts as done twice.
    """
    named = dict(kwargs or {})  # of this call alone, by which it is known again
    made = upstream(func, types, args, named)
    written = next(iter((*args, *named.values())), None)
    for each in tree_leaves((args, named)):
        noted, changes = getattr(each, "_op_buffer", ()), []
        while noted and noted[-1][2] is named:
            changes.append(noted.pop())
        if changes and each is written:
            noted.append(changes[0])
    return made


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The number of queues that a process gives its GPU work; CUDA reads it once, when it begins, and takes 8 without."""


def _given_connections() -> str | None:
    """Return what the user set: colossalai, where it was imported before, has overwritten it in `os.environ`."""
    if "colossalai.initialize" not in sys.modules:
        return os.environ.get(CONNECTIONS)
    try:
        started_with = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    prefix = f"{CONNECTIONS}=".encode()
    return next((entry[len(prefix) :].decode() for entry in started_with if entry.startswith(prefix)), None)


_GIVEN = _given_connections()


@patch("initialize", "10", f"the user has not set {CONNECTIONS}")
def streams_have_queues_of_their_own(module: ModuleType, replacements: Replacements) -> None:
    """Without it colossalai sets CUDA_DEVICE_MAX_CONNECTIONS=1 when it is imported, whatever the user has set: all
    streams share one queue, and the next forward waits behind the weights that are sent meanwhile.
    """
    if os.environ.get(CONNECTIONS) == _GIVEN:
        return
    if torch.cuda.is_initialized():
        warnings.warn(
            f"CUDA began with {CONNECTIONS}={os.environ.get(CONNECTIONS)}, which colossalai set, so communication may "
            "not run beside computation; import fp8booster.plugins before the first use of a GPU",
            stacklevel=2,
        )
        return
    # CUDA reads it when it is first used, so that now is early enough
    replacements.set_item(os.environ, CONNECTIONS, _GIVEN)


@patch(
    "torch.distributed",
    "pipeline/p2p.py:159",
    "PyTorch has no is_hccl_available (all but Ascend's builds), and no NCCL or a gloo group beside it",
)
def hccl_is_unavailable(module: ModuleType, replacements: Replacements) -> None:
    """Without it pipelines raise AttributeError: module 'torch.distributed' has no attribute 'is_hccl_available'; on a
    CUDA build over gloo, type object 'Backend' has no attribute 'HCCL'.
    """
    if not hasattr(module, "is_hccl_available"):
        replacements.set(module, "is_hccl_available", lambda: False)
    if not hasattr(module.Backend, "HCCL"):
        replacements.set(module.Backend, "HCCL", "hccl")


@wrap(
    "quantization.fp8:process_group_is_intranode",
    "40-44",
    "ranks were started by mpirun or srun, or LOCAL_WORLD_SIZE is not set and there is no GPU",
    only_if=lambda module: "LOCAL_WORLD_SIZE" in module.process_group_is_intranode.__code__.co_consts,
)
def ranks_of_a_node_are_counted(upstream: Callable, pg: dist.ProcessGroup | None) -> bool:
    """Without it: KeyError: 'LOCAL_WORLD_SIZE' under Open MPI and SLURM, and ZeroDivisionError without a launcher and a
    GPU, as soon as fp8_communication is on.
    """
    ranks = dist.get_process_group_ranks(pg if pg is not None else dist.group.WORLD)
    size = local_world_size()
    return min(ranks) // size == max(ranks) // size


def local_world_size() -> int:
    """Return the number of ranks on this node."""
    for variable in ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_TASKS_PER_NODE"):
        if variable in os.environ:
            # SLURM writes "8(x2)" for two nodes of eight tasks and "8,4" for uneven ones
            return int(re.match(r"\d+", os.environ[variable])[0])
    # no launcher: the ranks are the GPUs of this machine, or all ranks where there is none
    return torch.cuda.device_count() or dist.get_world_size()


@wrap(
    "torch.distributed:destroy_process_group",
    "cluster/process_group_mesh.py:68",
    "FP8Config(cuda_graphs=True) with tensor or sequence parallelism, whose layers communicate, over NCCL",
    kind=Kind.FP8,
)
def graphs_end_before_groups(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
    """Without it the program hangs where it ends: NCCL waits until no graph is left that holds one of the group's
    collectives. No longer needed when PyTorch frees them.
    """
    group = args[0] if args else kwargs.get("group")
    free_graphs(None if group in (None, dist.group.WORLD) else getattr(group, "group_name", ""))
    return upstream(*args, **kwargs)
