"""Stand-ins for what colossalai imports, although training does not use it, and what is installed does not have.

Those are packages that are not installed, and names and modules that a newer transformers has no more. Only import
statements of colossalai's own modules get them: transformers and peft look for bitsandbytes and galore_torch
themselves, and must go on finding that they are not installed.
"""

from __future__ import annotations

import builtins
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, NoReturn

from fp8booster.colossal.compat.registry import patch
from fp8booster.colossal.compat.replacements import Replacements
from fp8booster.colossal.sharding import SHARDED_TRANSFORMERS

_PACKAGES = {
    "bitsandbytes": "bitsandbytes",
    "galore_torch": "galore-torch",
    "transformers": f"transformers=={SHARDED_TRANSFORMERS}",
}
"""The names that are stood in for, and what to install for each."""


class _StandIn(type):
    """The class of stand-ins: these can be named and subclassed, and refuse all else."""

    refusal: str

    def __call__(cls, *_: Any, **__: Any) -> NoReturn:
        raise ImportError(cls.refusal)

    def __getitem__(cls, _: Any) -> NoReturn:
        raise ImportError(cls.refusal)

    def __getattr__(cls, name: str) -> NoReturn:
        # Python asks a class for names with underscores to see what it can do
        raise AttributeError(name) if name.startswith("__") else ImportError(cls.refusal)


def _stand_in(module: str, name: str, importer: str) -> type:
    """Return what takes the place of `module.name` in module `importer`."""
    package = module.partition(".")[0]
    try:
        reason = f"which {package} {version(package)} does not have"
    except PackageNotFoundError:
        reason = f"and {package} is not installed"
    refusal = f"{importer} needs {module}.{name}, {reason}: pip install {_PACKAGES[package]}"
    return _StandIn(name, (), {"__module__": module, "refusal": refusal})


@patch(
    "colossalai",
    "nn/optimizer/__init__.py:1, nn/optimizer/galore.py:7, shardformer/modeling/llama.py:16, deepseek.py:10, ...",
    needed_when="galore_torch or bitsandbytes is not installed, or transformers is newer than 4.51",
    during_import=True,
)
def missing_imports_are_late_errors(replacements: Replacements) -> None:
    """What colossalai imports and nobody has is refused with a sentence when it is used, not when it is imported.

    Without it `import colossalai.booster` raises ModuleNotFoundError: No module named 'galore_torch', then
    'bitsandbytes'; with transformers 5.24 `import fp8booster.plugins` raises it for
    'transformers.modeling_attn_mask_utils', and policies of LLaMA raise ImportError for 'StaticCache'.
    """
    native = builtins.__import__

    def lenient(
        name: str,
        globals: Mapping[str, Any] | None = None,
        locals: Mapping[str, Any] | None = None,
        fromlist: Sequence[str] | None = (),
        level: int = 0,
    ) -> ModuleType:
        importer = str((globals or {}).get("__name__"))
        # at the top of a module these are the same; in a function an ImportError comes when it is used
        is_top = locals is globals and importer.partition(".")[0] == "colossalai"
        if not (is_top and fromlist and level == 0 and name.partition(".")[0] in _PACKAGES):
            return native(name, globals, locals, fromlist, level)
        try:
            found = native(name, globals, locals, fromlist, level)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise  # it is there, and lacks something itself
            found = ModuleType(name)
        missing = [each for each in fromlist if not hasattr(found, each)]
        if not missing:
            return found
        filled = ModuleType(name)
        vars(filled).update((each, getattr(found, each)) for each in fromlist if each not in missing)
        vars(filled).update((each, _stand_in(name, each, importer)) for each in missing)
        return filled

    replacements.set(builtins, "__import__", lenient)


@patch("quantization.bnb", "24", needed_when="bitsandbytes is not installed")
def quantized_lora_names_bitsandbytes(module: ModuleType, replacements: Replacements) -> None:
    """`enable_lora(quantize=True)` says that it needs bitsandbytes.

    Without it: NameError: name 'IS_8BIT_BNB_AVAILABLE' is not defined (and the 4-bit one).
    """

    def quantize_model(*_: Any, **__: Any) -> NoReturn:
        raise ImportError("quantize=True needs bitsandbytes, which is not installed: pip install bitsandbytes")

    if not hasattr(module, "IS_4BIT_BNB_AVAILABLE"):
        replacements.set_function(module, "quantize_model", quantize_model)
