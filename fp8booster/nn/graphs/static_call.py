"""A layer's forward and backward for one kind of call, over tensors that stay where they are: what graphs capture."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node, get_gradient_edge

from fp8booster.nn.graphs.breaks import Break, Cut, Cuts, Result, breaking_at, handled_by
from fp8booster.nn.graphs.values import CONSTANTS, Places, Refused, Unsupported, flatten, maker_of


def _nodes_behind(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Yield each node of the autograd graph behind some tensors once; some may have none."""
    waiting, seen = [each.grad_fn for each in outputs if each.grad_fn is not None], set[Node]()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            yield node
            waiting += [each for each, _ in node.next_functions if each is not None]


MOST_LOOKED_AT = 10_000
"""Objects that are looked at for tensors; what lies behind more of them is not found."""


_EMPTY = CellType()


def _tensors_within(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in containers, objects that are no modules, and functions with what they close over."""
    left, seen = [value], dict[int, Any]()
    while left and len(seen) < MOST_LOOKED_AT:
        each = left.pop()
        if id(each) in seen or isinstance(each, (*CONSTANTS, type, nn.Module)):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, dict):
            left += each.values()
        elif isinstance(each, (tuple, list, set)):
            left += each
        elif isinstance(each, partial):
            left += each.func, each.args, each.keywords
        elif isinstance(each, FunctionType):
            left += (cell.cell_contents for cell in each.__closure__ or () if cell != _EMPTY)
        else:
            left.append(getattr(each, "__dict__", None))


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


def _nothing(made: Sequence[Tensor | None]) -> None:
    pass


class StaticCall:
    """One call of a layer, which is done again on what lies in its inputs then.

    Calls that break the graph (`breaks`) leave pieces of forward, and of backward.

    The parameters are given leaves of their own: autograd runs what accumulates a parameter's gradient on the stream
    where the parameter was first used, and a capture must not touch that.

    Args:
        forward: the layer's, by the arguments of one call.
        args, kwargs: of a call of the kind.
        modules: of the layer, whose parameters get gradients, where they need one; not those that run eagerly.
        recompute: forward saves nothing, and backward begins with it, as activation checkpointing does.
        results: of the eager calls that break the graph.
        breaking: modules whose calls are such.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        modules: Sequence[nn.Module],
        *,
        recompute: bool,
        results: Sequence[Result] = (),
        breaking: Sequence[nn.Module] = (),
    ) -> None:
        given: list[Tensor] = []
        flatten((args, kwargs), given)
        with torch.no_grad():
            self.inputs = [torch.empty_like(each).copy_(each) for each in given]
        self._places = Places(self.inputs, given)
        for place, each in zip(self.inputs, given, strict=True):
            place.requires_grad_(each.requires_grad)
        self.saved: list[Tensor] = []
        """Tensors that the last forward saved for backward."""
        self.breaks: list[Break] = []
        self._forward, self._modules, self._recompute = forward, modules, recompute
        self._results, self._breaking = results, breaking
        self._args, self._kwargs = maker_of((args, kwargs))(self.inputs)
        parameters = parameters_of(modules)
        self._leaves = {each: _leaf_over(each) for each in parameters}
        self.trained = [each for each in parameters if each.requires_grad]
        self._wanted = [*self.inputs, *(self._leaves[each] for each in self.trained)]
        self.given_again: list[int] = []
        """The numbers of inputs that are given again: one that is read several times gets as many gradients.

        Whoever reads it too gives it gradients as well, and all add up one by one, which rounds.
        """
        self._device = given[0].device.type
        self._autocast = torch.is_autocast_enabled(self._device), torch.get_autocast_dtype(self._device)
        self._live: list[Tensor] = []
        self._cuts = Cuts()
        # a number that nothing reads: what runs eagerly may train parameters, whatever comes before it
        self._always = torch.empty(0, dtype=torch.float32, device=given[0].device).requires_grad_()

    def lay_in(self, given: Sequence[Tensor]) -> None:
        """Copy the tensors of a call to the inputs."""
        self._places.lay(given)

    def forward(self, cut: Cut = _nothing) -> list[Tensor]:
        """Return the tensors among the outputs that the layer has computed; `give` gives all.

        Args:
            cut: is called where a piece ends, with the tensors that the eager call behind it reads.
        """
        self._cuts.forward = cut
        with torch.set_grad_enabled(not self._recompute):
            self._run()
        return [each.detach() for each in self._live]

    def backward(self, gradients: Sequence[Tensor], cut: Cut = _nothing) -> list[Tensor | None]:
        """Return the gradients of inputs, of parameters, and of inputs that are given again: None where there is none.

        Args:
            gradients: of the outputs.
            cut: is called where a piece ends, with the gradients of what the eager call before it returned.
        """
        self._cuts.backward = cut
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
            into = [*wanted, self._always] if self.breaks else wanted
            found = torch.autograd.grad(roots, into, of_roots, retain_graph=keep, allow_unused=True)
        for number, gradient in zip(trained[len(inputs) :], found[len(inputs) : len(wanted)], strict=True):
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

    def give(self, given: Sequence[Tensor], outputs: Iterable[Tensor]) -> Any:
        """Return what the layer gives: tensors that it gives on as it was given them, and outputs."""
        others = iter(outputs)
        return self._make([next(others) if number is None else given[number] for number in self._given_on])

    def held(self) -> Iterator[Tensor]:
        """Yield tensors that functions of autograd hold for backward and have not saved, as in attributes of `ctx`.

        Others are found too, such as weights that are within reach.
        """
        held = [vars(node) for node in _nodes_behind(self._live) if isinstance(node, BackwardCFunction)]
        return _tensors_within(held)

    def end(self) -> None:
        """Free the autograd graph; a node may hold the layer, which would never be freed. `saved` stays."""
        self._live.clear()
        self._cuts.forward = self._cuts.backward = _nothing  # who cuts holds the graphs

    def free(self) -> None:
        """Let go of all tensors: autograd may hold the call for as long as a loss is kept."""
        self.end()
        self._args, self._kwargs, self._modules = (), {}, ()
        for held in (self.inputs, self.saved, self.breaks, self.trained, self._wanted, self._leaves):
            held.clear()

    def _run(self) -> None:
        enabled, dtype = self._autocast
        self.saved.clear()
        at = iter(range(len(self._results) + 1))

        def hold(saved: Tensor) -> Tensor:
            # not the tensor itself: an output that its own node saves would hold the node, and with it the layer
            self.saved.append(saved.detach())
            return self.saved[-1]

        def break_graph(function: Callable[..., Any], args: tuple) -> Any:
            number = next(at)
            if number == len(self._results):
                raise Refused("parts of it ran eagerly that did not in its first calls")
            if number == len(self.breaks):
                self.breaks.append(Break(function, args, self._results[number], self._device))
            leaves.__exit__()  # what runs eagerly has the parameters themselves
            made = self.breaks[number].between(args, self._always, self._cuts)
            leaves.__enter__()
            return made

        leaves = _InPlaceOfParameters(self._modules, self._leaves)

        with (
            # what autocast keeps until its end would lie in memory of a graph
            torch.autocast(self._device, dtype, enabled, cache_enabled=False),
            leaves,
            _saving_nowhere_else(hold),
            breaking_at(self._breaking),
            handled_by(break_graph, captures=True),
        ):
            made = self._forward(*self._args, **self._kwargs)
        if next(at) < len(self._results):
            raise Refused("parts of it ran eagerly in its first calls that do not now")
        self._live.clear()
        found: list[Tensor] = []
        try:
            flatten(made, found)
        except Unsupported as error:
            raise Refused(f"it gives a {error}") from None
        numbers = {id(each): number for number, each in enumerate(self.inputs)}
        self._given_on = [numbers.get(id(each)) for each in found]
        self._live += [each for each in found if id(each) not in numbers]
        if any(each._backward_hooks for each in self._leaves.values()):
            raise Refused("it hooks gradients of its parameters")
        own = {*map(id, self._wanted), id(self._always)}
        if any(id(node.variable) not in own for node in _nodes_behind(self._live) if hasattr(node, "variable")):
            raise Refused("it trains a tensor that is none of its parameters")
        self._make = maker_of(made)


def parameters_of(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of modules, without those of others inside them, each once."""
    return list(dict.fromkeys(each for module in modules for each in module._parameters.values() if each is not None))


def _saving_nowhere_else(note: Callable[[Tensor], Tensor] = Tensor.detach) -> Any:
    """Keep hooks of whoever calls the layer, as of checkpointing, from what the graphs save."""
    return torch.autograd.graph.saved_tensors_hooks(note, Tensor.detach)


def _leaf_over(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    """Return another leaf over a parameter's memory, with what was noted on it."""
    leaf = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
    leaf.__dict__.update(parameter.__dict__)
    return leaf


class _InPlaceOfParameters:
    """Gives modules other leaves for their parameters, in its block."""

    def __init__(self, modules: Sequence[nn.Module], leaves: dict[nn.Parameter, nn.Parameter]) -> None:
        self._own = [(module._parameters, dict(module._parameters)) for module in modules]
        self._leaves = leaves

    def __enter__(self) -> _InPlaceOfParameters:
        for held, parameters in self._own:
            held.update({name: self._leaves[each] for name, each in parameters.items() if each is not None})
        return self

    def __exit__(self, *error: object) -> None:
        for held, parameters in self._own:
            held.update(parameters)
