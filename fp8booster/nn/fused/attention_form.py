"""The forms of attentions, which the forwards of their classes are tried out for as `nn.fused.trials` tells."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from fp8booster.kernels.operators import without_autocast
from fp8booster.nn.fused.families import Part, has_sinks
from fp8booster.nn.fused.packing import PackedEmbeddings, Sequences
from fp8booster.nn.fused.trials import are_alike, numbers, on_numbers, tried, watch
from fp8booster.nn.modules import change_class


def head_size(attention: Any) -> int:
    """Return the features of a head of queries and keys; 0: unknown."""
    held = vars(attention).get
    return held("head_dim") or held("head_size") or held("qk_head_dim") or 0


def value_size(attention: Any) -> int:
    """Return the features of a head of values."""
    return getattr(attention, "v_head_dim", head_size(attention))


def heads_of_a_key(attention: Any) -> int:
    """Return how many heads of queries share one of keys."""
    return getattr(attention, "num_key_value_groups", 1)


def dropout_of(attention: Any) -> Any:
    """Return the dropout of the scores."""
    dropout = attention.attention_dropout
    return dropout.p if isinstance(dropout, nn.Dropout) else dropout


class Rotation(NamedTuple):
    """The rotation of an attention's heads, in the words of `kernels.rope`."""

    rotates: bool = True
    interleaved: bool = False
    interleaved_angles: bool = False


ROTATIONS = (Rotation(), Rotation(True, True), Rotation(True, True, True), Rotation(False))
"""LLaMA's, GLM-4's, Command-R's, and that of layers without positions."""

ANGLES = ("places", "pairs", "complex")
"""Cos and sin for each place of a head that is rotated; for each pair of places; one complex number for each pair."""


class Form(NamedTuple):
    """The work of an attention between its products, besides to attend."""

    rotation: Rotation = Rotation()
    angles: str = "places"  # what position embeddings are: one of `ANGLES`
    grouped: bool = False  # in the product of one layer for q, k and v, those of each head of keys lie together
    outputs: int = 2  # how many things it gives: a third is the cache that it was given
    hangs_on: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    """Attributes that one of the two forwards alone reads, of the attention and of its configuration."""

    fused: bool = True  # its own forward computes the same
    normed_last: bool = False  # the norms of queries and keys come after the rotation, as in LLaMA 4

    @property
    def pairs(self) -> dict[str, bool]:
        """The rotation as functions of `nn.fused.pointwise` take it."""
        return {"interleaved": self.rotation.interleaved, "interleaved_angles": self.rotation.interleaved_angles}


def cos_and_sin(position_embeddings: Any, angles: str) -> tuple[Tensor, Tensor]:
    """Return cos and sin, [1 or B, S, R] each, for each place of a head that is rotated, pairs in halves.

    Args:
        position_embeddings: as transformers makes them.
        angles: one of `ANGLES`.
    """
    if angles == "complex":
        if isinstance(position_embeddings, tuple):
            (position_embeddings,) = position_embeddings
        position_embeddings = position_embeddings.real, position_embeddings.imag
    cos, sin = position_embeddings
    if angles == "places":
        return cos, sin
    with without_autocast(cos.device.type):
        return torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)


def is_of_form(attention: Any, form: Form) -> bool:
    """Tell whether what the form of an attention hangs on is as it was."""
    own, of_config = form.hangs_on
    return own.items() <= vars(attention).items() and of_config.items() <= vars(attention.config).items()


def form_after_changes(attention: Any, part: Part) -> Form:
    """Return the form of a fused attention whose attributes have changed: one that is not `fused` if there is none."""
    form = form_of(attention, part, type(attention))
    if form is not None:
        return form
    own, of_config = attention.form.hangs_on
    return attention.form._replace(hangs_on=_plain_attributes(attention, own, of_config), fused=False)


def _plain_attributes(
    attention: Any, own: Iterable[str], of_config: Iterable[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of these attributes, as `Form.hangs_on`, that are numbers and the like."""
    plain = (bool, int, float, str, type(None))
    places = (vars(attention), own), (vars(attention.config), of_config)
    found = [{name: held[name] for name in names if type(held.get(name, names)) in plain} for held, names in places]
    return found[0], found[1]


@on_numbers
def form_of(attention: Any, part: Part, fused: type[nn.Module]) -> Form | None:
    """Return the form of an attention; None: its own forward computes something else than that of its fused class.

    Args:
        attention: whole; fused or not.
        part: of it.
        fused: has a `merged_product` and a `form`, which the trial replaces.
    """
    native, size = cast(Any, fused).tried[0], head_size(attention)
    places = getattr(attention, "qk_rope_head_dim", getattr(attention, "rotary_ndims", size))
    for angles in ANGLES:
        # where it takes angles for parts of heads, it must rotate these alone
        trials = [_Trial(attention, part, each, angles) for each in dict.fromkeys((places, size // 2))]
        right = [trial.run(native) for trial in trials]
        if right[0] is None:
            continue
        groupings = (False, True) if len(part.merged) == 1 else (False,)
        orders = (False, True) if any("norm" in name for name in attention._modules) else (False,)
        for rotation, grouped, normed_last in product(ROTATIONS, groupings, orders):
            form = Form(rotation, angles, grouped, len(right[0]), normed_last=normed_last)
            found = [trial.run(fused, form) for trial in trials]
            if all(one is None or _same(other, one) for one, other in zip(right, found, strict=True)):
                return _watched_form(trials[0], native, fused, form)
        return None
    return None


_SCALED = 1.5
_LONG = 40
_LIMITS = ("sliding_window", "attention_chunk_size", "floor_scale")
"""Lengths from which on masks and scales are others, of which the fused forward knows."""


Read = tuple[set[str], set[str]]
"""Names of attributes that a forward reads: of the attention, and of its configuration."""


def _watched_form(trial: _Trial, native: type[nn.Module], fused: type[nn.Module], form: Form) -> Form | None:
    """Return a form that was found, with what it hangs on; None: it is another for other numbers, or in training."""
    by_native: Read = set(), set()
    by_fused: Read = set(), set()
    attention = trial.attention
    limits = [getattr(each, name, None) for each in (attention, attention.config) for name in _LIMITS]
    longest = min([_LONG, *(limit - 1 for limit in limits if isinstance(limit, int) and limit > 1)])
    for other in (replace(trial, training=True), replace(trial, size=5.0), replace(trial, length=longest)):
        right, found = other.run(native, read=by_native), other.run(fused, form, by_fused)
        if right is None or not _same(found, right):
            return None
    # what both read, the fused forward reads as it is at each call
    own, of_config = (one ^ other for one, other in zip(by_native, by_fused, strict=True))
    # but a limit, which eager attention is given and leaves to its mask
    return form._replace(hangs_on=_plain_attributes(attention, own | set(_LIMITS), of_config))


def _same(found: tuple | None, right: tuple) -> bool:
    """Tell whether two attentions give the same, of which none gives its weights."""
    return found is not None and found[1:] == right[1:] == (None,) * (len(right) - 1) and are_alike(found[0], right[0])


@dataclass(frozen=True)
class _Trial:
    """Numbers and a mode on which an attention is tried, its layers giving numbers of their own. Nothing is dropped."""

    attention: Any
    part: Part
    places: int  # of a head that are rotated
    angles: str
    length: int = 5
    size: float = 1.0  # of the numbers
    training: bool = False

    def run(self, cls: type[nn.Module], form: Form | None = None, read: Read | None = None) -> tuple | None:
        """Return what the forward of a class gives; None: it fails.

        Args:
            cls: whose forward.
            form: of a fused one.
            read: gets the names of attributes that are read.
        """
        return tried(self._attended, cls, form, read)

    def _attended(self, cls: type[nn.Module], form: Form | None, read: Read | None) -> tuple:
        probe = self._probe(form)
        change_class(probe, cls)
        if read is not None:
            vars(probe)["config"] = _WatchedConfig(self.attention.config, read[1])
            watch(probe, read[0])
        embeddings, mask = self._embeddings(), None
        if has_sinks(self.attention):
            if form is None:
                shape = 1, 1, self.length, self.length
                mask = torch.full(shape, -torch.inf, device="cpu", dtype=torch.float32).triu(1)
            else:
                boundaries = torch.tensor([0, self.length], device="cpu", dtype=torch.int32)
                embeddings = PackedEmbeddings.of(embeddings, Sequences(boundaries, self.length))
        positions = torch.arange(self.length, device="cpu", dtype=torch.int64)
        given = {"position_embeddings": embeddings, "attention_mask": mask, "cache_position": positions}
        written = getattr(cls, "tried", (cls, cls.forward))[1]  # by transformers, also where the class is fused
        taken = inspect.signature(written).parameters
        output, weights, *rest = cls.forward(
            probe,
            torch.zeros(1, self.length, 4, device="cpu", dtype=torch.float32),
            **{name: each for name, each in given.items() if name in taken},
        )
        # eager attention gives its weights also where nobody asks for them
        return output, None if has_sinks(self.attention) else weights, *rest

    def _probe(self, form: Form | None) -> Any:
        """Return an attention like this one, of small parts: its layers give parts of one product."""
        attention, part = self.attention, self.part
        probe = _on_cpu(attention, "norm")
        held = vars(probe)
        held.update(part=part, form=form, training=self.training)
        if self.training and hasattr(attention, "attention_dropout"):
            whole = isinstance(attention.attention_dropout, nn.Module)
            held["attention_dropout"] = nn.Dropout(0.0) if whole else 0.0  # two runs would drop other scores
        heads, size = attention.config.num_attention_heads, head_size(attention)
        widths = [heads * size, *2 * [heads // heads_of_a_key(attention) * size]]
        if part.of_latents:
            widths = [getattr(attention, name).out_features for name in part.merged]
        made = self.size * numbers(1, self.length, sum(widths))
        outputs = made.split(widths if len(part.merged) > 1 else sum(widths), -1)
        held["merged_product"] = lambda _: made.clone()
        for name, output in zip(part.merged, outputs, strict=True):
            held[name] = lambda _, output=output: output.clone()
        for name in part.of_latents:
            if (layer := attention._modules.get(name)) is not None:
                of_heads = self.size * numbers(1, self.length, layer.out_features)
                # of the latent too, as far as its mean tells
                held[name] = lambda x, made=of_heads: made + (x * numbers(x.shape[-1])).mean(-1, keepdim=True)
        held[part.output] = lambda x: x  # so that what attention gave is what comes out
        return probe

    def _embeddings(self) -> Any:
        """Return position embeddings, scaled as YaRN's: a rotation alone changes no mean square, wherever norms are."""
        angles = numbers(1, self.length, self.places // 2)
        if self.angles == "complex":
            return torch.polar(torch.full_like(angles, _SCALED), angles)
        angles = angles.repeat(1, 1, 2) if self.angles == "places" else angles
        return _SCALED * angles.cos(), _SCALED * angles.sin()


class _WatchedConfig:
    """A configuration that notes what is read of it."""

    def __init__(self, config: Any, read: set[str]) -> None:
        self.__dict__.update(_config=config, _read=read)

    def __getattr__(self, name: str) -> Any:
        self._read.add(name)
        return getattr(self._config, name)


def _on_cpu(module: nn.Module, part_of_name: str = "") -> Any:
    """Return a module like this one whose parameters have other numbers, with its modules whose names have a part."""
    made = copy.copy(module)
    made._parameters = {
        name: None if each is None else nn.Parameter(numbers(*each.shape)) for name, each in module._parameters.items()
    }
    made._modules = {
        name: _on_cpu(each) for name, each in module._modules.items() if each is not None and part_of_name in name
    }
    return made
