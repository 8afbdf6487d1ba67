"""Shapes that engines refuse: vLLM and SGLang merge layers of one input, divide them among ranks, and count blocks."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fp8booster.kernels.alignment import BLOCK
from fp8booster.serving.formats import CheckpointFormat
from fp8booster.serving.layout import Layout

_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"))
"""Layers that an engine merges where a module has all of them."""

_BY_OUTPUTS = ("fc1", "c_fc", "dense_h_to_4h", "query_key_value", "q_b_proj", "kv_b_proj")
"""Further layers whose output features an engine divides among ranks."""

_BY_INPUTS = ("o_proj", "out_proj", "down_proj", "w2", "fc2", "c_proj", "dense", "dense_4h_to_h")
"""Layers whose input features an engine divides among ranks."""


def require_loadable(layout: Layout, chosen: CheckpointFormat, ranks: int | None, record: Mapping[str, Any]) -> None:
    """Raise ValueError where vLLM or SGLang would refuse a weight's shape; the sentence names the format that works.

    Args:
        layout: has the weights in FP8.
        chosen: their format; only blocks make demands on shapes.
        ranks: tensor parallel size of the engine; None: another reader, which merges and divides nothing.
        record: content of config.json, with the numbers of heads.
    """
    if ranks is not None and (type(ranks) is not int or ranks < 1):
        raise ValueError(f"engine_ranks is {ranks!r}; give the engine's tensor parallel size, or None for transformers")
    # the scale of a row or of a weight goes with its part; a block may reach from one part into the next, whose values
    # have another scale on another rank, or in another layer
    if ranks is None or chosen.granularity != "blockwise":
        return
    for name in layout.groups:
        rows, columns = layout.shapes[name]
        path, _, end = name.removesuffix(".weight").rpartition(".")
        by_inputs = end in _BY_INPUTS
        what = "input" if by_inputs else "output"
        sizes = [columns // ranks] if by_inputs else _rows_of_ranks(path, end, rows, ranks, layout.shapes, record)
        if by_inputs and ranks == 1:
            continue
        for size in sizes:
            if size % BLOCK:
                by = f", of which each of {ranks} ranks has {size}" if ranks > 1 else f" in a part of {size}"
                raise ValueError(
                    f"{name} is {[rows, columns]}{by} {what} features, and vLLM and SGLang load weights in blocks "
                    f"only in parts of multiples of {BLOCK}; use the format compressed-tensors, or engine_ranks=None "
                    "(--engine-ranks 0) for transformers, which merges and divides no layers"
                )


def _rows_of_ranks(
    path: str, end: str, rows: int, ranks: int, shapes: Collection[str], record: Mapping[str, Any]
) -> list[int]:
    """Return the output features on a rank of each part of a layer; none where an engine takes any number."""
    heads = record.get("num_attention_heads") or 1
    groups = record.get("num_key_value_heads") or heads
    # a rank has one head of keys at least: with more ranks than heads, several have the same
    of_rank = max(1, groups // ranks)
    if end in ("k_proj", "v_proj"):
        return [rows // groups * of_rank]
    if end == "qkv_proj":
        head = rows // (heads + 2 * groups)
        return [head * heads // ranks, head * of_rank]
    if end == "gate_up_proj":
        return [rows // 2 // ranks]
    merged = next((each for each in _TOGETHER if end in each), ())
    together = bool(merged) and all(f"{path}.{other}.weight" in shapes for other in merged)
    # a layer alone on one rank may end within a block, as DeepSeek-V3's latents of 576 values do
    if together or (ranks > 1 and (merged or end in _BY_OUTPUTS)):
        return [rows // ranks]
    return []
