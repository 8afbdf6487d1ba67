"""Run code around, and after, the import of modules that are not imported yet."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _Watcher(MetaPathFinder):
    """Finds watched modules as the other finders do, and wraps the execution of their code."""

    def __init__(self) -> None:
        self.around: dict[str, list[Callable[[], AbstractContextManager[None]]]] = {}
        self.after: dict[str, list[Callable[[ModuleType], None]]] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not self._keys(name) and name not in self.after:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None:
            execute = spec.loader.exec_module
            # On the instance, so that the loader keeps its type, which inspect and tracebacks look at.
            spec.loader.exec_module = lambda module: self._execute(execute, module)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        name = module.__name__
        with contextlib.ExitStack() as contexts:
            for around in (each for key in self._keys(name) for each in self.around[key]):
                contexts.enter_context(around())
            execute(module)
        for callback in self.after.pop(name, ()):
            callback(module)

    def _keys(self, name: str) -> list[str]:
        """Return under which names `around` has something for module `name`."""
        return [key for key in dict.fromkeys((name.partition(".")[0], name)) if key in self.around]


_watcher = _Watcher()


def around_import(name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
    """Enter `around()` while the code of module `name` runs, or of any within it if `name` is that of a package.

    It has no effect on what is imported already.
    """
    _install()
    _watcher.around.setdefault(name, []).append(around)


def after_import(name: str, callback: Callable[[ModuleType], None]) -> None:
    """Call `callback(module)` once: now if module `name` is imported, else at the end of its import."""
    if name in sys.modules:
        callback(sys.modules[name])
    else:
        _install()
        _watcher.after.setdefault(name, []).append(callback)


def _install() -> None:
    if _watcher not in sys.meta_path:
        sys.meta_path.insert(0, _watcher)
