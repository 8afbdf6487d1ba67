"""Models of transformers from the tensors of a folder, all of which they have: none is drawn, and none is dropped.

transformers fills what a folder lacks with random numbers, and leaves out what it holds besides. What it renames,
stacks, ties and ignores differs from version to version, and so it is asked: it loads the model from tensors without
memory, and tells what was missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8booster.listing import first_of
from fp8booster.reading import first_line
from fp8booster.serving.formats import UNUSED_SCALES
from fp8booster.serving.layout import skeleton
from fp8booster.serving.shards import Shards
from fp8booster.training.models import attention_of, causal_lm

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_SHOWN = 3
"""Names in a sentence."""


def whole_shards(folder: Path, config: PretrainedConfig, *, in_fp8: bool) -> Shards:
    """Return the tensors of a folder, which are those of the model that transformers builds from a config.

    A tied weight is there once.

    Args:
        folder: in Hugging Face's format.
        config: of the model in 16 bits.
        in_fp8: whether weights have scales beside them.

    Raises:
        ValueError: the folder holds no weights, or damaged ones, lacks tensors of the model, or holds others, some of
            other shapes, or numbers that are no weights.
    """
    shards = Shards(folder)
    model = skeleton(config)
    scales = shards.scales() if in_fp8 else {}
    _drop_tied(shards, model, scales)
    found = {name: shards.dtype(name) for name in weights_among(shards, scales)}
    counts = {name: value.dtype for name, value in _named(model) if not value.is_floating_point()}
    tensors = {
        name: torch.empty(shards.shape(name), dtype=counts.get(name, torch.bfloat16), device="meta") for name in found
    }
    load_tensors(config, tensors, torch.bfloat16, folder, without_memory=True)
    no_weights = [name for name, dtype in found.items() if not dtype.is_floating_point and name not in counts]
    if no_weights:  # unless they are what transformers ignores, the model lacks them
        try:
            rest = {name: value for name, value in tensors.items() if name not in no_weights}
            load_tensors(config, rest, torch.bfloat16, folder, without_memory=True)
        except ValueError:
            kinds = [f"{name} as {found[name]}" for name in no_weights]
            raise ValueError(
                f"{folder} holds {first_of(kinds, shown=_SHOWN)}, and weights are floating-point numbers; copy the "
                "model again, or give another."
            ) from None
    return shards


def weights_among(shards: Shards, scales: Mapping[str, str]) -> list[str]:
    """Return the names of all tensors but those that are scales.

    Args:
        shards: a folder's.
        scales: by the names of weights; empty in 16 bits.
    """
    unused = UNUSED_SCALES if scales else ()
    of_weights = set(scales.values())
    return [name for name in shards.names if name not in of_weights and not name.endswith(unused)]


def load_tensors(
    config: PretrainedConfig,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    folder: Path,
    *,
    without_memory: bool = False,
) -> PreTrainedModel:
    """Return a causal language model of some tensors, in evaluation mode, with torch's SDPA if it has that.

    Args:
        config: of the model in 16 bits.
        tensors: by their names in files.
        dtype: of the model's parameters.
        folder: where they are from, for errors.
        without_memory: the model is not to be run, and neither it nor the tensors have values.

    Raises:
        ValueError: the model has tensors that are not there, or has not all that are there, or has other shapes.
    """
    kind, place = causal_lm(config), {"device_map": {"": "meta"}} if without_memory else {}
    if without_memory:  # of what is missing too, which transformers would draw on the host
        kind = type(kind.__name__, (kind,), {"__module__": kind.__module__, "_init_weights": lambda self, module: None})
    with _quiet():
        try:
            model, found = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(tensors),
                torch_dtype=dtype,
                attn_implementation=attention_of(config),
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **place,
            )
        except RuntimeError as error:  # of tensors that are to be stacked, as experts
            raise ValueError(
                f"The weights in {folder} do not fit its config.json ({first_line(error)}); save both again, together."
            ) from None
    missing, extra, others = (
        sorted(map(_name, found[f"{kind}_keys"])) for kind in ("missing", "unexpected", "mismatched")
    )
    if others:
        raise ValueError(
            f"The weights in {folder} do not fit its config.json (size mismatch of {first_of(others, shown=_SHOWN)}); "
            "save both again, together."
        )
    if missing:
        raise ValueError(f"{folder} lacks {first_of(missing, shown=_SHOWN)}; copy the model again.")
    if extra:
        raise ValueError(
            f"{folder} holds {first_of(extra, shown=_SHOWN)}, which the model of its config.json has not; give the "
            "config.json that belongs to the weights."
        )
    return model


def _name(key: Any) -> str:
    """Some versions give shapes with a name."""
    return key if isinstance(key, str) else str(key[0])


def _drop_tied(shards: Shards, model: torch.nn.Module, scales: Mapping[str, str]) -> None:
    """Leave one of the names of a tied weight. Raises ValueError where its values differ: one would be dropped."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in shards:
            names.setdefault(id(parameter), []).append(name)
    for first, *others in names.values():
        for other in others:
            alike = not {first, other} & scales.keys() and torch.equal(shards.tensor(first), shards.tensor(other))
            if not alike:
                raise ValueError(
                    f"{first} and {other} in {shards.folder} differ, and its config.json makes them one weight; set "
                    "tie_word_embeddings to false there, or copy the model again."
                )
            shards.drop(other)


def _named(model: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave the sentences to errors: transformers draws progress bars and tables."""
    from transformers.utils import logging

    before, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if bars:
            logging.enable_progress_bar()
