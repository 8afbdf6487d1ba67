"""Exports a model, or a checkpoint of one, with the weights of its linear layers in FP8.

One tensor after the other: a file's worth of them is in memory at once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from fp8booster.config import FP8Config
from fp8booster.files import new_folder
from fp8booster.reading import read_record
from fp8booster.serving.folder import Folder, Merged
from fp8booster.serving.handover import encoded, format_of, require_exportable
from fp8booster.serving.live import Live
from fp8booster.serving.shards import ShardWriter
from fp8booster.serving.source import Source
from fp8booster.training.adapters import ADAPTER_CONFIG


@dataclass(frozen=True)
class Exported:
    """A model that was written."""

    folder: Path
    layers: int
    """Linear layers in FP8."""
    kept: tuple[str, ...]
    """Linear layers that stay in 16 bits, by their paths."""
    bytes: int
    from_masters: int
    """Weights that were cast from FP32 masters; the others from the values of the model."""
    merged: int
    """Weights that adapters were merged into."""


def export(
    model: nn.Module | str | Path,
    folder: str | Path,
    *,
    format: str = "fine-grained",
    config: FP8Config | None = None,
    masters: str | Path | None = None,
    shard_bytes: int = 5 * 2**30,
    engine_ranks: int | None = 1,
) -> Exported:
    """Write a model to a new folder, its linear layers' weights in FP8, as engines load it, or all in 16 bits.

    Those layers are in FP8 that are in training: by default not heads, embeddings, norms and routers, which are written
    in 16 bits. Of a model in FP8 those are that are in FP8 there, and keep their bytes. Adapters are merged into the
    weights that they are on, from their values in FP32. Tokenizer and generation_config.json go along.

    Args:
        model: a causal language model of transformers, whole in this process, converted or not, with adapters of peft
            or without, or the folder of one in Hugging Face's format, in 16 bits or in FP8, or of peft's adapters on
            such a folder.
        folder: appears when it is whole; it must not be there.
        format: "fine-grained", "compressed-tensors", "compressed-tensors-tensorwise", "tensorwise", or "bf16".
        config: which layers, and how their scales are rounded; None is that of a converted model's layers, or
            `FP8Config()`.
        masters: for a folder, that of the FP32 master weights which ranks saved under ZeRO, where it gathers weights in
            FP8: what it cast. None: the values in the folder are cast.
        shard_bytes: of a file, at most.
        engine_ranks: tensor parallel size of the vLLM or SGLang that will serve the model. With "fine-grained" they
            take only some shapes of merged and divided layers. None: another reader, as transformers, takes all.

    Raises:
        ValueError: the format is not known, the folder is there, the model cannot be exported or read, or an engine
            would refuse a shape.
        OSError: the disk did not take it. Nothing is left then.
    """
    chosen, folder = format_of(format), Path(folder)
    # before the model is read, which may take minutes
    if folder.exists():
        raise ValueError(f"{folder} is there already; give a folder that is not")
    source = _source_of(model, config, None if masters is None else Path(masters), in_fp8=chosen is not None)
    require_exportable(source, chosen, engine_ranks)
    # under another name until whole: an engine that watches the folder must not load half a model
    with new_folder(folder) as part:
        writer = ShardWriter(part, shard_bytes)
        for name, tensor in encoded(source, chosen):
            writer.add(name, tensor)
        writer.close()
        source.copy_files(part)
        record = {key: value for key, value in source.record().items() if key not in ("torch_dtype", "dtype")}
        record["torch_dtype"] = str(source.dtype).removeprefix("torch.")
        # transformers 4.51 writes the class that FSDP2 made of the model's, which no engine knows
        record["architectures"] = [name.removeprefix("FSDP") for name in record["architectures"]]
        # training turns the cache of keys and values off, without which engines would generate slowly
        if record.get("use_cache") is False:
            record["use_cache"] = True
        generation = part / "generation_config.json"
        settings = read_record(generation, {}, "copy the model again") if generation.is_file() else {}
        if settings.get("use_cache") is False:
            generation.write_text(json.dumps({**settings, "use_cache": True}, indent=2) + "\n")
        if chosen is not None:
            record["quantization_config"] = chosen.settings(source.layout.kept_modules)
        (part / "config.json").write_text(json.dumps(record, indent=2) + "\n")
    layout = source.layout
    return Exported(folder, len(layout.groups), layout.kept, writer.total, source.from_masters, source.merged)


def _source_of(
    model: nn.Module | str | Path, config: FP8Config | None, masters: Path | None, *, in_fp8: bool
) -> Source:
    if isinstance(model, nn.Module):
        if masters is not None:
            raise ValueError("masters go with the folder of a model; leave them out for a model in memory")
        live = Live(model, config, in_fp8=in_fp8)
        if live.is_sharded:
            raise ValueError(
                "each rank holds a part of the model; save it whole, by booster.save_model, or under FSDP2 by "
                "save_pretrained(folder, state_dict=...) with torch's get_model_state_dict, and export that folder, or "
                "hand it to an engine by fp8booster.serving.tensors"
            )
        return live
    folder = Path(model)
    if not (folder / ADAPTER_CONFIG).is_file():
        return Folder(folder, config, masters, in_fp8=in_fp8)
    if masters is not None:
        raise ValueError(f"{folder} holds adapters, which are merged as they are; leave masters out")
    return Merged(folder, config, in_fp8=in_fp8)
