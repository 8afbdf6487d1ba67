"""Gradients of `DistributedDataParallel` in FP8.

    model = DistributedDataParallel(model)
    model.register_comm_hook(None, fp8booster.comm.ddp_hook)

    fp8booster.comm.average_in_fp8(model)           # before a library wraps it

Unlike torch's own compression hooks, this one adds in FP32: a gradient is rounded twice, whatever the number of ranks.
"""
# No `from __future__ import annotations`: DDP compares the hook's annotations with classes.

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fp8booster.comm.collectives import all_reduce, copy_parts
from fp8booster.comm.encoding import DEFAULT, Encoding

BUCKET_MB = 64
"""The size of DDP's buckets: inside a node, messages under 64 MiB are faster uncompressed (`comm.threshold`), and DDP
closes a bucket with the gradient that fills it."""


@dataclass(frozen=True, kw_only=True)
class DDPState:
    """Settings that `register_comm_hook` hands to `ddp_hook`."""

    group: dist.ProcessGroup | None = None
    """The group that the gradients are averaged over; None is the default group."""

    encoding: Encoding = DEFAULT
    """Format and scales on the wire."""

    min_bytes: int | None = None
    """The smallest bucket that is sent in FP8; None takes `threshold.MINIMUM_BYTES`."""

    apart: Callable[[Tensor], bool] | None = None
    """Tells parameters that ranks outside the group hold too. Their gradients share a message with one another alone:
    their rounding must not depend on gradients that differ between those ranks."""


def ddp_hook(state: DDPState | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over the ranks, in FP8.

    Args:
        state: settings, or None for the defaults.
        bucket: DDP's, averaged in place. Larger buckets (`DistributedDataParallel(bucket_cap_mb=...)`) gain more: those
            under the threshold go uncompressed.
    """
    state = state or DDPState()
    gradients = [
        gradient
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True)
        if state.apart is not None and state.apart(parameter)
    ]
    # DDP wants a tensor of the future, and that of a collective has the list of its outputs
    if not gradients:
        return _average(bucket.buffer(), state).get_future().then(lambda future: future.value()[0])
    # DDP takes back one buffer. Zeros stand in it for gradients that are sent apart, and cost no precision there
    message = torch.cat([gradient.reshape(-1) for gradient in gradients])
    torch._foreach_zero_(gradients)
    first, second = _average(message, state), _average(bucket.buffer(), state)

    def put_back(future: torch.futures.Future[list[Tensor]]) -> Tensor:
        (buffer,) = future.value()
        first.wait()
        copy_parts(gradients, message)
        if message.is_cuda:  # made on the stream of backward, whose next message must not overwrite it yet
            message.record_stream(torch.cuda.current_stream(message.device))
        return buffer

    return second.get_future().then(put_back)


def _average(tensor: Tensor, state: DDPState) -> dist.Work:
    work = all_reduce(
        tensor, dist.ReduceOp.AVG, state.group, async_op=True, encoding=state.encoding, min_bytes=state.min_bytes
    )
    return cast(dist.Work, work)  # of a member, which DDP's ranks are, there is one


def average_in_fp8(model: nn.Module, state: DDPState | None = None) -> None:
    """Let `DistributedDataParallel` average the gradients of a model by `ddp_hook`, whenever it is wrapped later.

    For programs where a library wraps the model. A wrapper that has a hook of its own keeps it, and so does one in
    compiled code. Calling it again changes the settings for wrappers that the model has not run in.

    Args:
        model: not wrapped yet.
        state: settings, or None for the defaults.
    """
    at_forward(model, _HookAtForward(state))


class AtForward:
    """Finds at a forward in what a library has wrapped the model. A class, for a model that is pickled."""

    def __call__(self, model: nn.Module, given: object, /) -> None:
        """Look; do nothing once it has done what it is for.

        Args:
            model: the model or a part of it.
            given: to its forward.
        """
        raise NotImplementedError


def at_forward(model: nn.Module, hook: AtForward | None) -> None:
    """Call a hook before a model's forward, and before those of its parts: peft calls a model past its hooks.

    Args:
        model: not wrapped yet. Hooks of earlier calls are taken away, also those of a model inside.
        hook: None: the model is to have none.
    """
    for module in model.modules():
        for number, each in list(module._forward_pre_hooks.items()):
            if isinstance(each, AtForward):
                del module._forward_pre_hooks[number]
    if hook is not None:
        for module in (model, *(part for part in model.children() if any(True for _ in part.children()))):
            module.register_forward_pre_hook(hook)


class _HookAtForward(AtForward):
    """Registers the hook with the wrapper in which a model runs."""

    def __init__(self, state: DDPState | None) -> None:
        self.state = state

    def __call__(self, model: nn.Module, _: object) -> None:
        if torch.compiler.is_compiling():
            return
        # the one whose forward runs now, of which PyTorch's compiler asks the same
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or wrapper._comm_hooks:
            return
        if any(each is model for each in wrapper.module.modules()):  # or adapters that came around it
            wrapper.register_comm_hook(self.state, ddp_hook)
