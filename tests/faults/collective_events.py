"""Count a process's calls of torch.distributed, and act at one of them: kill, stop or signal the process."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

_NAMES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "isend",
    "irecv",
    "recv",
    "reduce_scatter_tensor",
    "send",
)


class CollectiveEvents:
    """The calls of `torch.distributed`'s functions, by name, from now on.

    Args:
        at: the number of the call before which `act` is called; 0: none.
    """

    def __init__(self, at: int = 0, act: Callable[[], object] = lambda: None) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        self.seen: list[str] = []

        def counted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
            @wraps(call)
            def counting(*arguments: Any, **named: Any) -> Any:
                self.seen.append(name)
                if len(self.seen) == at:
                    act()
                return call(*arguments, **named)

            return counting

        for name in _NAMES:
            wrapper = counted(name, getattr(dist, name))
            for module in (dist, distributed_c10d):  # torch's own functions call each other in the latter
                setattr(module, name, wrapper)
