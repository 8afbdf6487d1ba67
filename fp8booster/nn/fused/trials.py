"""What parts of transformers' models compute, found out before they are fused.

Families and versions say the same by other names, and something else by the same. So the forward of a class is tried
out, in FP32 on the CPU, on numbers of all sizes, on a module that has small parts: here only what comes out counts.
Numbers cannot tell what hangs on an attribute, a mode or a parameter. So a trial of a norm or a feed-forward block
watches what its forward reads of its module, and it must be nothing but the parts that the fused form reads at each
call. Activations are few and have state: no trial, but a list by exact class, which is asked at each call.
"""

from __future__ import annotations

import copy
import functools
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fp8booster.nn.fused.families import Part, has_sinks
from fp8booster.nn.fused.packing import PackedEmbeddings, Sequences
from fp8booster.nn.modules import cached_by_class, change_class, may_be_bypassed, mixed_class

Trial = TypeVar("Trial", bound=Callable[..., Any])


def _computes(trial: Trial) -> Trial:
    """Let a trial compute also where a caller's tensors have shapes alone, as those of a plan have."""

    @functools.wraps(trial)
    def with_numbers(*args: Any) -> Any:
        with _disable_current_modes():
            return trial(*args)

    return cast(Trial, with_numbers)


FAILS = (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError, NotImplementedError)
"""What the forward of a class that does something else may raise on a trial's numbers."""


class Norm(NamedTuple):
    """What a norm computes."""

    centered: bool
    """Layer norm; RMS norm else."""

    unit_offset: bool
    """It multiplies by 1 + weight."""

    epsilon: str
    """The attribute with what is added to the mean square."""

    weighted: bool = True
    """It multiplies by its weight, of one dimension, or of one for each head."""

    biased: bool = False
    """It adds its bias, if it has one."""


def norm_of(cls: type[nn.Module], *heads: int) -> Norm | None:
    """Return what a class of norms of the last dimension computes; None: something else.

    Args:
        cls: of norms.
        heads: how many rows its weight has, one for each head; left out, it has one dimension.
    """
    return _norm_of(cls, cls.forward, *heads)  # a forward may be replaced for all modules of a class


@cached_by_class
@_computes
def _norm_of(cls: type[nn.Module], forward: Callable, *heads: int) -> Norm | None:
    weight, bias = _numbers(*heads, 8), _numbers(*heads, 8).flip(0)
    for name in ("variance_epsilon", "eps"):
        for kind in _NORMS:
            computes = kind._replace(epsilon=name)
            if all(_is_norm(cls, forward, computes, *each, weight, bias) for each in _SIZES):
                return computes
    return None


_NORMS = (
    Norm(False, False, ""),
    Norm(False, True, ""),
    Norm(False, False, "", weighted=False),
    Norm(True, False, ""),
    Norm(True, False, "", biased=True),
)
_SIZES = ((1.0, 0.25), (1e-3, 1e-6), (1e-3, 0.25), (300.0, 0.25), (300.0, 1e-6), (0.0, 1e-6))
"""How large numbers are, and what is added to their mean square."""


def _is_norm(
    cls: type[nn.Module],
    forward: Callable,
    computes: Norm,
    size: float,
    epsilon: float,
    weight: torch.Tensor,
    bias: torch.Tensor,
) -> bool:
    """Tell whether a class of norms computes this, reading nothing else of its module."""
    held: dict[str, Any] = {computes.epsilon: epsilon, "normalized_shape": weight.shape}
    held |= {"weight": weight} if computes.weighted else {}
    held |= {"bias": bias} if computes.biased else {}
    for length in (4, 70):
        x = size * _numbers(2, length, *weight.shape)
        values = x - x.mean(-1, keepdim=True) if computes.centered else x
        right = values * (values.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        right = right * (computes.unit_offset + weight) if computes.weighted else right
        right = right + bias if computes.biased else right
        if not _alike(_watched(cls, forward, held, x), right):
            return False
    return True


def activation_name(block: nn.Module) -> str | None:
    """What a feed-forward block calls its activation; None: it has none under a name that is known."""
    return next((name for name in _ACTIVATIONS if name in block._modules), None)


_ACTIVATIONS = ("act_fn", "activation_fn", "act")


def activation_kind(activation: Any) -> str | None:
    """Return what an activation computes now, as `pointwise.activate` calls it; None: another one, or one not known.

    It is asked at each call, for modules are replaced, and their attributes change.

    Args:
        activation: a module, or a function.
    """
    cls = type(activation)
    rule = _rule_of(cls)
    if rule is None or cls.forward is not rule.forward:
        return None
    return rule.kind(activation)


def fused_kind(activation: Any) -> str | None:
    """Return what may be computed in the place of an activation, as `activation_kind`; None: it must be called."""
    if isinstance(activation, nn.Module) and not may_be_bypassed(activation):
        return None
    return activation_kind(activation)


class _Rule(NamedTuple):
    """How to tell what a module of a class computes."""

    forward: Callable
    """The forward that the class was written with."""

    kind: Callable[[Any], str | None]
    """Of a module, from its attributes."""


@cached_by_class
def _rule_of(cls: type[nn.Module]) -> _Rule | None:
    """None for all but the very classes that are listed: those derived from them may compute anything."""
    kind = _RULES.get((cls.__module__, cls.__qualname__))
    if kind is None or getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls:
        return None
    forward = vars(cls).get("forward")
    written = (getattr(forward, "__module__", None), getattr(forward, "__qualname__", None))
    return _Rule(forward, kind) if written == (cls.__module__, f"{cls.__qualname__}.forward") else None


def _of_function(activation: Any) -> str | None:
    """What a module computes that has a function of torch, or a method of its own, for its attribute `act`."""
    function: Any = vars(activation).get("act")
    options: dict[str, Any] = {}
    if isinstance(function, types.MethodType):
        own = vars(type(activation)).get(function.__name__)
        return _METHODS.get(function.__name__) if function.__func__ is own else None
    if isinstance(function, functools.partial) and not function.args:
        options, function = function.keywords, function.func
    if function is not F.gelu or not options.keys() <= {"approximate"}:
        return None
    return _GELUS.get(options.get("approximate", "none"))


_GELUS = {"none": "gelu", "tanh": "gelu_tanh"}
_METHODS = {"_gelu_python": "gelu", "_gelu_tanh_python": "gelu_tanh"}
_OF_TRANSFORMERS = "transformers.activations"
_RULES: dict[tuple[str, str], Callable[[Any], str | None]] = {
    (nn.SiLU.__module__, "SiLU"): lambda _: "silu",
    (nn.GELU.__module__, "GELU"): lambda activation: _GELUS.get(activation.approximate),
    (_OF_TRANSFORMERS, "SiLUActivation"): lambda _: "silu",
    (_OF_TRANSFORMERS, "GELUActivation"): _of_function,
    (_OF_TRANSFORMERS, "GELUTanh"): _of_function,
    (_OF_TRANSFORMERS, "PytorchGELUTanh"): lambda _: "gelu_tanh",
    (_OF_TRANSFORMERS, "NewGELUActivation"): lambda _: "gelu_tanh",
    (_OF_TRANSFORMERS, "FastGELUActivation"): lambda _: "gelu_tanh",
    (_OF_TRANSFORMERS, "AccurateGELUActivation"): lambda activation: (
        "gelu_tanh" if activation.precomputed_constant == math.sqrt(2 / math.pi) else None
    ),
}
"""By module and name of a class: all that its modules' attributes can change. None of them has parameters."""


def gates_by_activation(cls: type[nn.Module]) -> bool:
    """Tell whether a class's `_apply_gate` of gate and up, [M, 2 F], is `act_fn(gate) * up`, gate first.

    Not where its parts are interleaved, clamped or changed otherwise.

    Args:
        cls: of modules that hold experts.
    """
    return _gates_by_activation(cls, inspect.getattr_static(cls, "_apply_gate", None))


@cached_by_class
@_computes
def _gates_by_activation(cls: type[nn.Module], gate: Callable | None) -> bool:
    if not callable(gate):
        return False
    for activation in _STAND_INS:
        for size in _GATED_SIZES:
            x = size * _numbers(70, 16)
            first, second = x.chunk(2, -1)
            if not _alike(_watched(cls, gate, {"act_fn": activation}, x), activation(first) * second):
                return False
    return True


_STAND_INS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (F.silu, lambda x: 0.5 - x.abs())
"""Two activations, so that a block with one of its own is seen."""

_GATED_SIZES = (1.0, 0.0, 1e-3, 30.0, 1e4)
"""How large numbers are: what is large may be clamped."""


def is_gated(cls: type[nn.Module], part: Part, activation: str = "act_fn", unread: tuple[str, ...] = ()) -> bool:
    """Tell whether a class of feed-forward blocks computes `output(activation(gate) * up)`, gate first.

    Args:
        cls: of blocks.
        part: the layers that blocks have.
        activation: its name in a block.
        unread: fields of a block's configuration that may be read, where they are 1.
    """
    return _is_gated(cls, cls.forward, part, activation, unread)


@cached_by_class
@_computes
def _is_gated(cls: type[nn.Module], forward: Callable, part: Part, activation: str, unread: tuple[str, ...]) -> bool:
    layers: list[Callable] = [lambda x: 2 * x, lambda x: 3 * x]
    if len(part.merged) == 1:
        layers = [lambda x: torch.cat([2 * x, 3 * x], -1)]
    held = dict(zip(part.merged, layers, strict=True)) | {part.output: lambda x: 5 * x}
    if unread:
        held["config"] = types.SimpleNamespace(**dict.fromkeys(unread, 1))
    for compute in _STAND_INS:
        for size in _GATED_SIZES:
            for shape in ((3, 8), (2, 70, 8)):
                x = size * _numbers(*shape)
                found = _watched(cls, forward, held | {activation: compute}, x)
                if not _alike(found, 5 * (compute(2 * x) * 3 * x)):
                    return False
    return True


def _watched(cls: type[nn.Module], forward: Callable, held: dict[str, Any], *args: Any) -> Any:
    """What a forward gives of a module that holds this; None: it fails, or reads anything else of its module.

    Args:
        cls: the module's.
        forward: a function that takes the module first.
        held: by name.
        args: of the forward.
    """
    read: set[str] = set()
    probe = object.__new__(cls)
    vars(probe).update(held, **{_READ: read})
    change_class(probe, mixed_class(_Watched, cls))
    found = _tried(forward, probe, *args)
    return found if all(name in held or _is_code(cls, name) for name in read) else None


class _Watched:
    """Mixin of a module that notes the names of the attributes that are read of it."""

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "__dict__")[_READ].add(name)
        return object.__getattribute__(self, name)


_READ = "_fp8booster_read"


def _is_code(cls: type[nn.Module], name: str) -> bool:
    """Whether a class gives its modules a method of that name, whose reads are watched too."""
    member = inspect.getattr_static(cls, name, None)
    return name.startswith("__") or isinstance(member, (types.FunctionType, staticmethod, classmethod, property))


class Rotation(NamedTuple):
    """How an attention rotates heads, in the words of `kernels.rope`."""

    rotates: bool = True
    interleaved: bool = False
    interleaved_angles: bool = False


ROTATIONS = (Rotation(), Rotation(True, True), Rotation(True, True, True), Rotation(False))
"""LLaMA's, GLM-4's, Command-R's, and that of layers without positions."""


class Form(NamedTuple):
    """What an attention does between its products, besides to attend."""

    rotation: Rotation = Rotation()
    angles: str = "places"
    """What position embeddings are: one of `ANGLES`."""

    grouped: bool = False
    """In the product of one layer for q, k and v, those of each head of keys lie together."""

    outputs: int = 2
    """How many things it gives: a third is the cache that it was given."""

    hangs_on: tuple[tuple[bool, str, Any], ...] = ()
    """What one of the two forwards alone reads: whether of its configuration or of itself, the name, and the value."""

    fused: bool = True
    """Its own forward computes the same."""

    normed_last: bool = False
    """The norms of queries and keys come after the rotation, as in LLaMA 4."""

    @property
    def pairs(self) -> dict[str, bool]:
        """The rotation, as functions of `nn.fused.pointwise` take it."""
        return {"interleaved": self.rotation.interleaved, "interleaved_angles": self.rotation.interleaved_angles}


ANGLES = ("places", "pairs", "complex")
"""Cos and sin for each place of a head that is rotated; for each pair of places; one complex number for each pair."""


def cos_and_sin(position_embeddings: Any, angles: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Cos and sin, [1 or B, S, R] each, for each place of a head that is rotated, pairs in halves.

    Args:
        position_embeddings: as transformers makes them.
        angles: one of `ANGLES`.
    """
    if angles == "complex":
        if isinstance(position_embeddings, tuple):
            (position_embeddings,) = position_embeddings
        position_embeddings = position_embeddings.real, position_embeddings.imag
    cos, sin = position_embeddings
    return (cos, sin) if angles == "places" else (torch.cat([cos, cos], -1), torch.cat([sin, sin], -1))


@_computes
def form_of(attention: Any, part: Part, fused: type[nn.Module]) -> Form | None:
    """Return the form of an attention; None: its own forward computes something else than that of its fused class.

    Args:
        attention: whole; fused or not.
        part: of it.
        fused: has a `merged_product` and a `form`, which the trial replaces.
    """
    native = cast(Any, fused).tried[0]
    size = head_size(attention)
    places = getattr(attention, "qk_rope_head_dim", getattr(attention, "rotary_ndims", size))
    for angles in ANGLES:
        # where it takes angles for parts of heads, it must rotate these alone
        right = {each: _tried(_attended, attention, part, native, each, angles) for each in (places, size // 2)}
        if right[places] is None:
            continue
        groupings = (False, True) if len(part.merged) == 1 else (False,)
        orders = (False, True) if any("norm" in name for name in attention._modules) else (False,)
        for rotation, grouped, normed_last in product(ROTATIONS, groupings, orders):
            form = Form(rotation, angles, grouped, len(right[places]), normed_last=normed_last)
            found = {each: _tried(_attended, attention, part, fused, each, angles, form) for each in right}
            if all(right[each] is None or _same(found[each], right[each]) for each in right):
                return _watched_form(attention, part, fused, places, form)
        return None
    return None


def _watched_form(attention: Any, part: Part, fused: type[nn.Module], places: int, form: Form) -> Form | None:
    """A form that was found, with what it hangs on; None: it is another for other numbers, or in training."""
    reads: tuple[set[str], set[str]] = (set(), set())
    longest = min(filter(None, (_limit(attention, name) for name in _LIMITS)), default=_LONG)
    for how in (_Conditions(training=True), _Conditions(size=5.0), _Conditions(length=min(_LONG, longest))):
        right, found = (
            _tried(_attended, attention, part, cls, places, form.angles, of_fused, how, read)
            for cls, of_fused, read in zip((cast(Any, fused).tried[0], fused), (None, form), reads, strict=True)
        )
        if right is None or not _same(found, right):
            return None
    # what both read, the fused forward reads as it is at each call
    return form._replace(hangs_on=tuple(_plain_attributes(attention, reads[0] ^ reads[1])))


class _Conditions(NamedTuple):
    """What an attention is tried out on."""

    length: int = 5
    size: float = 1.0
    training: bool = False


_USUAL = _Conditions()
_SCALED = 1.5
_LONG = 40
_LIMITS = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Lengths from which on masks and scales are others, of which the fused forward knows."""


def _limit(attention: Any, name: str) -> int:
    """The most tokens that an attention, or its configuration, treats as fewer ones; 0: any number."""
    limits = (getattr(each, name, None) for each in (attention, attention.config))
    return min((limit - 1 for limit in limits if isinstance(limit, int) and limit > 1), default=0)


def is_of_form(attention: Any, form: Form) -> bool:
    """Whether what the form of an attention hangs on is as it was."""
    for of_config, name, value in form.hangs_on:
        now = vars(attention.config if of_config else attention).get(name)
        if now is not value and now != value:
            return False
    return True


def form_after_changes(attention: Any, part: Part) -> Form:
    """Return the form of a fused attention whose attributes have changed: one that is not `fused` if there is none."""
    form = form_of(attention, part, type(attention))
    if form is not None:
        return form
    names = {f"config.{name}" if of_config else name for of_config, name, _ in attention.form.hangs_on}
    return attention.form._replace(hangs_on=tuple(_plain_attributes(attention, names)), fused=False)


def _plain_attributes(attention: Any, names: set[str]) -> Iterator[tuple[bool, str, Any]]:
    """As `Form.hangs_on`, of names that begin with "config." where they are of the configuration."""
    for each in sorted(names):
        of_config, _, name = each.rpartition("config.")
        held = vars(attention.config if of_config else attention)
        if name in held and type(held[name]) in (bool, int, float, str, type(None)):
            yield bool(of_config), name, held[name]


def _same(found: tuple | None, right: tuple) -> bool:
    """Whether two attentions give the same, of which none gives its weights."""
    return found is not None and found[1:] == right[1:] == (None,) * (len(right) - 1) and _alike(found[0], right[0])


def head_size(attention: Any) -> int:
    """Return the features of a head of queries and keys; 0: unknown."""
    held = vars(attention).get
    return held("head_dim") or held("head_size") or held("qk_head_dim") or 0


def value_size(attention: Any) -> int:
    """Features of a head of values."""
    return getattr(attention, "v_head_dim", head_size(attention))


def heads_of_a_key(attention: Any) -> int:
    """How many heads of queries share one of keys."""
    return getattr(attention, "num_key_value_groups", 1)


def dropout_of(attention: Any) -> Any:
    """Of the scores."""
    dropout = attention.attention_dropout
    return dropout.p if isinstance(dropout, nn.Dropout) else dropout


def _attended(
    attention: Any,
    part: Part,
    cls: type[nn.Module],
    places: int,
    kind: str,
    form: Form | None = None,
    how: _Conditions = _USUAL,
    read: set[str] | None = None,
) -> tuple:
    """What the forward of a class gives of an attention whose layers give numbers of their own.

    Args:
        attention, part: as in `form_of`.
        cls: whose forward.
        places: of a head that are rotated.
        kind: of angles.
        form: of a fused one.
        how: the numbers, and the mode. Nothing is dropped.
        read: gets the names of attributes that are read, and "config." with those of the configuration.
    """
    size, groups, length = head_size(attention), heads_of_a_key(attention), how.length
    query_heads = attention.config.num_attention_heads
    widths = [query_heads * size] + 2 * [query_heads // groups * size]
    if part.of_latents:
        widths = [getattr(attention, name).out_features for name in part.merged]
    made = how.size * _numbers(1, length, sum(widths))
    probe = _on_cpu(attention)
    vars(probe)[_READ] = read
    change_class(probe, cls if read is None else mixed_class(_Watched, cls))
    outputs = dict(zip(part.merged, made.split(widths if len(part.merged) > 1 else sum(widths), -1), strict=True))
    norms = {
        name: _whole_on_cpu(each) for name, each in attention._modules.items() if each is not None and "norm" in name
    }
    vars(probe).update(_modules=norms, training=how.training, part=part, form=form)
    if read is not None:
        vars(probe)["config"] = _WatchedConfig(attention.config, read)
    if how.training and hasattr(attention, "attention_dropout"):
        whole = isinstance(attention.attention_dropout, nn.Module)
        vars(probe)["attention_dropout"] = nn.Dropout(0.0) if whole else 0.0
    vars(probe).update({name: lambda _, output=output: output.clone() for name, output in outputs.items()})
    for name in part.of_latents:
        if (layer := attention._modules.get(name)) is not None:
            heads = how.size * _numbers(1, length, layer.out_features)  # of the latent too, as far as its mean tells
            vars(probe)[name] = lambda x, heads=heads: heads + (x * _numbers(x.shape[-1])).mean(-1, keepdim=True)
    vars(probe).update({part.output: lambda x: x, "merged_product": lambda _: made.clone()})
    angles = _numbers(1, length, places // 2)
    if kind == "places":
        angles = angles.repeat(1, 1, 2)
    # scaled, as those of YaRN are: a rotation alone changes no mean square, whether norms come before it or after it
    embeddings: Any = (_SCALED * angles.cos(), _SCALED * angles.sin())
    if kind == "complex":
        embeddings = torch.polar(torch.full_like(angles, _SCALED), angles)
    mask = None
    if has_sinks(attention):
        if form is None:
            mask = torch.full((1, 1, length, length), -torch.inf, device="cpu", dtype=torch.float32).triu(1)
        else:
            embeddings = PackedEmbeddings(embeddings)
            embeddings.sequences = Sequences(torch.tensor([0, length], device="cpu", dtype=torch.int32), length)
    taken = inspect.signature(_forward_of(cls)).parameters
    positions = torch.arange(length, device="cpu", dtype=torch.int64)
    given = {"position_embeddings": embeddings, "attention_mask": mask, "cache_position": positions}
    output, weights, *rest = cls.forward(
        probe,
        torch.zeros(1, length, 4, device="cpu", dtype=torch.float32),
        **{name: each for name, each in given.items() if name in taken},
    )
    # eager attention gives its weights also where nobody asks for them
    return output, None if has_sinks(attention) else weights, *rest


def _forward_of(cls: type[nn.Module]) -> Callable:
    """The forward that transformers wrote, of its class or of a fused one."""
    return getattr(cls, "tried", (cls, cls.forward))[1]


class _WatchedConfig:
    """A configuration that notes what is read of it."""

    def __init__(self, config: Any, read: set[str]) -> None:
        self.__dict__.update(_config=config, _read=read)

    def __getattr__(self, name: str) -> Any:
        self._read.add(f"config.{name}")
        return getattr(self._config, name)


def _on_cpu(module: nn.Module) -> Any:
    """A module like this one whose own parameters have other numbers."""
    made = copy.copy(module)
    made._parameters = {
        name: None if each is None else nn.Parameter(_numbers(*each.shape)) for name, each in module._parameters.items()
    }
    return made


def _whole_on_cpu(module: nn.Module) -> Any:
    """The same, with all that is inside."""
    made = _on_cpu(module)
    made._modules = {name: _whole_on_cpu(each) for name, each in module._modules.items() if each is not None}
    return made


def _numbers(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)


def _tried(compute: Callable[..., Any], *args: Any) -> Any:
    """What is computed; None: it failed."""
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            return compute(*args)
    except FAILS:
        return None


def _alike(found: Any, right: Any) -> bool:
    if not (isinstance(found, torch.Tensor) and isinstance(right, torch.Tensor)) or found.shape != right.shape:
        return False
    largest = right.abs().max().item() if right.numel() else 0.0
    return torch.allclose(found, right, rtol=1e-4, atol=1e-6 * largest)
