"""One forward and its backward as two CUDA graphs, over tensors that stay where they are."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fp8booster.nn.weights.pinned import Pinned, Record, Use, copies_are_held

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
"""Values that a graph has for good."""


class Unsupported(Exception):
    """A graph cannot be given a value; the message is its class."""


def flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors in a value of tuples, lists and dicts, and tell the rest: equal for values of one kind.

    Raises:
        Unsupported: it holds something else than tensors and constants.
    """
    if isinstance(value, Tensor):
        tensors.append(value)
        return Tensor, value.shape, value.dtype, value.device, value.requires_grad and torch.is_grad_enabled()
    if isinstance(value, CONSTANTS):
        return type(value), value
    if type(value) in (tuple, list):
        return (type(value), *[flatten(each, tensors) for each in value])
    if type(value) is dict:
        return (dict, *[(name, flatten(each, tensors)) for name, each in value.items()])
    raise Unsupported(type(value).__name__)


def rebuild(value: Any, tensors: Iterator[Tensor]) -> Any:
    """Return a value as `flatten` took it apart, with other tensors in their places."""
    if isinstance(value, Tensor):
        return next(tensors)
    if type(value) in (tuple, list):
        return type(value)(rebuild(each, tensors) for each in value)
    if type(value) is dict:
        return {name: rebuild(each, tensors) for name, each in value.items()}
    return value


class Moved(Exception):
    """The graphs are of no use: what they read lies elsewhere now."""


_LIVE: weakref.WeakSet[GraphPair] = weakref.WeakSet()  # all that have graphs


def free_graphs() -> None:
    """Free the graphs of all layers of this process; a layer that runs again is captured anew.

    For what waits until no graph is left that uses it, as NCCL does before it gives up a communicator.
    """
    while _LIVE:
        _LIVE.pop().free()


class _Ticket:
    """Held by the autograd graph of one forward: as long as its backward may come."""

    used = False
    versions: list[Any]


class GraphPair:
    """A layer's forward and backward, captured for one kind of call.

    What forward saves for backward stays in the graphs' memory, so a pair serves one forward at a time: it is `free`
    again when that one's backward has run, or when no one can run it any more. The gradients of parameters lie in
    memory of the graph too, two bytes a parameter; `.grad` is a view of it until a second one is added. With
    `recompute` only the layer's inputs stay, and the graph of the backward begins with the forward. What that saves
    lies in one memory for all layers, so gradients are copied out of it at once.

    The parameters are given leaves of their own for the capture: autograd runs what accumulates a parameter's gradient
    on the stream where the parameter was first used, and a capture must not touch that.

    Args:
        record: captures work.
        forward: the layer's, by the arguments of one call.
        args, kwargs: of a call of the kind.
        layer: whose parameters get gradients, where they need one.
        uses: of FP8 weights in that forward.
        recompute: as activation checkpointing does.

    Raises:
        RuntimeError: the layer cannot be captured.
        Moved: an FP8 weight has no place of its own.
    """

    def __init__(
        self,
        record: Record,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        layer: torch.nn.Module,
        uses: Sequence[Use],
        *,
        recompute: bool = False,
    ) -> None:
        self.lacks_graphs = False  # they were given up
        given: list[Tensor] = []
        flatten((args, kwargs), given)
        with torch.no_grad():
            self._inputs = [torch.empty_like(each).copy_(each) for each in given]
        for place, each in zip(self._inputs, given, strict=True):
            place.requires_grad_(each.requires_grad)
        self._trained = [each for each in layer.parameters() if each.requires_grad]
        in_fp8 = {id(weight) for use in uses for weight in use.weights}
        self._read = [each for each in layer.parameters() if id(each) not in in_fp8]
        self._passing = recompute
        leaves = {each: _leaf_over(each) for each in layer.parameters()}
        self._places = [each.data_ptr() for each in self._read]
        self._pinned: list[Pinned] = []
        for use in uses:
            pinned = use.pin(record)
            if pinned is None:
                raise Moved
            self._pinned.append(pinned)
        self.refresh()
        device = given[0].device.type
        casts, to = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        static_args, static_kwargs = rebuild((args, kwargs), iter(self._inputs))
        live: list[Tensor] = []

        def run_layer() -> None:
            # what autocast keeps until its end would lie in memory of a graph
            with torch.autocast(device, to, casts, cache_enabled=False), _in_place_of_parameters(layer, leaves):
                made = forward(*static_args, **static_kwargs)
            live.clear()
            flatten(made, live)
            self._made = rebuild(made, (each.detach() for each in live))

        def run_forward() -> list[Tensor]:
            with torch.set_grad_enabled(not recompute):
                run_layer()
            return [each.detach() for each in live]

        wanted = [*self._inputs, *(leaves[each] for each in self._trained)]
        self._gets_gradient = [each.requires_grad for each in wanted]

        def run_backward() -> list[Tensor | None]:
            if recompute:
                with torch.enable_grad():
                    run_layer()
            self._needs_grad = [each.requires_grad for each in live]
            ends = [(each, place) for each, place in zip(live, self._gradients_in, strict=True) if each.requires_grad]
            roots, gradients = zip(*ends, strict=True)
            # without `recompute` what was saved stays in use: the next replay of the forward writes it again
            trained = [each for each in wanted if each.requires_grad]
            with torch.autocast(device, enabled=False):
                found = torch.autograd.grad(roots, trained, gradients, retain_graph=not recompute, allow_unused=True)
            if recompute:
                live.clear()
            return list(found)

        # hooks of whoever calls the layer, as of checkpointing, are not for what the graphs save
        with copies_are_held(), torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
            self._forward, self._outputs = record(run_forward, passing=recompute)
            self._gradients_in = [torch.zeros_like(each) for each in self._outputs]
            self._backward, self._gradients = record(run_backward, passing=recompute)
        self._ticket: weakref.ref[_Ticket] | None = None
        _LIVE.add(self)

    def free(self) -> None:
        """Give up the graphs, once: what runs next raises."""
        self.lacks_graphs = True
        self._pinned.clear()
        del self._forward, self._backward

    @property
    def is_free(self) -> bool:
        """Tell whether no backward is awaited."""
        ticket = None if self._ticket is None else self._ticket()
        return ticket is None or ticket.used

    def refresh(self) -> None:
        """Make what the graphs read what it is now; raise `Moved` where that lies elsewhere."""
        if self._places != [each.data_ptr() for each in self._read]:
            raise Moved
        for pinned in self._pinned:
            if not pinned.refresh():
                raise Moved

    def run(self, given: Sequence[Tensor]) -> Any:
        """Return what the layer gives for a call with these tensors, in the order of `flatten`; may raise `Moved`."""
        self.refresh()
        outputs = _Replayed.apply(self, len(given), *given, *self._trained)
        return rebuild(self._made, iter(outputs))

    def _replay_forward(self, given: Sequence[Tensor], ticket: _Ticket) -> tuple[Tensor, ...]:
        with torch.no_grad():
            torch._foreach_copy_(self._inputs, list(given))
        ticket.versions = self._versions()  # a replayed backward reads weights in place, past autograd's check
        self._ticket = weakref.ref(ticket)
        self._forward()
        return tuple(each.clone() for each in self._outputs)  # the next replay writes over them

    def _replay_backward(self, ticket: _Ticket, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self.lacks_graphs:
            raise RuntimeError(
                "the CUDA graphs of this forward were freed before its backward, because a process group was "
                "destroyed; run backward first"
            )
        if self._ticket is None or self._ticket() is not ticket:
            raise RuntimeError(
                "a layer captured into a CUDA graph ran forward again before this second backward, and what it had "
                "saved is gone; run backward once, or build the model with FP8Config(cuda_graphs=False)"
            )
        if ticket.versions != self._versions():
            raise RuntimeError(
                "a weight needed for gradient computation has been modified by an inplace operation: an optimizer "
                "stepped between this forward and its backward; run backward before the step"
            )
        ticket.used = True
        self._keep_gradients()
        for place, gradient in zip(self._gradients_in, gradients, strict=True):
            if gradient is None:  # the captured backward reads every place
                place.zero_()
            else:
                place.copy_(gradient)
        self._backward()
        found = iter(self._gradients)
        each_one = (next(found) if gets else None for gets in self._gets_gradient)
        # a view that no one else has: autograd takes it for `.grad` as it is
        own = torch.clone if self._passing else Tensor.detach
        return [None if each is None else own(each) for each in each_one]

    def _keep_gradients(self) -> None:
        """Move gradients of earlier micro-batches out of the memory that backward writes to."""
        of_inputs = len(self._gradients) - len(self._trained)
        for parameter, gradient in zip(self._trained, self._gradients[of_inputs:], strict=True):
            held = parameter.grad
            if held is not None and gradient is not None and held.data_ptr() == gradient.data_ptr():
                parameter.grad = held.clone()

    def _versions(self) -> list[Any]:
        return [each._version for each in self._read] + [pinned.version() for pinned in self._pinned]


def _leaf_over(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return another leaf over a parameter's memory, with what was noted on it."""
    leaf = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


@contextmanager
def _in_place_of_parameters(
    layer: torch.nn.Module, leaves: dict[torch.nn.Parameter, torch.nn.Parameter]
) -> Iterator[None]:
    """Give a layer's modules the leaves for parameters, in the block."""
    own = [(module._parameters, dict(module._parameters)) for module in layer.modules()]
    for held, parameters in own:
        held.update({name: leaves[each] for name, each in parameters.items() if each is not None})
    try:
        yield
    finally:
        for held, parameters in own:
            held.update(parameters)


class _Replayed(torch.autograd.Function):
    """A layer by its two graphs."""

    @staticmethod
    def forward(ctx: Any, pair: GraphPair, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.pair, ctx.ticket = pair, _Ticket()
        ctx.leaves = [each.is_leaf for each in tensors[:count]]
        ctx.set_materialize_grads(False)
        outputs = pair._replay_forward(tensors[:count], ctx.ticket)
        ctx.mark_non_differentiable(
            *(each for each, needed in zip(outputs, pair._needs_grad, strict=True) if not needed)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        found = ctx.pair._replay_backward(ctx.ticket, gradients)
        for place, is_leaf in enumerate(ctx.leaves):  # what a user keeps must outlive the next replay
            if is_leaf and found[place] is not None:
                found[place] = found[place].clone()
        return None, None, *found
