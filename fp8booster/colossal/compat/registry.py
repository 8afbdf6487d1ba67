"""Patches, and the list of them all, which are applied, listed and left out."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable)

_MISSING = object()


class State(Enum):
    """The state of a patch in this process."""

    WAITING = "waits for the import"
    APPLIED = "applied"
    NOT_NEEDED = "not needed here"
    LEFT_OUT = "left out"


class Kind(Enum):
    """The cause of a patch."""

    UPSTREAM = "defect of Colossal-AI"
    CPU = "needed without CUDA"
    FP8 = "needed for FP8"


class Replacements:
    """Replaces attributes and entries of dictionaries, and remembers how to put the old ones back."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []
        self.places: set[tuple[int, str]] = set()
        """The id of each owner and the name that was replaced there, now or before `undo`."""

    def __bool__(self) -> bool:
        return bool(self._undo)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`; an attribute that `owner` inherits stays as it is in the base."""
        old = vars(owner).get(name, _MISSING)
        setattr(owner, name, value)
        self.places.add((id(owner), name))
        self._undo.append(lambda: delattr(owner, name) if old is _MISSING else setattr(owner, name, old))

    def set_function(self, module: ModuleType, name: str, value: Callable) -> None:
        """Set `module.name`, and the same function wherever a colossalai module imported it by name."""
        old = getattr(module, name)
        _exchange(module, name, old, value)
        self.places.add((id(module), name))
        # not `set`: modules imported from now on take the new function, and must get the old one back too
        self._undo.append(lambda: _exchange(module, name, value, old))

    def wrap(self, module: ModuleType, target: str, function: Callable) -> None:
        """Let `function(upstream, ...)` take the place of a function or a method, given what that is called with.

        A function is replaced wherever a colossalai module imported it if `module` is its home, else in `module` alone.

        Args:
            module: where the target is.
            target: such as "function" or "Class.method".
            function: its first argument is what it replaces: of a method unbound, of a method of the class bound.
        """
        owner_name, _, name = target.rpartition(".")
        owner = getattr(module, owner_name) if owner_name else module
        upstream = getattr(owner, name)

        @functools.wraps(upstream)
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(upstream, *args, **kwargs)

        if owner is module and upstream.__module__ == module.__name__:
            self.set_function(module, name, call)
        else:
            # looked up without binding: as a plain function a static method would be given `self`
            known = inspect.getattr_static(owner, name)
            if isinstance(known, classmethod):  # bound already
                self.set(owner, name, classmethod(lambda cls, *args, **kwargs: call(*args, **kwargs)))
            else:
                self.set(owner, name, staticmethod(call) if isinstance(known, staticmethod) else call)

    def set_item(self, mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
        """Set an entry, as of `os.environ` or `sys.modules`; None takes it away."""
        old = mapping.get(key)
        _set_item(mapping, key, value)
        self._undo.append(lambda: _set_item(mapping, key, old))

    def undo(self) -> None:
        """Put everything back, the last replacement first."""
        while self._undo:
            self._undo.pop()()


def _set_item(mapping: MutableMapping[str, Any], key: str, value: Any) -> None:
    if value is None:
        mapping.pop(key, None)
    else:
        mapping[key] = value


def _exchange(home: ModuleType, name: str, old: Callable, new: Callable) -> None:
    """Set `name` to `new` where it is `old`, at its home and in every colossalai module."""
    # `from module import name` has bound the old function elsewhere; who imports it later finds the new one at its home
    for module in [home, *(module for key, module in sys.modules.items() if key.startswith("colossalai."))]:
        if vars(module).get(name) is old:
            setattr(module, name, new)


class _Watcher(MetaPathFinder):
    """Finds watched modules as the other finders do, and wraps the execution of their code."""

    def __init__(self) -> None:
        self.around: dict[str, list[Callable[[], contextlib.AbstractContextManager[None]]]] = {}
        """By package: contexts around the code of each of its modules."""

        self.after: dict[str, list[Callable[[ModuleType], None]]] = {}
        """By module: calls at the end of its code."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name.partition(".")[0] not in self.around and name not in self.after:
            return None
        # one by one, and not by importlib, which would ask this finder again
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            execute = spec.loader.exec_module
            # on the instance, so that the loader keeps its type, which inspect and tracebacks look at
            spec.loader.exec_module = lambda module: self._execute(execute, module)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        name = module.__name__
        with contextlib.ExitStack() as contexts:
            for around in self.around.get(name.partition(".")[0], ()):
                contexts.enter_context(around())
            execute(module)
        for callback in self.after.pop(name, ()):
            callback(module)


_watcher = _Watcher()


@dataclass(eq=False)
class Patch:
    """A change of one place of colossalai."""

    name: str
    module: str
    """The module that is patched, when it is imported."""
    place: str
    """The place that is patched, as `file:line` of colossalai 0.5.0."""
    needed_when: str
    kind: Kind
    repair: Callable[..., None]
    during_import: bool = False
    """The patch lasts only while the code of `module`, a package, runs, or of one within it."""
    state: State = State.WAITING
    _running: int = 0
    """The number of modules that run now with the patch around their code: one imports another."""
    _replacements: Replacements = field(default_factory=Replacements, repr=False)

    @property
    def summary(self) -> str:
        """The claim that the patch makes true, as its name has it."""
        return self.name.replace("_", " ")

    def watch(self) -> None:
        """Patch `module` when it is imported, which may have happened already."""
        if not self.during_import and self.module in sys.modules:
            self.put_in(sys.modules[self.module])
            return
        if _watcher not in sys.meta_path:
            # first, since the finder that finds a module is the only one asked
            sys.meta_path.insert(0, _watcher)
        if self.during_import:
            _watcher.around.setdefault(self.module, []).append(self._around)
        else:
            _watcher.after.setdefault(self.module, []).append(self.put_in)

    def put_in(self, *module: ModuleType) -> None:
        """Patch `module`, unless this patch is left out."""
        if self.state is not State.LEFT_OUT:
            self.repair(*module, self._replacements)
            self.state = State.APPLIED if self._replacements else State.NOT_NEEDED

    def leave_out(self) -> None:
        """Undo the patch; `module` is as colossalai made it."""
        self._replacements.undo()
        self.state = State.LEFT_OUT

    @contextmanager
    def _around(self) -> Iterator[None]:
        self._running += 1
        if not self._replacements:
            self.put_in()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._replacements.undo()


_PATCHES: dict[str, Patch] = {}
_watched: set[str] = set()


def patch(
    module: str, lines: str, needed_when: str, *, kind: Kind = Kind.UPSTREAM, during_import: bool = False
) -> Callable[[Function], Function]:
    """Register `repair(module, replacements)`, which looks whether `module` has the defect and patches it if so.

    Args:
        module: without "colossalai." before it, or one of torch's; "colossalai" is all of them.
        lines: of the defect in the module's file; with the files' names where they are others.
        needed_when: when the defect shows.
        kind: the cause.
        during_import: register `repair(replacements)` instead, called before the code of `module` runs and undone after
            it.
    """

    def register(repair: Function) -> Function:
        name = module if module.partition(".")[0] in ("torch", "colossalai") else f"colossalai.{module}"
        place = lines if ".py" in lines else f"{module.replace('.', '/')}.py:{lines}"
        # in the order of registration where two patches share a module
        _PATCHES[repair.__name__] = Patch(repair.__name__, name, place, needed_when, kind, repair, during_import)
        return repair

    return register


def wrap(
    where: str,
    lines: str,
    needed_when: str,
    *,
    kind: Kind = Kind.UPSTREAM,
    only_if: Callable[[ModuleType], bool] = lambda module: True,
    name: str | None = None,
) -> Callable[[Function], Function]:
    """Register `function(upstream, ...)`, which is called in place of each of some functions or methods.

    Args:
        where: "module:function" or "module:Class.method", or several of them separated by blanks.
        lines, needed_when, kind: as in `patch`.
        only_if: True where the module has the defect.
        name: of the patch, if not the function's.
    """
    module, _, targets = where.partition(":")

    def register(function: Function) -> Function:
        def repair(module: ModuleType, replacements: Replacements) -> None:
            for target in targets.split() if only_if(module) else ():
                replacements.wrap(module, target, function)

        functools.update_wrapper(repair, function)
        repair.__name__ = name or function.__name__
        patch(module, lines, needed_when, kind=kind)(repair)
        return function

    return register


def arguments_of(function: Callable, args: tuple, kwargs: dict[str, Any]) -> inspect.BoundArguments:
    """Return the arguments of a call by their names, as far as they are given."""
    return _signature(function).bind(*args, **kwargs)


_signature = functools.cache(inspect.signature)  # patched collectives are called for each layer


def by_name(function: Callable[[Callable[[], Any], dict[str, Any]], Any]) -> Callable[..., Any]:
    """Let `function(call, given)` be wrapped: `given` holds the arguments, and `call()` calls upstream with them.

    The function may change, add and remove arguments.
    """

    @functools.wraps(function)
    def wrapper(upstream: Callable, *args: Any, **kwargs: Any) -> Any:
        bound = arguments_of(upstream, args, kwargs)
        return function(lambda: upstream(*bound.args, **bound.kwargs), bound.arguments)

    return wrapper


def refuse(
    where: str, lines: str, needed_when: str, *, error: type[Exception] = ValueError, **options: Any
) -> Callable[[Function], Function]:
    """Register `reason(given)`, which returns a sentence where a call with these arguments is to be refused, or None.

    Args:
        where, lines, needed_when, options: as in `wrap`.
        error: that is raised with the sentence, in place of what goes wrong later or on another rank.
    """

    def register(reason: Function) -> Function:
        def refused(call: Callable[[], Any], given: dict[str, Any]) -> Any:
            sentence = reason(given)
            if sentence is not None:
                raise error(sentence)
            return call()

        wrap(where, lines, needed_when, **options)(by_name(functools.update_wrapper(refused, reason)))
        return reason

    return register


def apply(without: Collection[str] = ()) -> None:
    """Apply every patch, each when the module that it patches is imported; again, it does nothing.

    `without` names patches to leave out, or to take out again, so that one sees whether colossalai still needs
    them. Raises ValueError for a name that no patch has.
    """
    for name in without:
        each = _find(name)
        with _those_above_lifted(each):  # each holds the function that it found, and would bring it back
            each.leave_out()
    for each in _PATCHES.values():
        if each.name not in _watched:
            _watched.add(each.name)
            each.watch()


def patches() -> tuple[Patch, ...]:
    """Return all patches, in the order in which they are applied."""
    return tuple(_PATCHES.values())


@contextmanager
def taken_out(name: str) -> Iterator[None]:
    """Take the applied patch `name` out for the length of a `with` block.

    Raises ValueError if it is not applied, or lasts only for an import.
    """
    each = _find(name)
    if each.state is not State.APPLIED or each.during_import:
        raise ValueError(f"the patch {name} cannot be taken out: it is {each.state.value}")
    with _those_above_lifted(each):
        each.leave_out()
    try:
        yield
    finally:
        with _those_above_lifted(each):
            each.state = State.WAITING
            each.put_in(sys.modules[each.module])


@contextmanager
def _those_above_lifted(lower: Patch) -> Iterator[None]:
    """Change `lower` beneath those that wrap what it put in: they are undone, and applied again on what is there."""
    later = list(_PATCHES.values())[list(_PATCHES).index(lower.name) + 1 :]
    above = [each for each in later if each._replacements.places & lower._replacements.places]
    # the last first: each holds what lay there before it
    for each in reversed(above):
        each._replacements.undo()
    try:
        yield
    finally:
        for each in above:
            each.put_in(sys.modules[each.module])


def _find(name: str) -> Patch:
    if name not in _PATCHES:
        raise ValueError(f"no patch is called {name!r}; the patches are {', '.join(_PATCHES)}")
    return _PATCHES[name]
