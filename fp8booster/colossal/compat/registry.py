"""What a mend is, the list of all mends, and how they are put in, listed and left out."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType

from fp8booster.colossal.compat.imports import after_import, around_import
from fp8booster.colossal.patch import Patch


class State(Enum):
    """Where a mend stands in this process."""

    WAITING = "waits for the import"
    APPLIED = "applied"
    NOT_NEEDED = "not needed here"
    LEFT_OUT = "left out"


@dataclass(eq=False)
class Mend:
    """One repair of one defect of colossalai."""

    name: str
    module: str
    """The module that is repaired, when it is imported."""
    place: str
    """Where the defect stands, as `file:line` of colossalai 0.5.0."""
    needed_when: str
    during_import: bool
    """True: the repair lasts only while the code of `module` runs (a stand-in for a missing package)."""
    repair: Callable[..., None]
    state: State = State.WAITING
    _patch: Patch = field(default_factory=Patch, repr=False)

    @property
    def summary(self) -> str:
        """The first line of the repair's docstring."""
        return self.repair.__doc__.partition("\n")[0]

    def watch(self) -> None:
        """Repair `module` when it is imported, which may have happened already."""
        if not self.during_import:
            after_import(self.module, self.put_in)
        elif self.module in sys.modules:
            self.state = State.NOT_NEEDED
        else:
            around_import(self.module, self._around)

    def put_in(self, module: ModuleType) -> None:
        """Repair `module`, unless this mend is left out."""
        if self.state is not State.LEFT_OUT:
            self.repair(module, self._patch)
            self.state = State.APPLIED if self._patch else State.NOT_NEEDED

    def leave_out(self) -> None:
        """Undo the repair; `module` is as colossalai made it."""
        self._patch.undo()
        self.state = State.LEFT_OUT

    @contextmanager
    def _around(self) -> Iterator[None]:
        if self.state is not State.LEFT_OUT:
            self.repair(self._patch)
            self.state = State.APPLIED if self._patch else State.NOT_NEEDED
        try:
            yield
        finally:
            self._patch.undo()


_MENDS: dict[str, Mend] = {}
_watched: set[str] = set()


def mend(
    *, module: str, place: str, needed_when: str, during_import: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Register `repair(module, patch)`, which looks whether `module` has the defect and patches it if so.

    With `during_import`, register `repair(patch)` instead, called before the code of `module` runs and undone
    after it. The order of registration is the order of repair where two mends share a module.
    """

    def register(repair: Callable[..., None]) -> Callable[..., None]:
        _MENDS[repair.__name__] = Mend(repair.__name__, module, place, needed_when, during_import, repair)
        return repair

    return register


def apply(without: Collection[str] = ()) -> None:
    """Put in every mend, each when the module that it repairs is imported; again, it does nothing.

    `without` names mends to leave out, or to take out again, so that one sees whether colossalai still needs
    them. Raises ValueError for a name that no mend has.
    """
    for name in without:
        each = _find(name)
        with _those_above_lifted(each):
            each.leave_out()
    for each in _MENDS.values():
        if each.name not in _watched:
            _watched.add(each.name)
            each.watch()


def mends() -> tuple[Mend, ...]:
    """All mends, in the order in which they are put in."""
    return tuple(_MENDS.values())


@contextmanager
def taken_out(name: str) -> Iterator[None]:
    """Take the applied mend `name` out for the length of a `with` block.

    Raises ValueError if it is not applied, or lasts only for an import.
    """
    each = _find(name)
    if each.state is not State.APPLIED or each.during_import:
        raise ValueError(f"the mend {name} cannot be taken out: it is {each.state.value}")
    with _those_above_lifted(each):
        each.leave_out()
    try:
        yield
    finally:
        with _those_above_lifted(each):
            each.state = State.WAITING
            each.put_in(sys.modules[each.module])


@contextmanager
def _those_above_lifted(mend: Mend) -> Iterator[None]:
    """Change `mend` beneath those that wrap what it put in: they are undone, and put in again on what is there."""
    later = list(_MENDS.values())[list(_MENDS).index(mend.name) + 1 :]
    above = [each for each in later if each.module == mend.module and each._patch.places & mend._patch.places]
    for each in reversed(above):
        each._patch.undo()
    try:
        yield
    finally:
        for each in above:
            each.put_in(sys.modules[each.module])


def _find(name: str) -> Mend:
    if name not in _MENDS:
        raise ValueError(f"no mend is called {name!r}; the mends are {', '.join(_MENDS)}")
    return _MENDS[name]
