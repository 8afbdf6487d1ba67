"""A layer's forward and backward for one kind of call, over tensors that stay where they are: what graphs capture."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

CONSTANTS = (bool, int, float, str, type(None), torch.dtype, torch.device, Enum)
"""Values that a graph has for good."""


class Unsupported(Exception):
    """A graph cannot be given a value; the message is its class."""


class Refused(Exception):
    """No graph can be of a layer as it is called; the message tells why."""


def is_plain(tensor: Tensor) -> bool:
    """Tell whether a tensor is no more than its values in its memory, so that another may stand in its place."""
    return type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided


def flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors in a value of tuples, lists and dicts, and tell the rest: equal for values of one kind.

    One that is there several times is appended once, so that it has one place and one gradient.

    Raises:
        Unsupported: it holds something else than tensors and constants.
    """
    key: list[Any] = []
    before = len(tensors)
    left, numbers = [value], dict[int, int]()
    while left:  # a loop, for layers are given some ten values at each call
        each = left.pop()
        if isinstance(each, Tensor):
            if not is_plain(each):
                is_other = type(each) not in (Tensor, nn.Parameter)
                raise Unsupported(type(each).__name__ if is_other else f"tensor of {each.layout}")
            number = numbers.setdefault(id(each), len(numbers))
            if number == len(tensors) - before:
                tensors.append(each)
            trained = each.requires_grad and torch.is_grad_enabled()
            key += (Tensor, number, each.shape, each.dtype, each.device, trained)
        elif isinstance(each, CONSTANTS):
            key += (type(each), each)
        elif type(each) in (tuple, list):
            key += (type(each), len(each))
            left += each[::-1]
        elif type(each) is dict:
            key += (dict, len(each), *each)
            left += reversed(each.values())
        else:
            raise Unsupported(type(each).__name__)
    return tuple(key)


def rebuild(value: Any, tensors: Iterator[Tensor], others: dict[int, Tensor] | None = None) -> Any:
    """Return a value as `flatten` took it apart, with other tensors in their places.

    Args:
        value, tensors: what was taken apart, and what takes the places.
        others: those that have taken places, by the identity of what was there.
    """
    # no function inside this one calls itself: it would hold the tensors until the next collection
    others = {} if others is None else others
    if isinstance(value, Tensor):
        if id(value) not in others:
            others[id(value)] = next(tensors)
        return others[id(value)]
    if type(value) in (tuple, list):
        return type(value)(rebuild(each, tensors, others) for each in value)
    if type(value) is dict:
        return {name: rebuild(each, tensors, others) for name, each in value.items()}
    return value


def _nodes_behind(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield each node of the autograd graph behind some tensors once; some may have none."""
    waiting, seen = [each.grad_fn for each in outputs if each.grad_fn is not None], set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions if each is not None]


@contextmanager
def _taken_apart(outputs: Iterable[Tensor], leaves: Iterable[Tensor]) -> Iterator[list[list[Tensor]]]:
    """Yield a list for each leaf, to which backward in the block gives the gradients that it would add up.

    What reads a leaf gives it a gradient. They come in the order in which backward goes.
    """
    taken: dict[Node, list[Tensor]] = {get_gradient_edge(each).node: [] for each in leaves}

    def take(edges: Sequence[tuple[Node | None, int]], gradients: Sequence[Tensor], _: Any) -> tuple:
        left: list[Tensor | None] = list(gradients)
        for place, ((node, _), gradient) in enumerate(zip(edges, gradients, strict=True)):
            if node in taken:
                left[place] = None
                if gradient is not None:
                    taken[node].append(gradient)
        return tuple(left)

    hooks = [
        node.register_hook(partial(take, node.next_functions))
        for node in _nodes_behind(outputs)
        if any(each in taken for each, _ in node.next_functions)
    ]
    try:
        yield list(taken.values())
    finally:
        for hook in hooks:
            hook.remove()


class StaticCall:
    """One call of a layer, which is done again on what lies in its inputs then.

    The parameters are given leaves of their own: autograd runs what accumulates a parameter's gradient on the stream
    where the parameter was first used, and a capture must not touch that.

    Args:
        forward: the layer's, by the arguments of one call.
        args, kwargs: of a call of the kind.
        layer: whose parameters get gradients, where they need one.
        recompute: forward saves nothing, and backward begins with it, as activation checkpointing does.
    """

    def __init__(
        self, forward: Callable[..., Any], args: tuple, kwargs: dict[str, Any], layer: nn.Module, *, recompute: bool
    ) -> None:
        given: list[Tensor] = []
        flatten((args, kwargs), given)
        with torch.no_grad():
            self.inputs = [torch.empty_like(each).copy_(each) for each in given]
            self._words = list(map(_words, self.inputs))
        for place, each in zip(self.inputs, given, strict=True):
            place.requires_grad_(each.requires_grad)
        self.trained = [each for each in layer.parameters() if each.requires_grad]
        self.saved: list[Tensor] = []
        """Tensors that the last forward saved for backward."""
        self._forward, self._layer, self._recompute = forward, layer, recompute
        self._args, self._kwargs = rebuild((args, kwargs), iter(self.inputs))
        self._leaves = {each: _leaf_over(each) for each in layer.parameters()}
        self._wanted = [*self.inputs, *(self._leaves[each] for each in self.trained)]
        self.given_again: list[int] = []
        """The numbers of inputs that are given again: one that is read several times gets as many gradients.

        Whoever reads it too gives it gradients as well, and all add up one by one, which rounds.
        """
        self._device = given[0].device.type
        self._autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        self._live: list[Tensor] = []

    def lay_in(self, given: Sequence[Tensor]) -> None:
        """Copy the tensors of a call to the inputs, in one launch: of different types torch makes one for each."""
        words: list[list[Tensor]] = [[], []]
        others: list[list[Tensor]] = [[], []]
        for place, words_there, each in zip(self.inputs, self._words, given, strict=True):
            words_here = None if words_there is None else _words(each)
            if words_there is None or words_here is None:
                others[0].append(place)
                others[1].append(each)
            else:
                words[0].append(words_there)
                words[1].append(words_here)
        for places, tensors in (words, others):
            if places:
                torch._foreach_copy_(places, tensors)

    def forward(self) -> list[Tensor]:
        """Return the tensors among the outputs that the layer has computed; `made` has all in what the layer gives."""
        with torch.set_grad_enabled(not self._recompute):
            self._run()
        return [each.detach() for each in self._live]

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of inputs, of parameters, and of inputs that are given again: None where there is none.

        Args:
            gradients: of the outputs.
        """
        if self._recompute:
            with torch.enable_grad():
                self._run()
        self.needs_grad = [each.requires_grad for each in self._live]
        ends = [(each, gradient) for each, gradient in zip(self._live, gradients, strict=True) if each.requires_grad]
        if not ends:
            raise Refused("nothing that it computes is trained")
        roots, of_roots = zip(*ends, strict=True)
        trained = [number for number, each in enumerate(self._wanted) if each.requires_grad]
        inputs = [number for number in trained if number < len(self.inputs)]
        wanted = [self._wanted[number] for number in trained]
        made: list[Tensor | None] = [None] * len(self._wanted)
        with (
            torch.autocast(self._device, enabled=False),
            _saving_nowhere_else(),
            _taken_apart(roots, wanted[: len(inputs)]) as taken,
        ):
            # what was saved stays in use: the next replay of the forward writes it again
            keep = not self._recompute
            found = torch.autograd.grad(roots, wanted, of_roots, retain_graph=keep, allow_unused=True)
        for number, gradient in zip(trained[len(inputs) :], found[len(inputs) :], strict=True):
            made[number] = gradient
        self.given_again = []
        for number, gradients in zip(inputs, taken, strict=True):
            first, *others = gradients or (None,)
            made[number] = first
            made += others
            self.given_again += [number] * len(others)
        if self._recompute:
            self._live.clear()
            self.saved.clear()
        return made

    def with_given(self, given: Sequence[Tensor], outputs: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield all tensors among the outputs: those that the layer gives on as it was given them, and the others."""
        others = iter(outputs)
        return (next(others) if number is None else given[number] for number in self._given_on)

    def end(self) -> None:
        """Free the autograd graph; a node may hold the layer, which would never be freed. `saved` stays."""
        self._live.clear()

    def _run(self) -> None:
        enabled, dtype = self._autocast
        self.saved.clear()

        def hold(saved: Tensor) -> Tensor:
            # not the tensor itself: an output that its own node saves would hold the node, and with it the layer
            self.saved.append(saved.detach())
            return self.saved[-1]

        with (
            # what autocast keeps until its end would lie in memory of a graph
            torch.autocast(self._device, dtype, enabled, cache_enabled=False),
            _in_place_of_parameters(self._layer, self._leaves),
            _saving_nowhere_else(hold),
        ):
            made = self._forward(*self._args, **self._kwargs)
        self._live.clear()
        found: list[Tensor] = []
        try:
            flatten(made, found)
        except Unsupported as error:
            raise Refused(f"it gives a {error}") from None
        numbers = {id(each): number for number, each in enumerate(self.inputs)}
        self._given_on = [numbers.get(id(each)) for each in found]
        self._live += [each for each in found if id(each) not in numbers]
        own = set(map(id, self._wanted))
        if any(id(node.variable) not in own for node in _nodes_behind(self._live) if hasattr(node, "variable")):
            raise Refused("it trains a tensor that is none of its parameters")
        self.made = rebuild(made, self.with_given(self.inputs, [each.detach() for each in self._live]))


def _words(tensor: Tensor) -> Tensor | None:
    """Return the memory of a tensor as words of eight bytes; None where it has gaps, or is no whole number of them.

    Nor is there one where values are not what lies there, but conjugates.
    """
    if tensor.is_conj() or tensor.is_neg():
        return None
    if not tensor.is_contiguous() or tensor.nbytes % 8 or tensor.storage_offset() * tensor.itemsize % 8:
        return None
    return tensor.view(-1).view(torch.int64)


def _saving_nowhere_else(note: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
    """Keep hooks of whoever calls the layer, as of checkpointing, from what the graphs save."""
    return torch.autograd.graph.saved_tensors_hooks(note, Tensor.detach)


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
