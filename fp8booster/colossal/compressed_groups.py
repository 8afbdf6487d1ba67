"""The process groups over which what Colossal-AI sends is compressed; `compat/layers.py` asks for them."""

from __future__ import annotations

import weakref

import torch.distributed as dist

from fp8booster.comm.encoding import DEFAULT, Encoding

_encodings: weakref.WeakKeyDictionary[dist.ProcessGroup, Encoding] = weakref.WeakKeyDictionary()


def compress_groups(*groups: dist.ProcessGroup | None, encoding: Encoding = DEFAULT) -> None:
    """Let what Colossal-AI sends over some groups by its `*_fp8` collectives go through `fp8booster.comm`.

    Args:
        groups: None is left out, so that a mode's groups can be given as they are. A group stays registered as long as
            it lives.
        encoding: of the messages.
    """
    _encodings.update((group, encoding) for group in groups if group is not None)


def encoding_of(group: dist.ProcessGroup | None) -> Encoding | None:
    """Return the encoding of messages over a group; None: they are not compressed."""
    return None if group is None else _encodings.get(group)
