"""Import the plugins with a transformers and a peft that lack names: `python -m tests.colossal.thinned SEED SHARE`.

Of the modules, and of the names in them, that Colossal-AI or fp8booster imports, a share chosen by the seed is missing.
Prints how many were, and how many stand-ins refuse to be used.
"""

from __future__ import annotations

import builtins
import importlib
import pkgutil
import random
import sys
import warnings
from types import ModuleType
from typing import Any

import pytest

LACKING = ("transformers", "peft")


class Thinned:
    """Imports from which some modules and names are missing."""

    def __init__(self, seed: int, share: float) -> None:
        self._random, self._share = random.Random(seed), share
        self._native = builtins.__import__
        self._is_missing: dict[str, bool] = {}
        builtins.__import__ = self._import

    @property
    def missing(self) -> list[str]:
        return [name for name, is_missing in self._is_missing.items() if is_missing]

    def _lacks(self, name: str) -> bool:
        if name not in self._is_missing:
            self._is_missing[name] = self._random.random() < self._share
        return self._is_missing[name]

    def _import(self, name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        importer = str((globals or {}).get("__name__")).partition(".")[0]
        if importer not in ("colossalai", "fp8booster") or level or name.partition(".")[0] not in LACKING:
            return self._native(name, globals, locals, fromlist, level)
        if "." in name and self._lacks(name):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        found = self._native(name, globals, locals, fromlist, level)
        lost = [each for each in fromlist or () if self._lacks(f"{name}:{each}")]
        if not lost:
            return found
        rest = ModuleType(name)
        vars(rest).update(
            (each, getattr(found, each)) for each in fromlist if each not in lost and hasattr(found, each)
        )
        return rest


def refusals() -> int:
    """Count the stand-ins that modules of Colossal-AI hold, each of which refuses to be called."""
    stand_ins = [
        value
        for module_name, module in sys.modules.items()
        if module_name.startswith("colossalai")
        for value in vars(module).values()
        if hasattr(type(value), "importing")
    ]
    for each in stand_ins:
        with pytest.raises(ImportError, match="pip install"):
            each()
    return len(stand_ins)


def main() -> None:
    """Import what a training of any plugin does, and all that Colossal-AI shards models by."""
    warnings.simplefilter("ignore")
    thinned = Thinned(int(sys.argv[1]), float(sys.argv[2]))
    import fp8booster.plugins  # noqa: F401  isort: skip  (patches Colossal-AI before it is imported)
    from colossalai.shardformer import policies

    for module in pkgutil.iter_modules(policies.__path__):
        importlib.import_module(f"{policies.__name__}.{module.name}")
    print(len(thinned.missing), refusals())  # noqa: T201


if __name__ == "__main__":
    main()
