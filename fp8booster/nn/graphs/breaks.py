"""Graph breaks: calls in the midst of a captured layer that no graph can hold, and that run eagerly between two graphs.

    attention -> router -> [exchange -> experts -> exchange] -> sum        graph, eager call, graph

A layer's own code breaks its graph by `run_eagerly`. Modules of other libraries that must run eagerly are made to do so
when they are called (`breaking_at`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fp8booster.nn.graphs.call_state import who_saves
from fp8booster.nn.graphs.values import Places, Refused, Unsupported, flatten, maker_of, marks_of
from fp8booster.nn.linear.functional import once_differentiable
from fp8booster.nn.weights.delivered import deliver_amax, delivered_amax
from fp8booster.nn.weights.pinned import collected

Handler = Callable[[Callable[..., Any], tuple], Any]
"""Takes a function and its arguments in place of calling it."""


class _Thread(threading.local):
    handler: Handler | None = None
    captures = False


_here = _Thread()


def run_eagerly(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function that no graph can hold.

    In a layer that is captured it is called at each replay, between two graphs.

    Args:
        function: what it reads besides `args` must outlive the call. It is differentiable by autograd.
        args: tensors and constants, also in tuples, lists and dicts: all that it needs of what was computed before.

    Returns:
        What the function returns, of the same kinds as `args`.
    """
    # in compiled code no layer is captured, and a thread's state would break its graph
    handler = None if torch.compiler.is_compiling() else _here.handler
    return function(*args) if handler is None else handler(function, args)


def call_eagerly(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Call a function that no graph can hold with arguments by name too; else as `run_eagerly`."""
    return run_eagerly(partial(_called, function), args, kwargs)


def _called(function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    return function(*args, **kwargs)


def in_a_capture() -> bool:
    """Tell whether a graph is being made of what surrounds this, also by a caller: the host cannot wait for values."""
    return _here.captures or (torch.backends.cuda.is_built() and torch.cuda.is_current_stream_capturing())


@contextmanager
def handled_by(handler: Handler | None, *, captures: bool = False) -> Iterator[None]:
    """Let this thread's calls of `run_eagerly` go to a handler, in the block; None: they run."""
    before = _here.handler, _here.captures
    _here.handler, _here.captures = handler, captures
    try:
        yield
    finally:
        _here.handler, _here.captures = before


class _Like(NamedTuple):
    """Describes a tensor without its values."""

    size: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> _Like:
        trained = tensor.requires_grad and torch.is_grad_enabled()
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device, trained)

    def new(self) -> Tensor:
        made = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)
        if not all(step or size < 2 for step, size in zip(self.stride, self.size, strict=True)):
            made = torch.empty_like(made)  # as `expand` gives it: nothing can be laid in one value several times
        return made.requires_grad_(self.requires_grad)


class Result:
    """Describes what an eager call returned, as another will in other tensors.

    Args:
        made: what it returned.

    Raises:
        Unsupported: it is no tensor, constant, or tuple, list or dict of these.
    """

    def __init__(self, made: Any) -> None:
        tensors: list[Tensor] = []
        self.kind = flatten(made, tensors)
        """Equal where another call returns as much, in tensors of the same sizes and types."""

        self.make = maker_of(made)
        """Makes as much of other tensors."""

        self._tensors = list(map(_Like.of, tensors))

    def new(self) -> list[Tensor]:
        """Return new tensors for as much, which are leaves of autograd."""
        return [each.new() for each in self._tensors]

    def lies_on(self, device: torch.device) -> bool:
        """Tell whether all of it lies on a device."""
        return all(each.device == device for each in self._tensors)

    def tensors_of(self, made: Any) -> list[Tensor]:
        """Return the tensors in what another call returned.

        Raises:
            RuntimeError: it is of another kind.
        """
        tensors: list[Tensor] = []
        if flatten(made, tensors) != self.kind:
            raise RuntimeError(
                "what runs eagerly between the CUDA graphs of a layer returned something else than before; call "
                "fp8booster.capture_layers again, or set FP8Config(cuda_graphs=False)"
            )
        return tensors


COMPUTED_AGAIN = "checkpointing must compute again what runs eagerly in it"
"""The reason why no graph is broken by a call within a function that is checkpointed."""


class Noted:
    """Collects what eager calls of a layer return and take while it runs without graphs."""

    def __init__(self) -> None:
        self.results: list[Result] = []
        self.why_not: str | None = None
        """The reason why no graph can be broken by them."""

        self.kept = self.passing = 0
        """Bytes that they leave for backward, and that they take in all."""


@contextmanager
def noted_breaks(allocated: Callable[[], tuple[int, int]], device: torch.device) -> Iterator[Noted]:
    """Note the eager calls inside.

    Args:
        allocated: as `Recorder.allocated`.
        device: of the graphs.
    """
    noted = Noted()

    def note(function: Callable[..., Any], args: tuple) -> Any:
        # FP8 weights that no graph reads
        before, collected.uses = (collected.uses, collected.values_were_read), None
        if who_saves() is not None:
            # saved tensors are told apart by their number there, and a graph saves none of the call's
            noted.why_not = COMPUTED_AGAIN
        given: list[Tensor] = []
        try:
            flatten(args, given)
        except Unsupported as error:
            noted.why_not = f"what must run eagerly in it is given a {error}"
        before_call = marks_of(args)
        began = allocated()
        try:
            with handled_by(None):
                made = function(*args)
        finally:
            collected.uses, collected.values_were_read = before
        kept, passing = (now - then for now, then in zip(allocated(), began, strict=True))
        noted.kept, noted.passing = noted.kept + kept, noted.passing + passing
        if marks_of(args) != before_call:
            noted.why_not = (
                "what must run eagerly in it changes or hooks what it is given, of which graphs know nothing"
            )
        try:
            noted.results.append(Result(made))
        except Unsupported as error:
            noted.why_not = f"what must run eagerly in it gives a {error}"
            return made
        if not noted.results[-1].lies_on(device):  # a kernel would have for good the number that is on the host
            noted.why_not = "what must run eagerly in it gives a tensor of another device"
        return made

    with handled_by(note):
        yield noted


class _Modes(NamedTuple):
    """Describes the state around a call that the layer's own code may set: gradients, and autocast on a device."""

    grad: bool
    device: str
    autocast: bool
    dtype: torch.dtype

    @classmethod
    def now(cls, device: str) -> _Modes:
        autocast = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
        return cls(torch.is_grad_enabled(), device, *autocast)

    @contextmanager
    def set(self) -> Iterator[None]:
        keeps = torch.is_autocast_cache_enabled()  # of casts, which a capture does without
        with torch.set_grad_enabled(self.grad), torch.autocast(self.device, self.dtype, self.autocast, keeps):
            yield


Cut = Callable[[Sequence[Tensor | None]], None]
"""Ends a piece of the work that is captured, whose tensors are read before the next piece is replayed."""


class Break:
    """An eager call of a captured layer: reads what the graph before it has written, and is read by the next.

    Args:
        function, args: of the call.
        result: what it returned before.
        device: of the graphs, by its type.

    Raises:
        Refused: the function is given something of which no graph can have a copy.
    """

    def __init__(self, function: Callable[..., Any], args: tuple, result: Result, device: str) -> None:
        self._function, self._result, self._modes = function, result, _Modes.now(device)
        given: list[Tensor] = []
        try:
            flatten(args, given)
        except Unsupported as error:
            raise Refused(f"what must run eagerly in it is given a {error}") from None
        self.inputs = [each.detach() for each in given]
        found = enumerate(map(delivered_amax, given))
        self._amaxes = [(number, amax) for number, amax in found if amax is not None]
        self.needs_grad = [each.requires_grad and self._modes.grad for each in given]
        self.trained_inputs = [each for each, needed in zip(self.inputs, self.needs_grad, strict=True) if needed]
        """Lists the inputs that autograd goes back to."""

        self._make_args = maker_of(args)
        self.outputs = result.new()
        self.gradients_in: list[Tensor] = []
        """Places of the gradients of `trained_inputs`, when backward goes on behind the call."""

        self.gradients: list[Tensor | None] = [None] * len(self.outputs)
        """Gradients of `outputs`, as backward found them last."""

        self.went_back = False
        """Backward has come to the call."""

    def lie_at(self, outputs: list[Tensor]) -> None:
        """Let the next graph read what the call returns at these places."""
        self.outputs, self._places = outputs, Places(outputs, outputs)

    def lay_out(self, made: Sequence[Tensor]) -> None:
        """Copy what the call has returned to where the next graph reads it."""
        self._places.lay(made)

    def between(self, args: tuple, always: Tensor, cuts: Cuts) -> Any:
        """Return what the next graph reads; autograd goes back to `args`.

        Args:
            args: of this call.
            always: a leaf of autograd, from which comes what trains nothing else before the call.
            cuts: end the pieces.
        """
        given: list[Tensor] = []
        flatten(args, given)
        amaxes = [each for each in map(delivered_amax, given) if each is not None]

        def end(inputs: list[Tensor]) -> None:
            cuts.forward([*inputs, *amaxes])

        return self._result.make(_Gap.apply(self, end, cuts, always, *given))

    def run(self, trained: Sequence[Tensor]) -> list[Tensor]:
        """Call the function with values of `trained_inputs`, and return the tensors that it gives."""
        # it may note something on any, or keep it
        others = iter(trained)
        inputs = [
            next(others) if needed else each.detach() for each, needed in zip(self.inputs, self.needs_grad, strict=True)
        ]
        for number, amax in self._amaxes:
            deliver_amax(inputs[number], amax)
        args = self._make_args(inputs)
        if self._modes == _Modes.now(self._modes.device):
            return self._result.tensors_of(self._function(*args))
        with self._modes.set():  # a replay runs none of the layer's code that set them
            return self._result.tensors_of(self._function(*args))


class Cuts:
    """End the pieces of a forward and of its backward while they are captured."""

    forward: Cut
    backward: Cut


class _Gap(torch.autograd.Function):
    """Stands for an eager call in a capture, which ends a piece there, forward and backward, and does nothing."""

    @staticmethod
    def forward(
        ctx: Any, here: Break, end: Callable[[list[Tensor]], None], cuts: Cuts, always: Tensor, *given: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.here, ctx.cuts = here, cuts
        ctx.set_materialize_grads(False)
        end([each.detach() for each in given])
        outputs = tuple(each.detach() for each in here.outputs)
        ctx.mark_non_differentiable(
            *(each for each, place in zip(outputs, here.outputs, strict=True) if not place.requires_grad)
        )
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple:
        here: Break = ctx.here
        here.gradients, here.went_back = list(gradients), True
        ctx.cuts.backward(gradients)
        into = iter(here.gradients_in)
        return None, None, None, None, *(next(into).detach() if each else None for each in here.needs_grad)


@contextmanager
def breaking_at(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Let modules break the graphs of what calls them, in the block."""
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(_breaking(module))
        yield


@contextmanager
def _breaking(module: nn.Module) -> Iterator[None]:
    # `nn.Module.__call__` asks for this first, before hooks: they are part of the call
    before = module._compiled_call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        if _here.handler is None:
            return (before or module._call_impl)(*args, **kwargs)
        return call_eagerly(module, args, kwargs)

    module._compiled_call_impl = call
    try:
        yield
    finally:
        module._compiled_call_impl = before
