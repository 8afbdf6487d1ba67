"""Whether Colossal-AI imports, and how it is patched."""

from __future__ import annotations

import importlib
import warnings
from dataclasses import dataclass

PLUGINS = "colossalai.booster.plugin"
"""Importing it imports the whole training path."""


@dataclass(frozen=True)
class Colossal:
    """What came of importing Colossal-AI."""

    error: str | None
    """What its import raised, or None."""
    missing: str | None
    """The package that it asked for and did not find."""
    patches: list[dict[str, str]]
    """Of each: its name, kind (why there is one), summary, place, when it is needed, and its state."""


def import_colossal() -> Colossal:
    """Apply the patches, import Colossal-AI's plugins, and list where each patch stands."""
    from fp8booster.colossal import compat

    error = missing = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # upstream advertises optional packages
            importlib.import_module(PLUGINS)
    except Exception as raised:  # an incompatible version fails with anything
        error = f"{type(raised).__name__}: {raised}"
        if isinstance(raised, ModuleNotFoundError):
            missing = raised.name.partition(".")[0]
    told = ("name", "summary", "place", "needed_when")
    rows = [
        {name: getattr(each, name) for name in told} | {"kind": each.kind.value, "state": each.state.value}
        for each in compat.patches()
    ]
    return Colossal(error, missing, rows)
