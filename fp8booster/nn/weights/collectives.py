"""What collectives write is seen: torch's own raise no version counter.

A copy of a tensor, such as an FP8 weight or the amax that came with a gradient, is known to be stale by the tensor's
version counter. `torch.distributed` writes its results past that counter. Here the methods of `ProcessGroup`, through
which all of its Python goes (lists, objects, coalesced and point-to-point forms too), raise it, and note a write to
memory that somebody watches, also through `.data`.

Not seen are collectives that C++ calls by itself: the gradients that DDP reduces, and `torch.ops._c10d_functional.*_`.
What DDP and FSDP broadcast at the start, and functional collectives, raise the counter by themselves.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

_WRITING = re.compile(r"_?(all_?(gather|reduce|to_?all)|broadcast|gather|recv|reduce|scatter)")
"""Beginnings of the names of ProcessGroup's methods that write, in each version of torch, to their first argument."""

_WRITTEN = ("tensors", "tensor", "output_tensors", "outputs", "output", "outputTensor", "output_lists")
"""Names of that argument."""

_watched: set[int] = set()
"""Storages whose changes somebody wants to know of."""


def watch_collectives(changed: Callable[[], None]) -> None:
    """Raise the version counter of what collectives write, from now on; once in a process.

    Args:
        changed: called when one wrote to memory that is watched, which is watched no longer then.
    """
    for name in dir(dist.ProcessGroup):
        if _WRITING.match(name):
            setattr(dist.ProcessGroup, name, _seen(getattr(dist.ProcessGroup, name), changed))


def watch_memory(tensor: torch.Tensor) -> None:
    """Watch all memory that a tensor is a part of, until `forget_memory` or the first write."""
    _watched.add(tensor.untyped_storage()._cdata)


def forget_memory() -> None:
    """Watch nothing."""
    _watched.clear()


def _seen(method: Callable[..., Any], changed: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(method)
    def seen(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(group, *args, **kwargs)
        finally:
            written = args[0] if args else [kwargs[name] for name in _WRITTEN if name in kwargs]
            _note(_tensors_in(written), changed)

    return seen


def _note(written: list[torch.Tensor], changed: Callable[[], None]) -> None:
    torch.autograd.graph.increment_version([each for each in written if not each.is_inference()])
    if _watched and any(each.layout is torch.strided and each.untyped_storage()._cdata in _watched for each in written):
        forget_memory()
        changed()


def _tensors_in(written: Any) -> list[torch.Tensor]:
    if isinstance(written, torch.Tensor):
        return [written]
    return [tensor for each in written for tensor in _tensors_in(each)]
