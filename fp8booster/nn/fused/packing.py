"""Packed batches: rows of several sequences, each of which attends to itself alone.

`DataCollatorWithFlattening` of transformers makes them. A model is told by `position_ids` that begin anew in each
sequence, or by where sequences begin and end, `cu_seq_lens_q`. transformers reads this in FlashAttention's package
alone (4.51) or makes a mask of tokens by tokens of it (5). Here boundaries are found once for each forward of a model,
and reach its layers with the position embeddings, which all of them get, in whatever forward an engine runs them and
in recomputation too.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from fp8booster.kernels.device import is_captured
from fp8booster.nn.fused.caches import CACHES
from fp8booster.nn.fused.families import WITH_SINKS, has_sinks, is_attention


@dataclass(frozen=True, eq=False)
class Sequences:
    """The boundaries of the sequences of a batch, its rows one behind the other."""

    boundaries: Tensor
    """[sequences + 1], int32, on the batch's device: 0, where the second begins, ..., the number of tokens."""

    longest: int  # tokens of the longest; more are allowed, which costs time alone
    are_rows: bool = False
    """Each row is a sequence: what a CUDA graph can have for good."""

    @cached_property
    def on_host(self) -> list[int]:
        """Return the boundaries; the first use waits for the device."""
        return self.boundaries.tolist()

    @staticmethod
    def of_rows(rows: int, length: int, device: torch.device) -> Sequences:
        """Return rows of so many tokens as sequences, made once: graphs read the boundaries where they lie."""
        place = rows, length, device
        made = _ROWS.get(place)
        if made is None:
            with torch.inference_mode(False):
                boundaries = torch.arange(rows + 1, device=device, dtype=torch.int32) * length
            made = Sequences(boundaries, length, are_rows=True)
            vars(made)["on_host"] = [row * length for row in range(rows + 1)]
            # what stands for a tensor, or will have values once a graph is replayed, is of this call alone
            if type(boundaries) is Tensor and not is_captured(boundaries):
                _ROWS[place] = made
        return made


_ROWS: dict[tuple[int, int, torch.device], Sequences] = {}


class PackedEmbeddings(tuple):
    """cos and sin, or what there is in their place, as transformers makes them, of sequences in a row."""

    sequences: Sequences | None = None  # it was rebuilt by something that did not know them

    @classmethod
    def of(cls, embeddings: Iterable[Any], sequences: Sequences) -> PackedEmbeddings:
        """Return embeddings that tell the sequences of their tokens."""
        made = cls(embeddings)
        made.sequences = sequences
        return made


def sequences_of(position_embeddings: tuple[Tensor, Tensor]) -> Sequences | None:
    """Return the sequences that a layer's tokens belong to; None where each row is one.

    Raises:
        ValueError: they were lost on the way to the layer.
    """
    if not isinstance(position_embeddings, PackedEmbeddings):
        return None
    if position_embeddings.sequences is None:
        raise ValueError(
            "what layers are given was rebuilt on the way to them, and the boundaries of packed sequences were lost: "
            "switch off the casting of layers' inputs, or pad the sequences"
        )
    return position_embeddings.sequences


def find_sequences(
    tokens: tuple[int, int], position_ids: Tensor, attention_mask: Tensor | None = None
) -> Sequences | None:
    """Find the sequences of a batch by positions that do not grow from one token to the next; wait for the device once.

    Args:
        tokens: rows, and tokens of each.
        position_ids: [1 or rows, tokens].
        attention_mask: None, or [rows, tokens], zero for padding; those of a cache come before these tokens.

    Returns:
        None where each row is one sequence, with padding or without.

    Raises:
        ValueError: several sequences in a row, and padding beside them.
    """
    rows, length = tokens
    positions = position_ids.cpu().expand(rows, -1)  # here the host waits, once a forward and not once a layer
    begins = torch.ones(rows, length, dtype=torch.bool, device=positions.device)
    begins[:, 1:] = positions.diff(dim=1) <= 0
    if attention_mask is not None:
        valid = attention_mask[:, -length:].cpu().bool()
        if not (begins[:, 1:] & valid[:, 1:] & valid[:, :-1]).any():
            return None
        if not valid.all():
            raise ValueError(
                "position_ids begin anew within a row, which packs several sequences, and attention_mask has padding; "
                "leave the mask out: padding needs none as one more sequence whose labels are -100"
            )
    places = begins.flatten().nonzero().flatten().tolist()
    return None if len(places) == rows else _sequences([*places, rows * length], position_ids.device)


def checked_sequences(
    tokens: tuple[int, int], boundaries: Tensor, longest: int | None, device: torch.device
) -> Sequences:
    """Return sequences whose boundaries a caller gives.

    Args:
        tokens: rows, and tokens of each.
        boundaries: as `cu_seq_lens_q` of transformers.
        longest: as `max_length_q`. If it is given, the batch is one row, and boundaries are on a GPU, they are not
            looked at, which would wait for it.
        device: the batch's.

    Raises:
        ValueError: boundaries that do not divide the batch's tokens into sequences, each within a row.
    """
    if boundaries.dim() != 1 or boundaries.is_floating_point():
        raise ValueError(
            f"cu_seq_lens_q is {boundaries.dtype} with {boundaries.dim()} dimensions; give the integers 0, where the "
            "second sequence begins, ..., the number of tokens"
        )
    rows, length = tokens
    if longest is not None and rows == 1 and boundaries.is_cuda:  # the caller knows all that the host must know
        return Sequences(boundaries.to(device, torch.int32), int(longest))
    found = boundaries.tolist()
    ordered = all(begin <= end for begin, end in pairwise(found))
    whole = set(range(0, rows * length + 1, length)) <= set(found)
    if not (ordered and whole and found[0] == 0 and found[-1] == rows * length):
        raise ValueError(
            f"cu_seq_lens_q is {found} for {rows} rows of {length} tokens; give 0, where the second sequence begins, "
            f"..., {rows * length}, with the end of each row among them"
        )
    return _sequences(found, device)


def _sequences(boundaries: list[int], device: torch.device) -> Sequences:
    longest = max(end - begin for begin, end in pairwise(boundaries))
    return Sequences(torch.tensor(boundaries, dtype=torch.int32, device="cpu").to(device), longest)


def positions_in(sequences: Sequences, tokens: tuple[int, int]) -> Tensor:
    """Return the position of each token in its sequence, [rows, tokens]."""
    place = torch.arange(tokens[0] * tokens[1], device=sequences.boundaries.device, dtype=torch.int32)
    sequence = torch.searchsorted(sequences.boundaries, place, right=True) - 1
    return (place - sequences.boundaries[sequence]).long().view(tokens)


class _Thread(threading.local):
    """State of one thread: threads may share a model."""

    def __init__(self) -> None:
        # those of its batch, by the model's packing
        self.sequences: weakref.WeakKeyDictionary[Packing, Sequences | None] = weakref.WeakKeyDictionary()


_thread = _Thread()


class Packing:
    """The sequences of the batch that a model computes now."""

    def __init__(self) -> None:
        self.reaches_all = True  # every attention of the model is fused, which alone reads `sequences_of`
        # attentions are told that each row is a sequence, as those with sinks are, which take no mask
        self.tells_rows = False
        self._fused: list[Any] = []  # attentions
        # the modules that hold attentions, and what they held; empty: it is of a copy, whose modules are others
        self._seen: list[tuple[nn.Module, tuple[nn.Module | None, ...]]] | None = None

    def __reduce__(self) -> tuple:
        return type(self), (), {**vars(self), "_fused": [], "_seen": []}

    def look(self, model: nn.Module) -> None:
        """Look which attentions of a model are fused."""
        attentions = {each for each in model.modules() if is_attention(each)}
        self._fused = [each for each in attentions if hasattr(each, "takes_rows")]
        # an attention without parameters is held by another stage of a pipeline
        unfused = (each for each in attentions if not hasattr(each, "attend_packed"))
        self.reaches_all = all(next(each.parameters(), None) is None for each in unfused)
        self.tells_rows = self.reaches_all and any(map(has_sinks, attentions))
        holders = (each for each in model.modules() if not attentions.isdisjoint(each.modules()))
        self._seen = [(each, tuple(each._modules.values())) for each in holders if each not in attentions]

    def _is_as_seen(self) -> bool:
        """Tell whether none of the attentions was replaced since, nor what holds them."""
        return self._seen != [] and all(
            len(module._modules) == len(held) and all(map(is_, module._modules.values(), held))
            for module, held in self._seen or ()
        )

    @property
    def sequences(self) -> Sequences | None:
        """Those of this thread's batch; None where each row is one."""
        return _thread.sequences.get(self)

    def before_model(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        """Take boundaries out of what the model is given, as a forward pre-hook; None where no row is packed."""
        given = dict(zip(inspect.signature(model.forward).parameters, args, strict=False)) | kwargs if args else kwargs
        packed = _given_sequences(given)
        if (packed is not None or self.tells_rows) and not self._is_as_seen():
            self.look(model)
        tells_rows = packed is None and self.tells_rows and all(each.takes_rows for each in self._fused)
        sequences = _rows(model, given) if tells_rows else packed
        _thread.sequences[self] = sequences
        if sequences is None:
            return None
        if not self.reaches_all:
            raise ValueError(
                "rows hold several sequences, and some attention of the model is not fused, which would let them "
                "attend to each other; the line that fuse() returns says why; pad the sequences instead"
            )
        given = {name: value for name, value in given.items() if name not in _BOUNDARIES}
        if packed is not None and given.get("position_ids") is None:
            given["position_ids"] = positions_in(sequences, _tokens(given)[0])
        given["attention_mask"] = None
        is_body = hasattr(model, "rotary_emb") and "forward" not in vars(model)
        if is_body and hasattr(sys.modules.get(type(model).__module__), "create_causal_mask"):
            # in place of one of tokens by tokens, which this version would make; no layer reads it
            given["attention_mask"] = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=sequences.boundaries.device)
        return (), given

    def before_wrapper(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        """Give a model inside one that takes no boundaries positions in their place, as a forward pre-hook."""
        return None if kwargs.get("cu_seq_lens_q") is None else self.before_model(model, args, kwargs)

    def after_model(self, *_: Any) -> None:
        """Forget, as a forward hook: what runs layers of the model by hand later has its own sequences."""
        _thread.sequences[self] = None

    def after_rotary(self, rotary: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Let position embeddings tell the sequences, as a forward hook of what makes them."""
        if self.sequences is None:
            return output
        # a tuple of a class of its own: layers are handed it whole, also by checkpointing, FSDP and pipelines
        return PackedEmbeddings.of((output,) if isinstance(output, Tensor) else output, self.sequences)

    def follow(self, module: nn.Module, before: Callable) -> None:
        """Know the sequences of a module's batch, as a hook finds them, as long as its forward runs."""
        module.register_forward_pre_hook(before, with_kwargs=True)
        module.register_forward_hook(self.after_model, always_call=True)  # also where the forward raises


_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What transformers calls them."""


def _given_sequences(given: dict[str, Any]) -> Sequences | None:
    """Return the sequences of what a model is given, by name."""
    boundaries, position_ids = given.get("cu_seq_lens_q"), given.get("position_ids")
    mask = given.get("attention_mask")
    if boundaries is None:
        if position_ids is None or position_ids.dim() != 2 or position_ids.shape[1] == 1:
            return None
        if mask is not None and (not isinstance(mask, Tensor) or mask.dim() != 2):
            return None  # a mask of queries by keys has the last word
        (rows, _), _ = _tokens(given)
        return find_sequences((rows, position_ids.shape[1]), position_ids, mask)
    keys = given.get("cu_seq_lens_k")
    if keys is not None and _differ(boundaries, keys):
        raise ValueError(
            "cu_seq_lens_q and cu_seq_lens_k differ; queries and keys are of the same sequences here; give the same "
            "boundaries as both, or cu_seq_lens_q alone"
        )
    if mask is not None and (mask.dim() != 2 or not mask.all()):
        raise ValueError("cu_seq_lens_q packs several sequences in a row, which takes no attention_mask; leave it out")
    if given.get("hidden_states") is not None:
        raise ValueError("a pipeline cuts batches by rows, and cu_seq_lens_q has none; give position_ids in its place")
    tokens, device = _tokens(given)
    return checked_sequences(tokens, boundaries, given.get("max_length_q"), device)


def _differ(queries: Tensor, keys: Tensor) -> bool:
    """Tell whether the boundaries of queries and keys differ, as far as is known without waiting for a GPU.

    Values on a GPU are not compared: there boundaries of the same number pass, and those of queries hold for keys too.
    """
    if queries is keys:
        return False
    if queries.shape != keys.shape:
        return True
    return not (queries.is_cuda or keys.is_cuda) and bool((queries != keys).any())


def _tokens(given: dict[str, Any]) -> tuple[tuple[int, int], torch.device]:
    """Return rows and the tokens of each, and their device."""
    for name in ("input_ids", "inputs_embeds", "hidden_states"):
        if given.get(name) is not None:
            rows, length = given[name].shape[:2]
            return (rows, length), given[name].device
    raise ValueError("a model needs input_ids or inputs_embeds; give one of them")


def _rows(model: nn.Module, given: dict[str, Any]) -> Sequences | None:
    """Return each row of what a model is given in training, where its attentions need nothing else of it."""
    config: Any = model.config
    asks = given.get("output_attentions") or getattr(config, "output_attentions", False)
    held = [given.get(name) for name in ("attention_mask", "is_causal", *CACHES)]
    if not model.training or asks or any(each is not None for each in held):
        return None
    if config._attn_implementation != WITH_SINKS:
        return None
    (rows, length), device = _tokens(given)
    return Sequences.of_rows(rows, length, device)


def let_pack(model: nn.Module) -> None:
    """Let the layers of a model know the sequences of a batch, by hooks, if it makes position embeddings.

    Args:
        model: whose `rotary_emb` makes them for its layers, and another of its kind for layers with a window; it comes
            after those inside it.
    """
    makers = [each for name, each in model.named_children() if name.startswith("rotary_emb")]
    if not makers:
        _let_wrapper_pack(model)
        return
    packing = model.__dict__.get(_PACKING)
    if packing is None:
        packing = model.__dict__[_PACKING] = Packing()
        packing.follow(model, packing.before_model)
        for rotary in makers:
            rotary.register_forward_hook(packing.after_rotary)
    packing.look(model)


def _let_wrapper_pack(model: nn.Module) -> None:
    """Let a model around one that `let_pack` saw know boundaries that it would not hand on, as StableLM's of 4.51."""
    for child in model.children():
        packing = vars(child).get(_PACKING)
        taken = inspect.signature(type(child).forward).parameters.values()
        if packing is None or any(each.kind is each.VAR_KEYWORD for each in taken) or _WRAPS in model.__dict__:
            continue
        model.__dict__[_WRAPS] = True
        packing.follow(model, packing.before_wrapper)


def let_pack_around(model: nn.Module) -> None:
    """Let a model that `let_pack` saw be told by a module whose forward runs it without calling it."""
    for module in model.modules():
        packing = vars(getattr(module, "model", module)).get(_PACKING)
        if packing is not None and _PACKING not in module.__dict__:
            packing.follow(module, packing.before_model)


def why_not_packed(model: nn.Module) -> str | None:
    """Return why a model would refuse packed batches, or not see them; None where it keeps their sequences apart."""
    found = [module.__dict__[_PACKING] for module in model.modules() if _PACKING in module.__dict__]
    if not found:
        return "the model's attention is not fused"
    return None if all(packing.reaches_all for packing in found) else "some of the model's attentions are not fused"


_PACKING = "_fp8booster_packing"
_WRAPS = "_fp8booster_wraps_packing"
