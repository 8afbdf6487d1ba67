"""The tokenizer of a run: the one in the model's folder, or a byte-level BPE trained on the run's own text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from fp8booster.reading import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

END = "<|endoftext|>"
"""Ends every document under a trained tokenizer."""

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
_PARTS = ("merges.txt", "vocab.txt", "added_tokens.json", "spiece.model", "sentencepiece.bpe.model")


def folder_has_tokenizer(folder: str) -> bool:
    """Whether a model's folder brings its own tokenizer."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def folder_identity(folder: str) -> str:
    """Digest of the tokenizer's files in a model's folder.

    With `tokenizer.json` those that it stands for are not read.
    """
    digest = hashlib.sha256()
    parts = () if (Path(folder) / _FILES[0]).is_file() else _PARTS
    for name in (*_FILES, "tokenizer_config.json", "special_tokens_map.json", *parts):
        file = Path(folder) / name
        if file.is_file():
            digest.update(name.encode() + file.read_bytes())
    return digest.hexdigest()


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """The tokenizer kept in a folder.

    Raises ValueError when transformers cannot read it, or it has no end-of-text token to part documents with.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise many types for a file that they cannot parse
        raise ValueError(
            f"The tokenizer in {folder} cannot be read ({first_line(error)}); save it again there (save_pretrained), "
            "without code of its own."
        ) from None
    if tokenizer.eos_token_id is None:
        raise ValueError(f"The tokenizer in {folder} has no eos_token; set one and save the tokenizer again.")
    return tokenizer


def train_tokenizer(documents: Iterable[str], vocabulary: int, folder: Path) -> None:
    """Train a byte-level BPE of at most `vocabulary` tokens on the documents and keep it in `folder`.

    Byte level: every text can be encoded, with no unknown token (Radford et al., 2019, section 2.2).
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        model_input_names=["input_ids", "attention_mask"],  # decoders refuse the token types of the default
    ).save_pretrained(folder)
