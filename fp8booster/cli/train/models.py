"""The models that can be trained: LLaMA sizes by name, or a folder in Hugging Face's format."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TRAINED_WITHOUT_SHIFT = ("cpmant", "xlm", "xlnet")
"""Types whose loss in transformers compares a token with its own position's output, not with that before it."""

_WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


@dataclass(frozen=True, kw_only=True)
class Size:
    """Shape of a LLaMA model."""

    hidden: int
    feed_forward: int
    layers: int
    heads: int
    key_value_heads: int
    vocabulary: int
    sequence: int
    """Longest sequence the positions are meant for."""


SIZES = {
    "tiny": Size(
        hidden=256, feed_forward=688, layers=4, heads=4, key_value_heads=4, vocabulary=4096, sequence=2048
    ),
    "100m": Size(
        hidden=768,
        feed_forward=2048,
        layers=10,
        heads=12,
        key_value_heads=12,
        vocabulary=32000,
        sequence=4096,
    ),
    "1b": Size(
        hidden=2048,
        feed_forward=5632,
        layers=22,
        heads=32,
        key_value_heads=4,
        vocabulary=32000,
        sequence=4096,
    ),
    # The three below: Touvron et al., LLaMA 2, arXiv 2307.09288.
    "7b": Size(
        hidden=4096,
        feed_forward=11008,
        layers=32,
        heads=32,
        key_value_heads=32,
        vocabulary=32000,
        sequence=4096,
    ),
    "13b": Size(
        hidden=5120,
        feed_forward=13824,
        layers=40,
        heads=40,
        key_value_heads=40,
        vocabulary=32000,
        sequence=4096,
    ),
    "70b": Size(
        hidden=8192,
        feed_forward=28672,
        layers=80,
        heads=64,
        key_value_heads=8,
        vocabulary=32000,
        sequence=4096,
    ),
}


def is_folder(model: str) -> bool:
    """Whether `model` names a folder rather than a size.

    Raises ValueError when it is neither a size nor a folder with a config.json.
    """
    if model in SIZES:
        return False
    if not Path(model).is_dir():
        raise ValueError(
            f"There is no model {model!r}: --model takes one of {', '.join(SIZES)} or a folder with a Hugging Face "
            "config.json."
        )
    if not (Path(model) / "config.json").is_file():
        raise ValueError(
            f"The folder {model} has no config.json; save the model's config there (save_pretrained)."
        )
    return True


def has_weights(folder: str) -> bool:
    """Whether a folder in Hugging Face's format holds weights beside its config."""
    return any((Path(folder) / name).is_file() for name in _WEIGHT_FILES)


def load_config(model: str, vocabulary: int, sequence: int) -> PretrainedConfig:
    """The config of a size, with embeddings for `vocabulary` tokens, or of a folder.

    Raises ValueError when the folder's model is no causal language model, or too small for the vocabulary or the
    sequence.
    """
    from transformers import LlamaConfig

    if is_folder(model):
        config = folder_config(model)
        config.use_cache = False
    else:
        size = SIZES[model]
        config = LlamaConfig(
            hidden_size=size.hidden,
            intermediate_size=size.feed_forward,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.key_value_heads,
            vocab_size=round_up(vocabulary, 16),
            max_position_embeddings=max(size.sequence, sequence),
            use_cache=False,
            tie_word_embeddings=False,
        )
    if config.vocab_size < vocabulary:
        raise ValueError(
            f"The tokenizer has {vocabulary} tokens and the model {model} only {config.vocab_size} embeddings; "
            "use the tokenizer that belongs to the model, or a smaller --vocabulary."
        )
    if getattr(config, "max_position_embeddings", sequence) < sequence:
        raise ValueError(
            f"--sequence is {sequence}, and the model {model} has positions for {config.max_position_embeddings}; "
            "give a shorter one."
        )
    return config


def folder_config(folder: str) -> PretrainedConfig:
    """The config of a folder in Hugging Face's format.

    Raises ValueError when transformers cannot read it, and for a model that does not predict the next token of text.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError):
        raise ValueError(
            f"{Path(folder) / 'config.json'} is not a config that transformers knows; it must be JSON with the "
            "model_type of a causal language model (save it by save_pretrained)."
        ) from None
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or config.is_encoder_decoder
        or config.model_type in _TRAINED_WITHOUT_SHIFT
        or not hasattr(config, "vocab_size")  # of several parts, as text and vision
    ):
        raise ValueError(
            f"The model {folder} is of the type {config.model_type}; give a causal language model, as llama or "
            "qwen2."
        )
    if _is_encoder(config):
        raise ValueError(
            f"The model {folder} is of the type {config.model_type} and an encoder: each token would see those that "
            'it is to predict. Set "is_decoder": true in its config.json to train it as a decoder, or give a causal '
            "language model, as llama or qwen2."
        )
    return config


def _is_encoder(config: PretrainedConfig) -> bool:
    """Whether transformers would build a model that attends to later tokens, BERT's kin without `is_decoder`."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    either = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type == "bert-generation"
    return either and not config.is_decoder


def require_divisible_heads(config: PretrainedConfig, ranks: int, flag: str) -> None:
    """Raise ValueError where `ranks`, which `flag` gives, cannot divide the attention heads among them."""
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, name, None)
        if heads is not None and heads % ranks:
            raise ValueError(
                f"The model has {heads} {name.removeprefix('num_').replace('_', ' ')}, which {flag} {ranks} cannot "
                f"divide; give another {flag}."
            )


def build_model(
    model: str,
    config: PretrainedConfig,
    device: torch.device,
    checkpointing: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> PreTrainedModel:
    """The model on `device`, in training mode: weights from the folder if it holds any, else at random.

    The random weights follow torch's seed on that kind of device, so equal seeds give equal weights on all ranks.
    Raises ValueError when the folder's weights cannot be read, or do not fit its config.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM

    if is_folder(model) and has_weights(model):
        try:
            network = AutoModelForCausalLM.from_pretrained(
                model, config=config, torch_dtype=dtype, attn_implementation="sdpa", local_files_only=True
            )
        except SafetensorError as error:
            raise ValueError(
                f"The weights in {model} cannot be read ({error}); copy or save them again."
            ) from None
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            raise ValueError(
                f"The weights in {model} do not fit its config.json ({str(error).splitlines()[-1].strip()}); save both "
                "again, together."
            ) from None
        network = network.to(device)
    else:
        with device:
            network = AutoModelForCausalLM.from_config(config, torch_dtype=dtype, attn_implementation="sdpa")
    if checkpointing:
        network.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return network.train()


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple
