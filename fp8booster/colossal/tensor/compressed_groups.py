"""The process groups over which what Colossal-AI sends is compressed."""

from __future__ import annotations

import weakref

import torch.distributed as dist

_compressed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def register(*groups: dist.ProcessGroup | None) -> None:
    """Compress over some groups as long as they live; None is left out."""
    _compressed.update(group for group in groups if group is not None)


def is_compressed(group: dist.ProcessGroup | None) -> bool:
    """Whether what is sent over a group is compressed."""
    return group is not None and group in _compressed
