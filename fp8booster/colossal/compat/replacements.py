"""Replacing what a library holds, and putting it back."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

_MISSING = object()


class Replacements:
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
        _exchange(module, name, old, value)
        self.places.add((id(module), name))
        # Not `set`: modules imported from now on take the new function, and must get the old one back too.
        self._undo.append(lambda: _exchange(module, name, value, old))

    def wrap(self, module: ModuleType, target: str, function: Callable) -> None:
        """Let `function(upstream, ...)` take the place of a function or a method, given what that is called with.

        A function is replaced wherever a colossalai module imported it if `module` is its home, else in `module` alone.

        Args:
            module: where the target is.
            target: such as "function" or "Class.method".
            function: its first argument is what it replaces, of a method unbound.
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
            is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
            self.set(owner, name, staticmethod(call) if is_static else call)

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
        """Put everything back, the last replacement first."""
        while self._undo:
            self._undo.pop()()


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _exchange(home: ModuleType, name: str, old: Callable, new: Callable) -> None:
    """Set `name` to `new` where it is `old`, at its home and in every colossalai module."""
    for module in [home, *(module for key, module in sys.modules.items() if key.startswith("colossalai."))]:
        if vars(module).get(name) is old:
            setattr(module, name, new)
