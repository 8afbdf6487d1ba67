"""What classes of transformers compute, tried out on small numbers before they are fused.

Families and versions say the same by other names, and something else by the same: here only what comes out counts. A
trial runs the forward of a class, in FP32 on the CPU, on a module that has its attributes and small parts.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from fp8booster.nn.fused.families import Part, has_sinks
from fp8booster.nn.fused.packing import PackedEmbeddings, Sequences
from fp8booster.nn.modules import cached_by_class

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


@cached_by_class
@_computes
def norm_of(cls: type[nn.Module], *heads: int) -> Norm | None:
    """What a class of norms of the last dimension computes; None: something else.

    Args:
        cls: of norms.
        heads: how many rows its weight has, one for each head; left out, it has one dimension.
    """
    x, weight, bias = _numbers(4, *heads, 8), _numbers(*heads, 8), _numbers(*heads, 8).flip(0)
    for epsilon in ("variance_epsilon", "eps"):
        probe = cls.__new__(cls)
        nn.Module.__init__(probe)
        vars(probe).update({epsilon: 0.25, "weight": weight, "normalized_shape": (*heads, 8)})
        if issubclass(cls, nn.LayerNorm):
            probe.bias = nn.Parameter(bias)
        else:
            bias = torch.zeros_like(bias)
        found = _tried(cls.forward, probe, x)
        for centered in (False, True):
            values = x - centered * x.mean(-1, keepdim=True)
            normal = values * (values.square().mean(-1, keepdim=True) + 0.25).rsqrt()
            for unit_offset in (False,) if centered else (False, True):
                if _alike(found, normal * (unit_offset + weight) + bias):
                    return Norm(centered, unit_offset, epsilon)
            if _alike(found, normal):
                return Norm(centered, False, epsilon, weighted=False)
    return None


def activation_name(block: nn.Module) -> str | None:
    """What a feed-forward block calls its activation; None: it has none under a name that is known."""
    return next((name for name in _ACTIVATIONS if name in block._modules), None)


_ACTIVATIONS = ("act_fn", "activation_fn", "act")


@_computes
def activation_kind(activation: nn.Module) -> str | None:
    """What an activation computes, as `pointwise.activate` calls it; None: something else."""
    key = type(activation), repr(activation)
    if key not in _KINDS:
        x = 2 * _numbers(4, 8)
        found = _tried(activation, x)
        _KINDS[key] = next((kind for kind, compute in _ACTIVATED.items() if _alike(found, compute(x))), None)
    return _KINDS[key]


_KINDS: dict[tuple[type, str], str | None] = {}
_ACTIVATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}


@_computes
def gate_kind(gate: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """What a function of gate and up, [M, 2 F], computes, as `pointwise.activate_gated` calls it.

    Args:
        gate: its parts may be interleaved, clamped or changed otherwise: then it is None.
    """
    x = torch.cat([2 * _numbers(4, 8), 1e3 * _numbers(4, 8)])  # large ones too, which may be clamped
    first, second = x.chunk(2, -1)
    found = _tried(gate, x)
    return next((kind for kind, compute in _ACTIVATED.items() if _alike(found, compute(first) * second)), None)


@cached_by_class
@_computes
def is_gated(cls: type[nn.Module], part: Part) -> bool:
    """Whether a class of feed-forward blocks computes `output(activation(gate) * up)`, gate first."""
    probe = cls.__new__(cls)
    nn.Module.__init__(probe)
    x = _numbers(3, 8)
    layers: list[Callable] = [lambda x: 2 * x, lambda x: 3 * x]
    if len(part.merged) == 1:
        layers = [lambda x: torch.cat([2 * x, 3 * x], -1)]
    vars(probe).update(zip(part.merged, layers, strict=True))
    vars(probe).update(dict.fromkeys(_ACTIVATIONS, F.silu) | {part.output: lambda x: 5 * x})
    return _alike(_tried(cls.forward, probe, x), 5 * (F.silu(2 * x) * 3 * x))


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
    """The form of an attention; None: its own forward computes something else than that of its fused class.

    Args:
        attention: not fused yet, whole.
        part: of it.
        fused: has a `merged_product` and a `form`, which the trial replaces.
    """
    size = head_size(attention)
    places = getattr(attention, "qk_rope_head_dim", getattr(attention, "rotary_ndims", size))
    for angles in ANGLES:
        # where it takes angles for parts of heads, it must rotate these alone
        right = {
            each: _tried(_attended, attention, part, type(attention), each, angles) for each in (places, size // 2)
        }
        if right[places] is None:
            continue
        for rotation, grouped in product(ROTATIONS, (False, True) if len(part.merged) == 1 else (False,)):
            form = Form(rotation, angles, grouped, len(right[places]))
            found = {each: _tried(_attended, attention, part, fused, each, angles, form) for each in right}
            if all(right[each] is None or _same(found[each], right[each]) for each in right):
                return form
        return None
    return None


def _same(found: tuple | None, right: tuple) -> bool:
    """Whether two attentions give the same, of which none gives its weights."""
    return found is not None and found[1:] == right[1:] == (None,) * (len(right) - 1) and _alike(found[0], right[0])


def head_size(attention: Any) -> int:
    """Features of a head of queries and keys; 0: unknown."""
    return next((size for name in _HEAD_SIZES if (size := getattr(attention, name, 0))), 0)


_HEAD_SIZES = ("head_dim", "head_size", "qk_head_dim")


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
    attention: Any, part: Part, cls: type[nn.Module], places: int, kind: str, form: Form | None = None
) -> tuple:
    """What the forward of a class gives of an attention whose layers give numbers of their own.

    Args:
        attention, part: as in `form_of`.
        cls: whose forward.
        places: of a head that are rotated.
        kind: of angles.
        form: of a fused one.
    """
    size, groups = head_size(attention), heads_of_a_key(attention)
    query_heads = attention.config.num_attention_heads
    widths = [query_heads * size] + 2 * [query_heads // groups * size]
    if part.of_latents:
        widths = [getattr(attention, name).out_features for name in part.merged]
    made = _numbers(1, 5, sum(widths))
    probe = _on_cpu(attention)
    probe.__class__ = cls
    outputs = dict(zip(part.merged, made.split(widths if len(part.merged) > 1 else sum(widths), -1), strict=True))
    norms = {
        name: _whole_on_cpu(each) for name, each in attention._modules.items() if each is not None and "norm" in name
    }
    vars(probe).update(_modules=norms, training=False, part=part, form=form)
    vars(probe).update({name: lambda _, output=output: output.clone() for name, output in outputs.items()})
    for name in part.of_latents:
        if (layer := attention._modules.get(name)) is not None:
            heads = _numbers(1, 5, layer.out_features)  # of the latent too, as far as its mean tells
            vars(probe)[name] = lambda x, heads=heads: heads + (x * _numbers(x.shape[-1])).mean(-1, keepdim=True)
    vars(probe).update({part.output: lambda x: x, "merged_product": lambda _: made.clone()})
    angles = _numbers(1, 5, places // 2)
    if kind == "places":
        angles = angles.repeat(1, 1, 2)
    embeddings: Any = (angles.cos(), angles.sin())
    if kind == "complex":
        embeddings = torch.polar(torch.ones_like(angles), angles)
    mask = None
    if has_sinks(attention):
        if form is None:
            mask = torch.full((1, 1, 5, 5), -torch.inf, dtype=torch.float32, device="cpu").triu(1)
        else:
            embeddings = PackedEmbeddings(embeddings)
            embeddings.sequences = Sequences(torch.tensor([0, 5], dtype=torch.int64, device="cpu"), 5)
    taken = inspect.signature(type(attention).forward).parameters
    given = {
        "position_embeddings": embeddings,
        "attention_mask": mask,
        "cache_position": torch.arange(5, dtype=torch.int64, device="cpu"),
    }
    output, weights, *rest = cls.forward(
        probe,
        torch.zeros(1, 5, 4, dtype=torch.float32, device="cpu"),
        **{name: each for name, each in given.items() if name in taken},
    )
    # eager attention gives its weights also where nobody asks for them
    return output, None if has_sinks(attention) else weights, *rest


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
    return torch.allclose(found, right, rtol=1e-4, atol=1e-5)
