"""`fp8booster generate`: text by a model in BF16 or in FP8, with keys and values in either."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, LogitsProcessorList

from fp8booster.cli.inference import (
    PRECISIONS,
    FoundModel,
    find_model,
    inference_config,
    inference_device,
    load_model,
    require_one_of,
)
from fp8booster.cli.train.data import load_tokenizer
from fp8booster.cli.train.model_folder import folder_config
from fp8booster.serving.key_value_cache import FP8Cache, cache_bytes

CACHES: dict[str, Callable[[], Any]] = {"bf16": lambda: None, "fp8": FP8Cache}
"""By the values of `--kv-cache`, the cache to make; None leaves the model its own."""

_NEW_TOKENS = 128  # at most, by default
_LEAST_TEMPERATURE = 1e-6  # logits that are divided by less may overflow; divided by this they choose as at 0


def continuation(
    checkpoint: Path,
    prompt: str,
    precision: str,
    fp8_options: Sequence[str],
    kv_cache: str,
    tell: Callable[[str], None],
    *,
    max_new_tokens: int | None,
    temperature: float,
    seed: int | None,
) -> str:
    """Return a prompt and the text that a model makes of it; `tell` hears what is done.

    Raises:
        ValueError: an option is not known, the prompt is empty, the model has positions for fewer tokens, or the
            checkpoint is none.
    """
    require_one_of(kv_cache, CACHES, "--kv-cache")
    require_one_of(precision, PRECISIONS, "--precision")
    if temperature != 0 and not _LEAST_TEMPERATURE <= temperature < math.inf:
        raise ValueError(
            f"--temperature is {temperature:g}; give 0, for the likeliest token always, or a number from "
            f"{_LEAST_TEMPERATURE:g} on."
        )
    if seed is not None and temperature == 0:
        raise ValueError(
            f"--seed {seed} needs sampling, and --temperature is 0; give a higher one, or leave --seed out."
        )
    if fp8_options and precision != "fp8":
        raise ValueError(f"--fp8-option is about FP8, and --precision is {precision}; leave one of them out.")
    source = find_model(checkpoint)
    device = inference_device(tell)
    tokenizer = load_tokenizer(str(source.model))
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"].to(device)
    if not ids.numel():
        raise ValueError("--prompt is empty; give some text to continue.")
    most = _new_tokens(source, ids.shape[1], max_new_tokens)
    model: Any = load_model(source, precision, inference_config(source, fp8_options), device)[0]
    # checkpoints of training have it off, which transformers would prefer to the argument of generate
    model.config.use_cache = True
    how = {"do_sample": False} if temperature == 0 else {"do_sample": True, "temperature": temperature}
    own = model.generation_config
    settings = GenerationConfig(
        max_new_tokens=most,
        bos_token_id=own.bos_token_id,
        eos_token_id=_end_tokens(tokenizer.eos_token_id, own.eos_token_id),
        pad_token_id=tokenizer.eos_token_id,
        use_cache=True,
        cache_implementation=own.cache_implementation,
        **how,
    )
    # transformers fills settings that are at their defaults from the model's own: sampling at temperature 0, penalties
    model.generation_config = settings
    torch.manual_seed(seed or 0)
    # transformers 5.24 renamed the argument, and warns about the older name
    cache = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    begin = time.perf_counter()
    # seeded just before, for loading a model may draw random numbers
    done = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        generation_config=settings,
        logits_processor=LogitsProcessorList([partial(_require_numbers, source.model)]),
        return_dict_in_generate=True,
        **{cache: CACHES[kv_cache]()},
    )
    made = done.sequences[0].tolist()
    seconds = time.perf_counter() - begin
    new = len(made) - ids.shape[1]
    tell(
        f"{new} tokens in {seconds:.1f} s; {sum(each.nbytes for each in model.parameters()) / 2**20:,.1f} MiB of "
        f"parameters, {cache_bytes(getattr(done, cache)) / 2**20:,.2f} MiB of keys and values"
    )
    return tokenizer.decode(made, skip_special_tokens=True)


def _require_numbers(model: Path, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits of a token. Raises ValueError for NaN or infinity, of which any choice would mean nothing."""
    if bool((logits.isnan() | logits.isposinf()).any()):
        raise ValueError(
            f"The logits of token {ids.shape[1] + 1} are NaN or infinite: what {model} computes overflows. "
            "Take an earlier checkpoint, or try --precision bf16."
        )
    return logits


def _end_tokens(*given: int | list[int] | None) -> list[int] | None:
    """Return all tokens that end a text: the tokenizer knows one, and a model may have learned several."""
    found = [each for ids in given if ids is not None for each in ([ids] if isinstance(ids, int) else ids)]
    return list(dict.fromkeys(found)) or None


def _new_tokens(source: FoundModel, prompt: int, asked: int | None) -> int:
    """Return the number of tokens to make. Raises ValueError where the model has positions for fewer."""
    positions = getattr(folder_config(str(source.model)), "max_position_embeddings", math.inf)
    left = positions - prompt
    if left < (asked or 1):
        remedy = f"give at most --max-new-tokens {left}" if left > 0 else "give a shorter --prompt"
        raise ValueError(
            f"--prompt has {prompt} tokens, and the model {source.model} has positions for {positions}; {remedy}."
        )
    return asked or int(min(_NEW_TOKENS, left))
