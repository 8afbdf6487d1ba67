"""State dicts that put their parameters in the place of a module's, as torch does on request."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


def by_swapping(load: Callable[[nn.Module], None]) -> Callable[[nn.Module], None]:
    """What `load` does to a module, with `set_swap_module_params_on_conversion`."""

    def load_by_swapping(module: nn.Module) -> None:
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            load(module)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    load_by_swapping.__name__ = f"{load.__name__}_by_swapping"
    return load_by_swapping
