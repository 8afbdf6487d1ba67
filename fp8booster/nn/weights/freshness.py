"""Tells whether what was made of a weight is still what the weight is.

It is while no optimizer has stepped, no collective has written to the weight's memory, and the weight is the same
tensor object with the same storage and version counter. The object counts because a weight that is computed anew at
each forward (spectral norm, `functional_call`) may lie where the last one lay. torch counts in-place changes of a
tensor, but not those made through `.data`, as optimizers over sharded or flat parameters do; the count of optimizer
steps sees these. A step that was captured into a CUDA graph runs no hook when it is replayed: from then on every
replay counts.

Where no optimizer of torch has stepped since a layer was made, a loop or a class of the user's own may write weights
through `.data`, or backward itself, as with LOMO: there each backward of the layer counts as a step.

Else a change through `.data` between two steps, made by hand, is seen by none of these, nor is one that a replayed
graph makes without a step. The next call of `eval()`, or of `train()` after it, makes the copies of a layer's weight
stale, for averages of weights are written so before it (`look_again`); else call `forget_weights(model)` after such a
change.

A step makes every copy stale, so it frees them all: between a step and the next forward FP8 weights that are cast once
a step take no memory.

`torch.distributed` writes its results past the version counter, by which also the amax that came with a gradient is
known to be stale. So the methods of `ProcessGroup`, through which all of its Python goes (lists, objects, coalesced and
point-to-point forms too), raise it here, and count as a change where they write to a weight that copies were made of,
also through `.data`. Not seen are collectives that C++ calls by itself: the gradients that DDP reduces, and
`torch.ops._c10d_functional.*_`. What DDP and FSDP broadcast at the start, and functional collectives, raise the counter
by themselves.
"""

from __future__ import annotations

import functools
import re
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any, ClassVar, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

from fp8booster.kernels.device import current_stream
from fp8booster.nn.weights.pinned import Copies, copies_held
from fp8booster.optim.one_pass import COUNTS_STEPS
from fp8booster.scaling.steps import Steps, note_step


class _Changes:
    """Counts what may have changed any weight of this process."""

    count = 0

    copies: ClassVar[weakref.WeakSet[FreshCopy]] = weakref.WeakSet()
    """Those made since the last change."""

    watched: ClassVar[set[int]] = set()
    """Storages of the weights that they were made of."""

    lock = threading.Lock()
    """Other threads, which run other models, make copies while one thread's optimizer steps."""

    @classmethod
    def add(cls) -> None:
        with cls.lock:
            cls.count += 1
            stale = list(cls.copies)
            cls.copies.clear()
        # past the lock: other threads need not wait until memory is freed
        for copy in stale:
            copy.forget()
        cls.watched.clear()


def _count_step(*_: object) -> None:
    """Run after the step of every optimizer in this process."""
    _Changes.add()
    note_step()
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        _count_replays(torch.cuda.CUDAGraph)


def _count_replays(graph: type[torch.cuda.CUDAGraph]) -> None:
    """Let every replay of a class of CUDA graphs count as a step."""
    replay = graph.replay
    if hasattr(replay, _COUNTED):
        return

    @functools.wraps(replay)
    def counted(self: torch.cuda.CUDAGraph) -> None:
        replay(self)
        _Changes.add()
        note_step()

    setattr(counted, _COUNTED, True)
    graph.replay = counted  # type: ignore[method-assign]


def replay_uncounted(graph: torch.cuda.CUDAGraph) -> None:
    """Replay a graph that holds no step of an optimizer."""
    replay = type(graph).replay
    getattr(replay, "__wrapped__", replay)(graph)


_COUNTED = "_fp8booster_counted"

setattr(_count_step, COUNTS_STEPS, True)
register_optimizer_step_post_hook(_count_step)


_WRITING = re.compile(r"_?(all_?(gather|reduce|to_?all)|broadcast|gather|recv|reduce|scatter)")
"""Beginnings of the names of ProcessGroup's methods that write, in each version of torch, to their first argument."""

_WRITTEN = ("tensors", "tensor", "output_tensors", "outputs", "output", "outputTensor", "output_lists")
"""Names of that argument."""


def _seen(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def seen(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        try:
            return method(group, *args, **kwargs)
        finally:  # also a collective that raises may have written a part
            written = _tensors_in(args[0] if args else [kwargs[name] for name in _WRITTEN if name in kwargs])
            # tensors of inference mode have no version to raise
            torch.autograd.graph.increment_version([each for each in written if not each.is_inference()])
            if _Changes.watched and any(
                each.layout is torch.strided and each.untyped_storage()._cdata in _Changes.watched for each in written
            ):
                _Changes.add()

    return seen


def _tensors_in(written: Any) -> list[torch.Tensor]:
    if isinstance(written, torch.Tensor):
        return [written]
    return [tensor for each in written for tensor in _tensors_in(each)]


for _name in filter(_WRITING.match, dir(dist.ProcessGroup)):
    setattr(dist.ProcessGroup, _name, _seen(getattr(dist.ProcessGroup, _name)))


def weight_states(weights: Sequence[torch.Tensor]) -> list[tuple]:
    """Return for each weight what changes when a copy of it is no longer fresh, while its memory is watched.

    Args:
        weights: of one device.
    """
    # another stream casts anew rather than read a copy that this one may not have finished
    stream = current_stream(weights[0]) if weights and weights[0].is_cuda else None
    count = _Changes.count + Steps.backwards
    return [(each.data_ptr(), each._version, getattr(each, LOOKS, 0), each.dtype, count, stream) for each in weights]


_CDATA = attrgetter("_cdata")


def look_again(weight: torch.Tensor) -> None:
    """Make what was made of a weight stale, and what an engine made of it unsure: it may have been written unseen."""
    setattr(weight, LOOKS, getattr(weight, LOOKS, 0) + 1)


LOOKS = "_fp8booster_looks"
"""Attribute of a weight: how often `look_again` was called for it."""


def fresh_tensors() -> Iterator[torch.Tensor]:
    """Yield the tensors of all copies that were made since the last change."""
    with _Changes.lock:
        copies = list(_Changes.copies)
    for copy in copies:
        yield from (leaf for leaf in tree_leaves(copy.made) if isinstance(leaf, torch.Tensor))


def note_change(weights: Sequence[torch.Tensor]) -> None:
    """Make every copy of some weights stale; also one made of what an engine gathers of them."""
    _Changes.add()
    torch.autograd.graph.increment_version([weight for weight in weights if not weight.is_inference()])


def reusable(input: torch.Tensor, weight: torch.Tensor) -> bool:
    """Tell whether casts of these tensors made earlier may be used again here.

    Not in code that is being compiled or captured into a CUDA graph: it would keep the first copy for ever. Not for
    tensors made in inference mode: torch does not count their changes. Not in that mode: what is cast there cannot be
    saved for a backward.
    """
    return not (
        torch.compiler.is_compiling()
        or torch.is_inference_mode_enabled()
        or input.is_inference()
        or weight.is_inference()
        or captured_without_copies(input)
    )


def captured_without_copies(tensor: torch.Tensor) -> bool:
    """Tell whether work on a tensor is being captured into a CUDA graph, which finds no copies that stay fresh."""
    # not by `kernels.device.is_captured`: each call of a layer asks here
    return tensor.is_cuda and not Copies.held and torch.cuda.is_current_stream_capturing()


Made = TypeVar("Made")


@dataclass(frozen=True, eq=False)
class _Content(Generic[Made]):
    """A copy, and what it is a copy of."""

    made: Made
    key: Hashable
    weights: list[weakref.ref[torch.Tensor]]
    states: list[tuple]

    def is_of(self, weights: Sequence[torch.Tensor]) -> bool:
        """Tell whether it was made of these as they are."""
        made_of = map(weakref.ref.__call__, self.weights)  # of hundreds of experts without a call of Python's for each
        return all(map(is_, made_of, weights)) and self.states == weight_states(weights)

    def lies_there(self, weights: Sequence[torch.Tensor]) -> bool:
        """Tell whether it was made of what lies where these lie: a capture has leaves of its own for the weights."""
        return [state[0] for state in self.states] == [weight.data_ptr() for weight in weights]


class FreshCopy(Generic[Made]):
    """A copy that was made of some weights, until one of them changes."""

    _content: _Content[Made] | None = None
    """Replaced as a whole, for another thread may free it at any time."""

    @property
    def made(self) -> Made | None:
        """The copy, fresh or not."""
        content = self._content
        return None if content is None else content.made

    def get(self, weights: Sequence[torch.Tensor], key: Hashable) -> Made | None:
        """Return the copy, or None where a weight has changed since, or what it was made by.

        Args:
            weights: what it shall be made of.
            key: what else it depends on.
        """
        content = self._content
        if content is None or content.key != key or len(content.weights) != len(weights):
            return None
        fresh = content.lies_there(weights) if Copies.held and copies_held(weights[0]) else content.is_of(weights)
        return content.made if fresh else None

    def put(self, weights: Sequence[torch.Tensor], key: Hashable, made: Made) -> Made:
        """Hold a copy that was just made; the arguments are those of `get`."""
        # storages, not places: collectives write to the flat buffer that a weight is a view of
        _Changes.watched.update(map(_CDATA, map(torch.Tensor.untyped_storage, weights)))
        self._content = _Content(made, key, list(map(weakref.ref, weights)), weight_states(weights))
        with _Changes.lock:
            _Changes.copies.add(self)
        return made

    def forget(self) -> None:
        """Free the copy."""
        self._content = None


def held_copies(copies: Sequence[FreshCopy[Made]]) -> list[FreshCopy[Made]]:
    """Return those that hold something, fresh or not."""
    return [copy for copy in copies if copy._content is not None]
