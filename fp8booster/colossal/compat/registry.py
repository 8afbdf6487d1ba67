"""What a patch is, the list of all patches, and how they are applied, listed and left out."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import TypeVar

from fp8booster.colossal.compat.imports import after_import, around_import
from fp8booster.colossal.compat.replacements import Replacements

Function = TypeVar("Function", bound=Callable)


class State(Enum):
    """Where a patch stands in this process."""

    WAITING = "waits for the import"
    APPLIED = "applied"
    NOT_NEEDED = "not needed here"
    LEFT_OUT = "left out"


class Kind(Enum):
    """Why there is a patch, by the folder of `compat/` that it stands in."""

    UPSTREAM = "defect of Colossal-AI"
    CPU = "needed without CUDA"
    FP8 = "needed for FP8"


@dataclass(eq=False)
class Patch:
    """A change of one place of colossalai."""

    name: str
    module: str
    """The module that is patched, when it is imported."""
    place: str
    """What is patched, as `file:line` of colossalai 0.5.0."""
    needed_when: str
    kind: Kind
    repair: Callable[..., None]
    during_import: bool = False
    """True: the patch lasts only while the code of `module` runs, or of one within it (a stand-in for a package)."""
    state: State = State.WAITING
    _running: int = 0
    """The number of modules that run now with the patch around their code: one imports another."""
    _replacements: Replacements = field(default_factory=Replacements, repr=False)

    @property
    def summary(self) -> str:
        """The first line of the patch's docstring."""
        return self.repair.__doc__.partition("\n")[0]

    def watch(self) -> None:
        """Patch `module` when it is imported, which may have happened already."""
        if self.during_import:
            around_import(self.module, self._around)
        else:
            after_import(self.module, self.put_in)

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


def patch(module: str, lines: str, *, needed_when: str, during_import: bool = False) -> Callable[[Function], Function]:
    """Register `repair(module, replacements)`, which looks whether `module` has the defect and patches it if so.

    Args:
        module: without "colossalai." before it, or one of torch's; "colossalai" is all of them.
        lines: of the defect in the module's file; with the files' names where they are others.
        needed_when: when the defect shows.
        during_import: register `repair(replacements)` instead, called before the code of `module` runs and undone after
            it.
    """

    def register(repair: Function) -> Function:
        name = module if module.partition(".")[0] in ("torch", "colossalai") else f"colossalai.{module}"
        place = lines if ".py" in lines else f"{module.replace('.', '/')}.py:{lines}"
        kind = Kind[repair.__module__.rpartition(".compat.")[2].partition(".")[0].upper()]
        # in the order of registration where two patches share a module
        _PATCHES[repair.__name__] = Patch(repair.__name__, name, place, needed_when, kind, repair, during_import)
        return repair

    return register


def wrap(
    where: str,
    lines: str,
    *,
    needed_when: str,
    only_if: Callable[[ModuleType], bool] = lambda module: True,
    name: str | None = None,
) -> Callable[[Function], Function]:
    """Register `function(upstream, ...)`, which is called in place of each of some functions or methods.

    Args:
        where: "module:function" or "module:Class.method", or several of them separated by blanks.
        lines, needed_when: as in `patch`.
        only_if: whether the module has the defect.
        name: of the patch, if not the function's.
    """
    module, _, targets = where.partition(":")

    def register(function: Function) -> Function:
        def repair(module: ModuleType, replacements: Replacements) -> None:
            for target in targets.split() if only_if(module) else ():
                replacements.wrap(module, target, function)

        functools.update_wrapper(repair, function)
        repair.__name__ = name or function.__name__
        patch(module, lines, needed_when=needed_when)(repair)
        return function

    return register


def apply(without: Collection[str] = ()) -> None:
    """Apply every patch, each when the module that it patches is imported; again, it does nothing.

    `without` names patches to leave out, or to take out again, so that one sees whether colossalai still needs
    them. Raises ValueError for a name that no patch has.
    """
    for name in without:
        each = _find(name)
        with _those_above_lifted(each):
            each.leave_out()
    for each in _PATCHES.values():
        if each.name not in _watched:
            _watched.add(each.name)
            each.watch()


def patches() -> tuple[Patch, ...]:
    """All patches, in the order in which they are applied."""
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
