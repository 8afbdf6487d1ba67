"""A stand-in for gradients that an optimizer has updated by in backward: operators on it raise an error.

With None there `torch.nn.utils.clip_grad_norm_`, and Accelerate's, would find no gradients and return 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

REFUSAL = (
    "an AdamW with update_in_backward=True leaves no gradients to clip or read, for backward updates by each at once; "
    "leave clipping out (max_grad_norm=0), or make the AdamW without it"
)

WHY_NOT_REDUCED = (
    "backward has updated by this rank's gradient before it was reduced over ranks, as by DistributedDataParallel, and "
    "the ranks' weights diverge; leave update_in_backward out, or take LowLevelZeroPlugin"
)

_CLIPS = inspect.unwrap(torch.nn.utils.clip_grad_norm_).__code__

_ADDS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)


class UsedGradient(torch.Tensor):
    """Takes the place of a parameter's gradient, without memory; autograd may add the next gradient to it.

    It may be set to zero, as `model.zero_grad(set_to_none=False)` does.

    Args:
        parameter: of any dtype and device.

    Raises:
        ValueError, from every other operator: the gradient is used up. But clipping to an infinite norm gives NaN, for
            so transformers 5's Trainer reads the norm that it logs where it does not clip.
        RuntimeError, from one within backward: somebody reduces a gradient over ranks that this rank has used.
    """

    added: torch.Tensor | None
    """The gradient that autograd has added since."""

    is_zero: bool
    """Whether it was set to zero since."""

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> UsedGradient:
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            parameter.shape,
            strides=parameter.stride(),
            dtype=parameter.dtype,
            device=parameter.device,
            storage_size=0,  # whoever copies its memory, as `share_memory` does, shall find none
        )
        made.added, made.is_zero = None, False
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Take a gradient that autograd adds in backward, and zeros; raise an error for all else."""
        if torch._C._current_graph_task_id() != -1:  # backward runs in this thread
            if function not in _ADDS or not isinstance(args[0], cls):
                raise RuntimeError(WHY_NOT_REDUCED)  # hooks on parameters read it, as DDP's reducer
            used, gradient = args
            used.added = gradient if used.added is None else used.added + gradient
            return used
        if function is torch.ops.aten.zero_.default:
            (used,) = args
            used.added, used.is_zero = None, True
            return used
        if function is torch.ops.aten._foreach_zero_.default:
            for each in args[0]:  # among gradients of other optimizers
                each.zero_()
            return None
        if _norm_is_only_read():
            if function is torch.ops.aten.linalg_vector_norm.default:
                return torch.full((), math.nan, dtype=torch.float32, device=args[0].device)
            if function is torch.ops.aten.mul_.Tensor:  # by the NaN that comes of it
                return args[0]
        raise ValueError(REFUSAL)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"UsedGradient(shape={tuple(self.shape)}, dtype={self.dtype})"


def _norm_is_only_read() -> bool:
    """Tell whether torch clips gradients here to an infinite norm, which changes none."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not _CLIPS:
        frame = frame.f_back
    return frame is not None and frame.f_locals.get("max_norm") == math.inf
