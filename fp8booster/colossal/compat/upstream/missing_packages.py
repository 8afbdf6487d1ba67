"""Stand-ins for packages that colossalai imports although training does not use them.

They exist only while the importing module's code runs: transformers and peft look for bitsandbytes and
galore_torch themselves, and must go on finding that they are not installed.
"""

from __future__ import annotations

import importlib.util
from types import ModuleType
from typing import Any, NoReturn

from fp8booster.colossal.compat.registry import patch
from fp8booster.colossal.compat.replacements import Replacements


def _needs(package: str, install: str, name: str) -> type:
    """A class called `name` that can be subclassed, and says what to install when an instance is made."""

    def refuse(cls: type, *_: Any, **__: Any) -> NoReturn:
        raise ImportError(f"{cls.__name__} needs {package}, which is not installed: pip install {install}")

    return type(name, (), {"__new__": refuse, "__module__": package})


def _stand_in(replacements: Replacements, package: str, install: str, names: dict[str, tuple[str, ...]]) -> None:
    """Unless `package` is installed, add its modules `names`, each with the classes named there."""
    if importlib.util.find_spec(package) is not None:
        return
    # These two look for optional packages when they are imported: before the stand-in is there.
    import peft  # noqa: F401
    import transformers.utils.import_utils  # noqa: F401

    for module_name, classes in names.items():
        module = ModuleType(module_name)
        for name in classes:
            setattr(module, name, _needs(package, install, name))
        replacements.add_module(module)


@patch("nn.optimizer", "nn/optimizer/__init__.py:1", needed_when="galore_torch is not installed", during_import=True)
def galore_torch_is_optional(replacements: Replacements) -> None:
    """GaLoreAdamW and GaLoreAdafactor say what to install when made, not when colossalai is imported.

    Without it `import colossalai.booster` raises ModuleNotFoundError: No module named 'galore_torch'.
    """
    _stand_in(replacements, "galore_torch", "galore-torch", {"galore_torch": ("GaLoreAdafactor", "GaLoreAdamW")})


@patch(
    "nn.optimizer",
    "nn/optimizer/galore.py:7, nn/optimizer/distributed_galore.py:10",
    needed_when="bitsandbytes is not installed",
    during_import=True,
)
def bitsandbytes_is_optional(replacements: Replacements) -> None:
    """The 8-bit GaLore optimizers say what to install when made, not when colossalai is imported.

    Without it `import colossalai.booster` raises ModuleNotFoundError: No module named 'bitsandbytes'.
    """
    modules = {"bitsandbytes": (), "bitsandbytes.optim": (), "bitsandbytes.optim.optimizer": ("Optimizer2State",)}
    _stand_in(replacements, "bitsandbytes", "bitsandbytes", modules)


@patch("quantization.bnb", "24", needed_when="bitsandbytes is not installed")
def quantized_lora_names_bitsandbytes(module: ModuleType, replacements: Replacements) -> None:
    """`enable_lora(quantize=True)` says that it needs bitsandbytes.

    Without it: NameError: name 'IS_8BIT_BNB_AVAILABLE' is not defined (and the 4-bit one).
    """

    def quantize_model(*_: Any, **__: Any) -> NoReturn:
        raise ImportError("quantize=True needs bitsandbytes, which is not installed: pip install bitsandbytes")

    if not hasattr(module, "IS_4BIT_BNB_AVAILABLE"):
        replacements.set_function(module, "quantize_model", quantize_model)
