"""The model that `--model` names: a size, or a folder in Hugging Face's format, checked before ranks start."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fp8booster.checkpoints import newest_checkpoint
from fp8booster.config import FP8Config
from fp8booster.reading import read_record
from fp8booster.serving.read import load_frozen, load_model, random_frozen
from fp8booster.serving.shards import weights_of
from fp8booster.serving.stored import StoredModel, forget_quantization, is_in_fp8
from fp8booster.training.adapters import ADAPTER_FILE
from fp8booster.training.arithmetic import experts_of
from fp8booster.training.models import MODELS, SIZES, build, model_of_config, prepared
from fp8booster.training.parallel import Parallel

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_TRAINED_WITHOUT_SHIFT = ("cpmant", "xlm", "xlnet")
"""Types whose loss in transformers compares a token with its own position's output, not with that before it."""


def is_folder(model: str) -> bool:
    """Tell whether `model` names a folder rather than a size.

    Raises ValueError when it is neither a size nor a folder with a config.json.
    """
    if model in SIZES:
        return False
    if not Path(model).is_dir():
        raise ValueError(
            f"There is no model {model!r}: --model takes one of {', '.join(SIZES)} or a folder with a Hugging Face "
            "config.json."
        )
    if (Path(model) / ADAPTER_FILE).is_file() and not has_weights(model):
        raise ValueError(
            f"The folder {model} holds adapters, and no model; merge them first: fp8booster export CHECKPOINT OUT "
            "--format bf16."
        )
    if not (Path(model) / "config.json").is_file():
        saved = _saved_in(Path(model))
        remedy = f"give {saved}, which has" if saved else "save the model's config there (save_pretrained)"
        raise ValueError(f"The folder {model} has no config.json; {remedy}.")
    return True


def _saved_in(folder: Path) -> Path | None:
    """Return the model in a checkpoint, or in a run's newest one; of a run in both precisions that of FP8."""
    newest = (newest_checkpoint(folder / precision / "checkpoints") for precision in ("fp8", "bf16"))
    models = (checkpoint / "model" for checkpoint in (folder, *newest) if checkpoint is not None)
    return next((model for model in models if (model / "config.json").is_file()), None)


def has_weights(folder: str) -> bool:
    """Tell whether a folder in Hugging Face's format holds weights beside its config; errors as `weights_of`."""
    return weights_of(Path(folder)) is not None


def load_config(model: str, vocabulary: int, sequence: int) -> PretrainedConfig:
    """Return the config of a size, with embeddings for `vocabulary` tokens, or of a folder.

    Raises ValueError when the folder's model is no causal language model, or too small for the vocabulary or the
    sequence.
    """
    if is_folder(model):
        config = folder_config(model)
        # training reads no earlier keys and values, and gradient checkpointing refuses to keep them
        config.use_cache = False
    else:
        # FP8 products read features in multiples of 16, and the head makes these
        config = replace(MODELS[model], vocabulary=-(-vocabulary // 16) * 16).config(sequence)
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
    """Return the config of a folder in Hugging Face's format, without what it says of FP8 weights.

    Raises ValueError when transformers cannot read it, for weights quantized in a form that fp8booster does not read,
    and for a model that does not predict the next token of text.
    """
    import transformers
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    file = Path(folder) / "config.json"
    remedy = "it must be JSON with the model_type of a causal language model (save it with save_pretrained)"
    record = read_record(file, {}, remedy)
    _require_sizes(record, file)
    is_in_fp8(Path(folder))  # refuses other quantizations
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception:  # transformers raises many types for what it cannot parse
        if "auto_map" in record:
            raise ValueError(
                f"{file} names code of its own (auto_map), which fp8booster does not run; give a model of a type that "
                "transformers has."
            ) from None
        kind = record.get("model_type")
        if isinstance(kind, str) and kind not in CONFIG_MAPPING:
            raise ValueError(
                f"{file} is of the type {kind}, which transformers {transformers.__version__} does not know; install a "
                "release that does, or give a model of a type that it has."
            ) from None
        _require_heads(record, file)  # transformers 5 looks itself, and says less
        raise ValueError(f"{file} is not a config that transformers knows; {remedy}.") from None
    forget_quantization(config)
    experts = record.get("num_local_experts")
    if "num_experts" not in record and type(experts) is int and hasattr(config, "num_experts"):
        config.num_experts = experts  # of Qwen3-MoE, which transformers 5 writes under Mixtral's name
    if (
        type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING
        or config.is_encoder_decoder
        or config.model_type in _TRAINED_WITHOUT_SHIFT
        or not hasattr(config, "vocab_size")  # of several parts, as text and vision
    ):
        raise ValueError(
            f"The model {folder} is of the type {config.model_type}; give a causal language model, as llama or qwen2."
        )
    if _is_encoder(config):
        raise ValueError(
            f"The model {folder} is of the type {config.model_type} and an encoder: each token would see those that "
            'it is to predict. Set "is_decoder": true in its config.json to train it as a decoder, or give a causal '
            "language model, as llama or qwen2."
        )
    return config


_SIZES = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
    "max_position_embeddings",
)
"""Fields of a config that count something, under the names that transformers has for those of all models."""


_ROTARY = ("rope_theta", "rope_parameters", "partial_rotary_factor")


_COUNTED = re.compile(r"^(num|n)_|^d_(model|ff|inner|kv|state|conv)$|_(size|dim|heads|layers|experts|embeddings|rank)$")
"""Names of fields that count something, of whatever model, parts of several included."""

_MOST = tuple(
    (re.compile(pattern), most)
    for pattern, most in (
        ("layer", 2**11),
        ("expert", 2**14),
        ("hidden|dim|head|embd|d_model|rank", 2**20),
        ("", 2**27),
    )
)
"""By name, more than any model has: one is built layer by layer and expert by expert, on the host."""

_MOST_EXPERTS = 2**16
"""In all layers."""


def _require_sizes(config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for sizes below 1, or beyond those of any model."""
    for name in _SIZES:
        size = config.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{name} in {file} is {size!r}; it must be a whole number of at least 1.")
    _require_bounds(config, file)


def _require_bounds(config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for sizes beyond those of any model, in nested configs too."""
    largest: dict[int, int] = {}
    for name, size in config.items():
        if isinstance(size, dict):
            _require_bounds(size, file)
        elif _COUNTED.search(name) and isinstance(size, (int, float)):
            most = next(most for pattern, most in _MOST if pattern.search(name))
            if size > most:
                shown = size if size < 2**63 else "a number of more than 64 bits"
                raise ValueError(f"{name} in {file} is {shown}, and no model has more than {most}; correct it.")
            if isinstance(size, int):
                largest[most] = max(largest.get(most, 1), size)
    layers, experts = (largest.get(most, 1) for _, most in _MOST[:2])
    if layers * experts > _MOST_EXPERTS:
        raise ValueError(f"{file} asks for {experts} experts in {layers} layers, more than any model has; correct it.")


def _require_heads(config: Mapping[str, Any], file: Path) -> None:
    """Raise ValueError for attention heads that do not divide hidden or query sizes, with rotary embeddings."""
    heads, shared, head, hidden, theta, parameters, partial = (
        config.get(name) for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size", *_ROTARY)
    )
    if not heads or not hidden or not (theta or parameters):
        return
    if not head and hidden % heads:
        raise ValueError(
            f"hidden_size in {file} is {hidden}, which its {heads} num_attention_heads do not divide; change one."
        )
    if shared and heads % shared:
        raise ValueError(
            f"num_attention_heads in {file} is {heads}, no multiple of its {shared} num_key_value_heads; change one."
        )
    if head and head % 2 and not partial:
        raise ValueError(f"head_dim in {file} is {head}; rotary embeddings need an even one.")


def require_buildable(folder: str) -> None:
    """Raise ValueError for a folder whose config no model can be built from, or whose weights are not those of it.

    The model is built without memory for its weights, and their values are not read.
    """
    config, file = folder_config(folder), Path(folder) / "config.json"
    fields = {name: getattr(config, name, None) for name in (*_SIZES, *_ROTARY)}
    _require_sizes(fields, file)
    if "head_dim" not in read_record(file, {}, "save it again"):
        fields["head_dim"] = None  # what transformers makes of the others
    _require_heads(fields, file)
    if has_weights(folder):
        StoredModel(Path(folder), config)  # builds it too
    else:
        model_of_config(config)


def _is_encoder(config: PretrainedConfig) -> bool:
    """Tell whether the model would attend to later tokens, as BERT and its kin do without `is_decoder`."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING

    either = type(config) in MODEL_FOR_MASKED_LM_MAPPING or config.model_type == "bert-generation"
    return either and not config.is_decoder


def require_model(model: str, count: int | None) -> None:
    """Raise ValueError for a folder as `require_buildable`, and for `--checkpointed-layers` beyond the model's layers.

    It comes before text is read and ranks start, which takes minutes.
    """
    if is_folder(model):
        require_buildable(model)
        layers = getattr(folder_config(model), "num_hidden_layers", None)
    else:
        layers = MODELS[model].layers
    if None not in (count, layers) and count > layers:
        raise ValueError(f"--checkpointed-layers is {count}, and the model has {layers}; give at most as many.")


def require_shareable(config: PretrainedConfig, parallel: Parallel) -> None:
    """Raise ValueError where ranks cannot divide the model's layers, their attention heads, or its experts."""
    if parallel.ep > 1:
        experts = experts_of(config)
        if experts is None and "expert" not in str(config.to_dict()):
            raise ValueError(f"The model has no experts, which --ep {parallel.ep} would spread; leave --ep out.")
        if experts is not None and experts % parallel.ep:
            raise ValueError(
                f"The model has {experts} experts, which --ep {parallel.ep} cannot divide; give another --ep."
            )
    # the other modes of sequence parallelism leave a layer's heads on one rank
    sizes = {"--tp": parallel.tp, "--sp": parallel.sp if parallel.sp_mode == "all_to_all" else 1}
    for flag, ranks in sizes.items():
        for name in ("num_attention_heads", "num_key_value_heads"):
            heads = getattr(config, name, None)
            if heads is not None and heads % ranks:
                raise ValueError(
                    f"The model has {heads} {name.removeprefix('num_').replace('_', ' ')}, which {flag} {ranks} "
                    f"cannot divide; give another {flag}."
                )
    _require_divisible(config, parallel)


def _require_divisible(config: PretrainedConfig, parallel: Parallel) -> None:
    """Raise ValueError for a model that Colossal-AI cannot divide so, which else ranks find that have built it."""
    flags = [f"--{name} {size}" for name in ("tp", "pp", "sp") if (size := getattr(parallel, name)) > 1]
    if not flags:
        return
    with contextlib.redirect_stderr(io.StringIO()):  # what libraries say while they are imported
        from colossalai.shardformer.policies.auto_policy import get_autopolicy

        import fp8booster.plugins  # noqa: F401  which knows more models
        from fp8booster.colossal.moe.policy import MixturePolicy
    model = model_of_config(config)
    name, asked = type(model).__name__, " and ".join(flags)
    try:
        policy = get_autopolicy(model)
    except NotImplementedError:
        raise ValueError(f"Colossal-AI cannot divide a {name} among ranks; leave {asked} out.") from None
    if isinstance(policy, MixturePolicy):
        raise ValueError(
            f"Of a {name} the experts alone are divided among ranks, by --plugin moe and --ep; leave {asked} out."
        )


def build_model(
    model: str,
    config: PretrainedConfig,
    device: torch.device,
    checkpointing: bool | int,
    dtype: torch.dtype = torch.bfloat16,
    frozen: FP8Config | None = None,
    one_by_one: bool = False,
) -> PreTrainedModel:
    """Return the model in training mode: weights from the folder if it holds any, else at random.

    The random weights follow torch's seed on that kind of device, so equal seeds give equal weights on all ranks.
    Raises ValueError for weights in the folder that cannot be read, or do not fit its config.

    Args:
        model: a size or a folder.
        checkpointing: True, or the number of layers that compute their activations again in backward.
        frozen: layers keep their weights in FP8, one byte a value, and train no more; none is whole in `dtype`.
        one_by_one: draw random weights as those of frozen layers are drawn before their casts.
    """
    if not (is_folder(model) and has_weights(model)):
        if frozen is None and not one_by_one:
            return build(config, device=device, dtype=dtype, checkpointing=checkpointing)
        return prepared(random_frozen(config, frozen, device=device, dtype=dtype), checkpointing)
    if frozen is not None:
        return prepared(load_frozen(model, frozen, dtype=dtype, device=device, config=config), checkpointing)
    return prepared(load_model(model, dtype=dtype, config=config).to(device), checkpointing)
