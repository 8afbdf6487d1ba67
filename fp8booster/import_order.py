"""Patches for colossalai, whichever module of fp8booster was imported before it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType


class _BeforeColossalAI(MetaPathFinder):
    """Finds nothing; registers the patches when somebody imports colossalai."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name == "colossalai":
            sys.meta_path.remove(self)
            import fp8booster.colossal  # noqa: F401


def patch_colossalai_when_imported() -> None:
    """Register the patches of `fp8booster.colossal` at the import of colossalai, not before; it may never come."""
    if "colossalai" not in sys.modules:
        sys.meta_path.insert(0, _BeforeColossalAI())
