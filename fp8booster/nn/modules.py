"""Classes of modules, their hooks, what they hold, and which of them make a model's logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache
from operator import attrgetter, is_
from typing import Any, TypeVar, cast

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper

Held = TypeVar("Held")
Function = TypeVar("Function", bound=Callable[..., Any])


def cached_by_class(function: Function) -> Function:
    """Cache as `functools.cache`, whose type takes no class of modules, with the type of the function."""
    return cast(Function, cache(function))


def change_class(object: Any, cls: type[Held]) -> Held:
    """Give an object another class in place, and return it: who refers to it, and what it holds, stay."""
    object.__class__ = cls
    return object


def mixed_class(mixin: type, cls: type) -> Any:
    """Return the class of a mixin before another, the same one for the same two.

    Its objects can be copied and pickled, for the class is made again where they are read.

    Args:
        mixin: may have a `name_prefix`, by which the class is one of the mixin's file, and else goes by the name of
            `cls`; and a class method `members_before`, which makes further members for `cls`.
        cls: mixed or not.
    """
    # a forward may be replaced for all modules of a class, and a mixin's members tell of the one that it has
    return _mixed_class(mixin, cls, getattr(cls, "forward", None))


@cache
def _mixed_class(mixin: Any, cls: type, forward: Callable[..., Any] | None) -> type:
    prefix = getattr(mixin, "name_prefix", "")
    members = {
        "__module__": mixin.__module__ if prefix else cls.__module__,
        "__doc__": mixin.__doc__,
        "__reduce_ex__": _reduce_ex,
        _MIXED: (mixin, cls),
    }
    if hasattr(mixin, "members_before"):
        members |= mixin.members_before(cls)
    return type(prefix + cls.__name__, (mixin, cls), members)


_MIXED = "_fp8booster_mixed"


@cached_by_class
def unmixed(cls: type) -> Any:
    """Return what a class was before `mixed_class` put mixins before it."""
    mixed = vars(cls).get(_MIXED)
    return cls if mixed is None else unmixed(mixed[1])


def remixed(cls: type, below: type) -> Any:
    """Return another class behind the mixins that `mixed_class` has put before one."""
    mixed = vars(cls).get(_MIXED)
    return below if mixed is None else mixed_class(mixed[0], remixed(mixed[1], below))


def class_without(mixin: type, cls: type) -> Any:
    """Return a class with its mixins but for one, and for those that are subclasses of that."""
    mixed = vars(cls).get(_MIXED)
    if mixed is None:
        return cls
    first, second = mixed
    below = class_without(mixin, second)
    return below if issubclass(first, mixin) else mixed_class(first, below)


def _reduce_ex(self: Any, protocol: int) -> tuple:
    reduced: Any = object.__reduce_ex__(self, max(protocol, 2))  # with what a class's `__getstate__` leaves out
    return _new_of_mixed, (_ingredients(type(self)),), *reduced[2:]


def _ingredients(cls: type) -> Any:
    """Return a class that a pickle finds by its name, or the two that it is mixed of."""
    mixed = vars(cls).get(_MIXED)
    return cls if mixed is None else tuple(map(_ingredients, mixed))


def _new_of_mixed(ingredients: Any) -> Any:
    cls: Any = _mixed_again(ingredients)
    return cls.__new__(cls)


def _mixed_again(ingredients: Any) -> type:
    return mixed_class(*map(_mixed_again, ingredients)) if isinstance(ingredients, tuple) else ingredients


def require_module(model: object) -> None:
    """Raise TypeError where a model is none."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model is a {type(model).__name__}; give an nn.Module")


LOOKS_AT_NOTHING = "fp8_looks_at_nothing"
"""Attribute of a hook that a module may run without."""

ONLY_WAITS = "fp8_only_waits"
"""Attribute of a hook that does nothing but wait for parameters."""

PASSES_ON = "fp8_passes_on"
"""Attribute of a forward that makes parameters ready, and passes all that it is given to its base class's."""

HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Attributes of a module, a dictionary of each kind of hooks."""

hooks_of = attrgetter(*HOOKS)
"""The hooks of a module, a dictionary of each kind."""


def has_hooks(module: nn.Module) -> bool:
    """Tell whether a module has hooks of its own, forward or backward, which only a call runs; not those marked."""
    # every part is asked at every call, and most have none
    return any(hooks_of(module)) and not _are_marked(module, LOOKS_AT_NOTHING)


def is_looked_at(module: nn.Module) -> bool:
    """Tell whether a module has hooks that may read what it is given or gives: all but those marked to only wait."""
    return any(hooks_of(module)) and not _are_marked(module, ONLY_WAITS, LOOKS_AT_NOTHING)


def _are_marked(module: nn.Module, *marks: str) -> bool:
    # torch has no public way to list hooks
    hooks = (hook for of_kind in hooks_of(module) for hook in of_kind.values())
    return all(any(getattr(hook, mark, False) for mark in marks) for hook in hooks)


def must_be_called(module: nn.Module) -> bool:
    """Tell whether a module has hooks, or a forward of its own in place of its class's."""
    return "forward" in module.__dict__ or (any(hooks_of(module)) and has_hooks(module))


def may_be_bypassed(module: nn.Module) -> bool:
    """Tell whether nobody sees how a module is called: its class's forward runs, and its hooks, if any, only wait."""
    return "forward" not in module.__dict__ and not (any(hooks_of(module)) and is_looked_at(module))


def forward_of_class(module: nn.Module) -> Callable[..., Any]:
    """Return what the class of a module computes: the first forward of its bases that does more than pass on."""
    bases: tuple[Any, ...] = type(module).__mro__
    return next(base.forward for base in bases if not getattr(base.forward, PASSES_ON, False))


def waiting_hooks(module: nn.Module) -> list[Callable[..., Any]]:
    """Return the hooks of a module that only wait: who does not call it calls them, with the module and `()`."""
    return [hook for hook in module._forward_pre_hooks.values() if getattr(hook, ONLY_WAITS, False)]


def wait_for_parameters(module: nn.Module) -> None:
    """Run the hooks of a module, which is not called, that only wait."""
    for hook in waiting_hooks(module):
        hook(module, ())


def run_with(forward: Callable[..., Any], module: nn.Module, parts: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Return what a forward gives that finds other things in the place of some of a module's parts.

    The module itself is not changed, so other threads, and calls inside this one, see it as it is. What the forward
    assigns to the module or deletes from it is assigned to the module or deleted.

    Args:
        forward: takes a module of the module's class, and the arguments.
        module: given to it as another object that shares all that the module holds.
        parts: by name.
        args, kwargs: of the forward.
    """
    held = vars(module)
    given = {**held, **parts}  # what is an attribute is looked at before what is registered
    stand_in = object.__new__(type(module))  # `super()` and the class's methods work in it
    now = vars(stand_in)
    now.update(given)
    try:
        return forward(stand_in, *args, **kwargs)
    finally:
        if len(now) != len(given) or not all(map(is_, now.values(), given.values())):
            for name in given.keys() - now.keys() - parts.keys():
                held.pop(name, None)
            held.update({name: value for name, value in now.items() if name not in given or given[name] is not value})


def held_by_modules(model: nn.Module, kind: type[Held]) -> list[Held]:
    """Return the objects of a class that the modules of a model hold as attributes."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, kind)]


def count_readers(model: nn.Module) -> Counter[nn.Parameter]:
    """Count the modules that hold each parameter: several for the one that embeddings and a head share."""
    return Counter(parameter for module in model.modules() for parameter in module.parameters(recurse=False))


def vocabulary_heads(model: nn.Module) -> set[int]:
    """Return the ids of what `get_output_embeddings()` gives, which models of transformers have, and of all inside it.

    Names tell little: the head is `cls.predictions.decoder` in BERT, `lm_head.decoder` in RoBERTa, `proj_out` in
    Whisper.

    Args:
        model: wrapped or not, sharded or not.
    """
    return {
        id(layer)
        for module in model.modules()
        if isinstance(head := _head(module), nn.Module)
        for layer in head.modules()  # adapters wrap a head, and some models have several
    }


def _head(module: nn.Module) -> object:
    """Return what a module calls its head, if anything."""
    ask = getattr(module, "get_output_embeddings", None)
    try:
        return None if ask is None else ask()
    # the head was taken out of the model; or a method of another meaning has the name, or none of its own
    except (AttributeError, TypeError, NotImplementedError):
        return None


def _lacks_weights(layer: nn.Module) -> bool:
    """Tell whether a pipeline has taken the weights out of a layer, which another stage holds."""
    slots = any(module._parameters for module in layer.modules())
    return slots and next(layer.parameters(), None) is None


def inside_wrappers(module: nn.Module) -> nn.Module:
    """Return what torch's wrappers for activation checkpointing, and for activations on the host, are around."""
    while isinstance(module, ActivationWrapper):
        module = module._checkpoint_wrapped_module
    return module


def repeated_layers(module: nn.Module) -> list[nn.Module]:
    """Return the members of each ModuleList of two or more modules of one class with weights, but for lists inside.

    Of a list of which a pipeline's stage holds a part, that part.
    """
    found: list[nn.Module] = []
    for child in module.children():
        layers = child if isinstance(child, nn.ModuleList) else ()
        members = [each for each in layers if not _lacks_weights(each)]
        alike = len(layers) > 1 and len({type(each) for each in members}) == 1
        if alike and next(members[0].parameters(), None) is not None:
            found += members
        else:
            found += repeated_layers(child)
    return found
