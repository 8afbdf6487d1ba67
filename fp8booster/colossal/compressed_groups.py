"""The process groups over which what Colossal-AI sends is compressed; `compat/layers.py` asks for them."""

from __future__ import annotations

import weakref

import torch.distributed as dist

_compressed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


def compress_groups(*groups: dist.ProcessGroup | None) -> None:
    """Let what Colossal-AI sends over some groups by its `*_fp8` collectives go through `fp8booster.comm`.

    Args:
        groups: None is left out, so that a mode's groups can be given as they are. A group stays registered as long as
            it lives.
    """
    _compressed.update(group for group in groups if group is not None)


def is_compressed(group: dist.ProcessGroup | None) -> bool:
    """Tell whether messages over a group are compressed."""
    return group is not None and group in _compressed
