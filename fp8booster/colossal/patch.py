"""Replacing what a library holds, and putting it back."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MISSING = object()


class Patch:
    """Replaces attributes, entries of `sys.modules` and environment variables, and remembers how to put the old ones
    back.
    """

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
        _exchange(name, old, value)
        self.places.add((id(module), name))
        # Not `set`: modules imported from now on take the new function, and must get the old one back too.
        self._undo.append(lambda: _exchange(name, value, old))

    def add_module(self, module: ModuleType) -> None:
        """Make `import module.__name__` find `module`."""
        sys.modules[module.__name__] = module
        self._undo.append(lambda: sys.modules.pop(module.__name__))

    def set_variable(self, name: str, value: str | None) -> None:
        """Set an environment variable; None takes it away."""
        old = os.environ.get(name)
        _set_variable(name, value)
        self._undo.append(lambda: _set_variable(name, old))

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _exchange(name: str, old: Callable, new: Callable) -> None:
    """Set `name` to `new` in every colossalai module where it is `old`."""
    for module in [module for key, module in sys.modules.items() if key.startswith("colossalai.")]:
        if vars(module).get(name) is old:
            setattr(module, name, new)
