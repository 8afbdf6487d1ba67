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

from fp8booster.nn.graphs.recorder import Memory, Recorder
from fp8booster.nn.weights.pinned import Pinned, Use, copies_are_held

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


class Freed(Exception):
    """Memory that other graphs keep was freed during a capture, which may have taken it."""


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
    again when that one's backward has run, or when no one can run it any more. All else that the graphs write lies
    where other pairs of the memory have theirs; outputs and gradients are copied out at once. With `recompute` only
    the layer's inputs stay, and the graph of the backward begins with the forward.

    The parameters are given leaves of their own for the capture: autograd runs what accumulates a parameter's gradient
    on the stream where the parameter was first used, and a capture must not touch that.

    Args:
        record: captures work.
        memory: of the graphs, which pairs share that are replayed last in, first out.
        forward: the layer's, by the arguments of one call.
        args, kwargs: of a call of the kind.
        layer: whose parameters get gradients, where they need one.
        uses: of FP8 weights in that forward.
        recompute: as activation checkpointing does.
        copies_gradients: give parameters copies of their gradients. Else FP8 products write them to places that stay,
            two bytes a parameter, and gradients are views of these: no time is spent on copies.

    Raises:
        RuntimeError: the layer cannot be captured.
        Moved: an FP8 weight has no place of its own.
        Freed: memory was freed meanwhile that the graphs of other pairs need; another memory is to be taken.
    """

    def __init__(
        self,
        record: Recorder,
        memory: Memory,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        layer: torch.nn.Module,
        uses: Sequence[Use],
        *,
        recompute: bool = False,
        copies_gradients: bool = False,
    ) -> None:
        self.lacks_graphs = False  # they were given up
        self.was_set_aside = False
        self.gradients_were_held = False  # when backward came again
        self._record, self._memory = record, memory
        self._aside: list[tuple[Tensor, Tensor]] | None = None  # what forward kept for backward, and copies of it
        given: list[Tensor] = []
        flatten((args, kwargs), given)
        with torch.no_grad():
            self._inputs = [torch.empty_like(each).copy_(each) for each in given]
        for place, each in zip(self._inputs, given, strict=True):
            place.requires_grad_(each.requires_grad)
        self._trained = [each for each in layer.parameters() if each.requires_grad]
        in_fp8 = {id(weight) for use in uses for weight in use.weights}
        self._read = [each for each in layer.parameters() if id(each) not in in_fp8]
        leaves = {each: _leaf_over(each) for each in layer.parameters()}
        self._read_at = [each.data_ptr() for each in self._read]
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

        self._saved: list[Tensor] = []

        def hold(saved: Tensor) -> Tensor:
            self._saved.append(saved.detach())
            return saved

        before = record.in_use(memory)
        # hooks of whoever calls the layer, as of checkpointing, are not for what the graphs save
        places: dict[int, Tensor] = {}

        def place_of_gradient(shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
            made = record.outside(shape, dtype)
            if made is not None:
                places[made.data_ptr()] = made
            return made

        place_of = None if copies_gradients else place_of_gradient
        with copies_are_held(place_of), torch.autograd.graph.saved_tensors_hooks(hold, lambda saved: saved):
            self._forward, outputs = record(run_forward, memory)
            kept = record.in_use(memory)
            self._gradients_in = [record.place_like(each, number) for number, each in enumerate(outputs)]
            self._backward, gradients = record(run_backward, memory)
        if recompute:
            self._saved.clear()
        used_up = {each.untyped_storage().data_ptr() for each in outputs}
        self._outputs = [record.let_go(each) for each in outputs]
        self._made = rebuild(self._made, iter(self._outputs))
        self._gradients = [
            each if each is None or each.untyped_storage().data_ptr() in places else record.let_go(each)
            for each in gradients
        ]
        written = {each.untyped_storage().data_ptr() for each in gradients if each is not None}
        self._places = [each for address, each in places.items() if address in written]
        self._stays = [each is not None and each.untyped_storage().data_ptr() in places for each in gradients]
        del outputs, gradients
        places.clear()
        live.clear()  # the autograd graph ends here: a node may hold the layer, which would never be freed
        after = record.in_use(memory)
        # what forward kept and backward freed is written by this pair's replays all the same
        kept = {place: size for place, size in kept.items() if place in after or place not in used_up} | after
        self._kept = {place: size for place, size in kept.items() if place not in before}
        if not memory.is_whole(after):
            raise Freed
        self.order = memory.add(self, self._kept)
        self._holders = list(map(record.holders, self._places))
        self._ticket: weakref.ref[_Ticket] | None = None
        _LIVE.add(self)

    def free(self) -> None:
        """Give up the graphs, once: what runs next raises."""
        self.lacks_graphs = True
        self._pinned.clear()
        self._saved.clear()
        del self._forward, self._backward

    @property
    def is_free(self) -> bool:
        """Tell whether no backward is awaited."""
        ticket = None if self._ticket is None else self._ticket()
        return ticket is None or ticket.used

    @property
    def may_run(self) -> bool:
        """Tell whether no pair that was captured later waits for its backward: a replay would write over it."""
        return not self._memory.later_ones(self)

    def refresh(self) -> None:
        """Make what the graphs read what it is now; raise `Moved` where that lies elsewhere."""
        if self._read_at != [each.data_ptr() for each in self._read]:
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
        self._aside = None
        if self._kept:
            self._memory.wait_for(self)
        self._forward()
        return tuple(_copied(self._outputs))

    def _replay_backward(self, ticket: _Ticket, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        if self.lacks_graphs:
            raise RuntimeError(
                "the CUDA graphs of this forward were freed before its backward, because a process group was "
                "destroyed; run backward first"
            )
        if ticket.used or self._ticket is None or self._ticket() is not ticket:
            raise RuntimeError(
                "a layer captured into a CUDA graph goes backward a second time, and what it had saved is gone; run "
                "the first backward with retain_graph=True"
            )
        if ticket.versions != self._versions():
            raise RuntimeError(
                "a weight needed for gradient computation has been modified by an inplace operation: an optimizer "
                "stepped between this forward and its backward; run backward before the step"
            )
        for other in self._memory.later_ones(self):
            other.set_aside()
        # a graph that is kept may go backward again, and until it is freed nothing may lie where it has its values
        ticket.used = not torch._C._autograd._get_current_graph_task_keep_graph()
        if self._aside:
            torch._foreach_copy_([place for place, _ in self._aside], [copy for _, copy in self._aside])
        self._aside = None
        for place, gradient in zip(self._gradients_in, gradients, strict=True):
            if gradient is None:  # the captured backward reads every place
                place.zero_()
            else:
                place.copy_(gradient)
        if self._holders != list(map(self._record.holders, self._places)):
            found = self._backward_beside_held_gradients()
        else:
            self._backward()
            passing = [each for each, stays in zip(self._gradients, self._stays, strict=True) if not stays]
            copies = iter(_copied(passing))
            # a view that no one else has: autograd takes it for `.grad` as it is
            found = [
                each.detach() if each is not None and stays else next(copies)
                for each, stays in zip(self._gradients, self._stays, strict=True)
            ]
        made = iter(found)
        return [next(made) if gets else None for gets in self._gets_gradient]

    def _backward_beside_held_gradients(self) -> list[Any]:
        """Replay backward where somebody has gradients of an earlier one, as when they add up, which stay as they are.

        The next forward has graphs that give copies.
        """
        self.gradients_were_held = True
        held = [each.clone() for each in self._places]
        self._backward()
        found = _copied(self._gradients)
        torch._foreach_copy_(self._places, held)
        return found

    def set_aside(self) -> None:
        """Copy what waits for this pair's backward: a pair that was captured before runs backward first."""
        self.was_set_aside = True  # the next forward has graphs in memory of its own
        if self._aside is None:
            places = [self._record.bytes_at(*place) for place in self._kept.items()]
            self._aside = [(place, place.clone()) for place in places]

    def _versions(self) -> list[Any]:
        return [each._version for each in self._read] + [pinned.version() for pinned in self._pinned]


def _copied(passing: list[Any]) -> list[Any]:
    """Return copies of tensors, or None where there is None, before the next replay writes over them."""
    copies = [None if each is None else torch.empty_like(each) for each in passing]
    torch._foreach_copy_([each for each in copies if each is not None], [each for each in passing if each is not None])
    return copies


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
        ctx.set_materialize_grads(False)
        outputs = pair._replay_forward(tensors[:count], ctx.ticket)
        ctx.mark_non_differentiable(
            *(each for each, needed in zip(outputs, pair._needs_grad, strict=True) if not needed)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        return None, None, *ctx.pair._replay_backward(ctx.ticket, gradients)
