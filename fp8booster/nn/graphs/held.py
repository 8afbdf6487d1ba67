"""What the modules of a layer hold, which graphs are of: found by one look, and seen to be the same by a short one."""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import chain
from operator import attrgetter, is_
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule

from fp8booster.nn.graphs.eager import eager_parts, modules_apart
from fp8booster.nn.graphs.reached import Reached
from fp8booster.nn.graphs.recorder import Recorder
from fp8booster.nn.modules import HOOKS, is_looked_at, waiting_hooks
from fp8booster.nn.weights.holder import FP8Module, weight_holders


class Held:
    """What a layer's modules hold, as a look finds it.

    Args:
        layer: looked at.
        record_on: returns what captures on a device; None: nothing does.
    """

    def __init__(self, layer: nn.Module, record_on: Callable[[torch.device], Recorder | None]) -> None:
        everything = list(layer.modules())
        self._may_be_eager = eager_parts(everything)
        self._whys = list(map(_WHY, self._may_be_eager))
        self.eager = [part for part in self._may_be_eager if part.why is not None]
        """Parts that run eagerly, between graphs."""

        apart = modules_apart(self.eager)
        self.modules = modules = [module for module in everything if module not in apart]
        """Modules that graphs hold."""

        self._inside = inside = [module for module in everything if module in apart]
        self._apart = [each for module in inside for each in module._parameters.values() if each is not None]
        self._are_trained = list(map(_REQUIRES_GRAD, self._apart))
        self._layer = layer
        self.waits = [(hook, module) for module in modules for hook in waiting_hooks(module)]
        """Hooks that wait for parameters, with their modules."""

        reached = Reached(modules, everything)
        self.settings, self.generators = reached.settings, reached.generators
        buffers = [each for module in modules for each in module._buffers.values() if each is not None]
        self.tensors = [*buffers, *reached.tensors]
        """Tensors that a forward may read, besides parameters."""

        # a kernel is given the number that lies on the host, and a graph has it for good
        self._on_host = [each for each in self.tensors if not each.is_inference() and record_on(each.device) is None]
        self._numbers = list(map(_VERSION, self._on_host))
        # views show what is there later too: a look then is one walk over objects, without a call of Python's
        registered = [of_module for module in modules for of_module in _PARTS(module)]
        registered += [hooks for part in self.eager for hooks in _HOOKS(part.called)]
        # graphs prepare what eager modules read, as experts that an adapter is put around read it otherwise
        registered += [module._modules for module in inside]
        self._empty = [each for each in (*reached.holders, *registered) if not each]
        # the last shows that none before it ends early
        self._views = [*reached.views, *(each.values() for each in registered if each), (_END,)]
        self._objects = list(chain.from_iterable(self._views))
        self._parameters = [each for module in modules for each in module._parameters.values() if each is not None]
        self._kinds, self._classes = list(map(_KIND, self._parameters)), _classes_of(modules)
        self.parts = [
            *([*map(id, module._modules.values())] for module in modules),
            *self._classes,
            *map(id, self.tensors),
            *self._numbers,
            # others after `load_state_dict(assign=True)`
            *zip(map(id, self._parameters), self._kinds, strict=True),
            *self._whys,
            *self._are_trained,
            *map(id, inside),
        ]
        """What graphs are of, besides settings."""

        self.trains = any(each.requires_grad for each in self._parameters) or any(self._are_trained)
        self._sources = [held.fp8_weight for module in modules for held in weight_holders(module).values()]
        self._why_never = self._why_not(layer, record_on)

    @property
    def why_not(self) -> str | None:
        """Return why the layer is not captured or replayed now, with what its modules hold; None: it is."""
        if True in map(_MOVES, self._sources):  # of FSDP2, by what else is gathered now
            return "its weights are gathered elsewhere"
        return self._why_never

    def is_as_found(self, layer: nn.Module) -> bool:
        """Tell whether the modules of a layer hold the very objects that they held."""
        # a shallow copy, as each replica of `nn.DataParallel`, has the graphs of the layer, and parameters of its own
        if layer is not self._layer or any(self._empty) or list(map(_WHY, self._may_be_eager)) != self._whys:
            return False
        return (
            all(map(is_, chain.from_iterable(self._views), self._objects))
            and list(map(_KIND, self._parameters)) == self._kinds
            and _classes_of(self.modules) == self._classes
            and list(map(_VERSION, self._on_host)) == self._numbers
            and list(map(_REQUIRES_GRAD, self._apart)) == self._are_trained
        )

    def has_any_of(self, modules: Container[nn.Module]) -> bool:
        """Tell whether the layer is or has one of some modules."""
        return any(module in modules for module in chain(self.modules, self._inside))

    def changed_since(self, before: Held) -> str | None:
        """Return the name of a setting that is another than it was; None: all are the same."""
        if self.settings == before.settings:
            return None
        pairs = zip(self.settings, before.settings, strict=False)
        return next((now[0] for now, then in pairs if now != then), "the number of attributes")

    @property
    def breaking(self) -> list[nn.Module]:
        """Modules that are to be made to break the graph when they are called."""
        return [part.called for part in self.eager if not part.breaks_itself]

    def _why_not(self, layer: nn.Module, record_on: Callable[[torch.device], Recorder | None]) -> str | None:
        for part in self.eager:
            if part.called is layer:
                return part.why
            # what breaks the graph in its forward has its hooks in a graph
            if part.breaks_itself and is_looked_at(part.called):
                return "hooks of a module inside must run"
        for module in self.modules:
            if vars(module).get("use_zbv"):  # Python takes it from backward, and a replay runs none
                return "a pipeline without bubbles computes gradients of weights later"
            if isinstance(module, FP8Module) and not module.fp8_config.scaling.is_captured:
                return f"{module.fp8_config.scaling.name} scales, of which a graph cannot tell when a step begins"
            if module is not layer and _is_compiled(module) and any(isinstance(e, FP8Module) for e in module.modules()):
                # compiled code casts weights by itself, and has what it finds in a capture for good
                return "a module inside is compiled; compile the whole layer or nothing of it"
            if module is not layer and is_looked_at(module):  # the layer's own hooks run around its forward
                return "hooks of a module inside must run"
        gathered = _gathered_by_torch()
        for each in self._parameters:
            if not getattr(each, "stays", id(each) not in gathered):
                return "a weight is gathered elsewhere each time"
            if not _is_plain(each):
                return f"a weight is a {type(each).__name__}"
            if record_on(each.device) is None:
                return "CUDA graphs take a GPU"
        return None


def _is_compiled(module: nn.Module) -> bool:
    """Tell whether a module is compiled in place, or is `torch.compile`'s around another."""
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


def _classes_of(modules: list[nn.Module]) -> list[Any]:
    return [(type(each), type(each).forward) for each in modules]


def _is_plain(parameter: nn.Parameter) -> bool:
    return type(parameter) is nn.Parameter


def _gathered_by_torch() -> set[int]:
    """Return the identities of parameters that FSDP2 gathers and frees, in whichever units of whichever models."""
    found: set[int] = set()
    for module in list(_module_state_mapping):
        if isinstance(module, FSDPModule):
            of_unit = module._get_fsdp_state()._fsdp_param_group
            params = () if of_unit is None else of_unit.fsdp_params
            found.update(id(each._unsharded_param) for each in params if hasattr(each, "_unsharded_param"))
    return found


_PARTS = attrgetter("_modules", "_buffers", "_parameters", *HOOKS)
_HOOKS = attrgetter(*HOOKS)
_KIND = attrgetter("__class__", "device", "dtype", "requires_grad")
_VERSION = attrgetter("_version")
_MOVES = attrgetter("moves")
_REQUIRES_GRAD = attrgetter("requires_grad")
_WHY = attrgetter("why")
_END = object()
