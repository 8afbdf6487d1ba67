"""Parse `--plugin-option` and `--fp8-option`: `key=value` pairs for a plugin's constructor and for FP8Config."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8booster import FP8Config
from fp8booster.argument_types import WORDS, is_of, types_of
from fp8booster.config import OBJECTS, TRAINING_ALONE
from fp8booster.formats import E4M3, E5M2
from fp8booster.kernels.device import require_fp8
from fp8booster.levels import level
from fp8booster.training.parallel import PLUGINS, suggestion
from fp8booster.training.plugins import make_plugin, with_chunks

from .options import PRECISIONS, Rule, TrainOptions, above, finite, within

if TYPE_CHECKING:
    from colossalai.booster.plugin.plugin_base import Plugin

_OWN_FLAGS = {
    "use_fp8": "--precision",
    "precision": "--precision",
    "mixed_precision": "--precision",
    "stage": "--zero",
    "zero_stage": "--zero",
    "tp_size": "--tp",
    "pp_size": "--pp",
    "sp_size": "--sp",
    "ep_size": "--ep",
    "enable_sequence_parallelism": "--sp-mode",
    "sequence_parallelism_mode": "--sp-mode",
    "num_microbatches": "--micro-batches",
    "microbatch_size": "--batch",
    "enable_gradient_accumulation": "--micro-batches",
    "max_norm": "--max-norm",
    "fp8_config": "--fp8-option",
}
"""Arguments of plugins that another flag sets."""

_LONGEST = 1000
"""Characters of a value: Python's parser is no place for more."""

_FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_DTYPES = {**_FLOATS, "e4m3": E4M3, "e5m2": E5M2}

_COUNTS = (
    "reduce_bucket_size_in_m zero_bucket_size_in_m bucket_cap_mb ddp_bucket_cap_mb extra_dp_size num_model_chunks "
    "make_vocab_size_divisible_by inner_ring_size growth_interval hysteresis search_range_m hidden_dim"
)
_SCALES = "initial_scale min_scale max_scale norm_type min_chunk_size_m"
_SHARES = (
    "shard_param_frac offload_optim_frac offload_param_frac warmup_non_model_data_ratio steady_cuda_cap_ratio "
    "gpu_margin_mem_ratio"
)
_RANGES: dict[str, Rule] = {
    **dict.fromkeys(_COUNTS.split(), finite(1)),
    **dict.fromkeys(_SCALES.split(), above(0)),
    **dict.fromkeys(_SHARES.split(), within(0, 1)),
    "growth_factor": above(1),
    "backoff_factor": (lambda value: 0 < value < 1, "above 0 and below 1"),
    "max_prefetch": finite(0),
    "communication_dtype": (lambda value: value in _FLOATS.values(), WORDS[torch.dtype]),
    "placement_policy": (lambda value: value in ("static", "auto"), "static or auto"),
    "num_layers_per_stage": (lambda value: min(value, default=0) >= 1, "of at least one layer for each stage"),
}
"""What an argument's value must be, beside its type."""


_LOSS_SCALE = (
    "initial_scale",
    "min_scale",
    "max_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "hysteresis",
)
_STATIC = ("shard_param_frac", "offload_optim_frac", "offload_param_frac")
_AUTO = ("warmup_non_model_data_ratio", "steady_cuda_cap_ratio", "gpu_margin_mem_ratio")


def _why_no_effect(name: str, arguments: Mapping[str, Any], options: TrainOptions) -> str | None:
    """Return why a plugin's option changes nothing beside the others; None where it does."""
    placement = arguments.get("placement_policy", "static")
    if name in _LOSS_SCALE:
        return "it is about the loss scale of FP16, and a run computes in BF16"
    for names, policy in ((_STATIC, "static"), (_AUTO, "auto")):
        if name in names and placement != policy:
            return f"placement_policy is {placement}; give placement_policy={policy}"
    if name == "num_model_chunks" and arguments.get("pp_style", "1f1b") == "1f1b":
        return "a stage holds one piece of the model with pp_style=1f1b; give pp_style=interleaved or zbv"
    if name == "num_layers_per_stage" and options.pp == 1:
        return "there is one stage; give --pp"
    if name == "inner_ring_size" and options.sp_mode != "ring_attn":
        return "it is about rings; give --sp-mode ring_attn"
    return None


def check_plugin(options: TrainOptions) -> None:
    """Check the plugin, its options and those of FP8, whatever the machine has, before anything is started.

    Raises ValueError or TypeError for one that does not exist, and for a plugin that cannot shard the models of the
    transformers that is installed.
    """
    if options.plugin == "hybrid" or options.tp > 1:
        _require_sharding(options)
    if options.plugin_options:
        with contextlib.redirect_stderr(io.StringIO()):  # what libraries say while they are imported
            plugin_class = _plugin_class(options.plugin)
        _plugin_arguments(options, plugin_class)
    fp8_config(options.fp8_options, options.level)


def require_fp8_here(options: TrainOptions) -> None:
    """Raise ValueError for a run in FP8 where this machine's GPU has no such products."""
    if "fp8" in PRECISIONS[options.precision]:
        config = fp8_config(options.fp8_options, options.level)
        require_fp8(torch.device("cuda" if torch.cuda.is_available() else "cpu"), config.emulate, config.granularity)


def _require_sharding(options: TrainOptions) -> None:
    from fp8booster.colossal.sharding import why_not_sharded

    size = f" --tp {options.tp}" if options.plugin == "gemini" else ""
    reason = why_not_sharded(
        f"--plugin {options.plugin}{size}", "use --plugin low_level_zero, ddp or fsdp, or gemini without --tp"
    )
    if reason is not None:
        raise ValueError(reason)


def build_plugin(options: TrainOptions, use_fp8: bool, network: nn.Module) -> Plugin:
    """The plugin that the options ask for, to boost `network`.

    It may make process groups, so torch.distributed must run by then.
    """
    plugin_class = _plugin_class(options.plugin)
    arguments = _plugin_arguments(options, plugin_class)
    if use_fp8:
        arguments |= {"use_fp8": True, "fp8_config": fp8_config(options.fp8_options, options.level)}
    return make_plugin(plugin_class, options.parallel, network, options.max_norm, arguments)


def fp8_config(pairs: tuple[str, ...], level_name: str | None = None) -> FP8Config:
    """Return the configuration that the `--fp8-option` pairs ask for, in all else that of `--level`.

    A field of a field is written with a dot: `activations.saved=8-bit`.

    Raises ValueError or TypeError for a field that does not exist and for a value that is not allowed.
    """
    fields = [field.name for field in dataclasses.fields(FP8Config) if field.name != "layers"]
    arguments = parse_pairs(pairs, "--fp8-option")
    if "layers" in arguments:
        raise ValueError("FP8Config.layers is a function; it can be set in a script alone.")
    plain = {name: value for name, value in arguments.items() if "." not in name}
    if isinstance(products := plain.get("fast_accumulation"), str):
        plain["fast_accumulation"] = tuple(products.split("+")) if products else ()
    _require_known([name.partition(".")[0] for name in arguments], "FP8Config", fields)
    config = FP8Config(**plain) if level_name is None else level(level_name, **plain).config
    for name in arguments.keys() - plain.keys():
        field, _, part = name.partition(".")
        held = getattr(config, field)
        parts = [each.name for each in dataclasses.fields(held)] if field in OBJECTS and held is not None else []
        _require_known([part], f"FP8Config.{field}", parts)
        config = dataclasses.replace(config, **{field: dataclasses.replace(held, **{part: arguments[name]})})
    return config


def inference_fp8_config(pairs: tuple[str, ...]) -> FP8Config:
    """The configuration that the `--fp8-option` pairs of a command ask for that trains nothing; errors as `fp8_config`.

    Raises ValueError for a field that training alone reads, too.
    """
    for key in parse_pairs(pairs, "--fp8-option"):
        if {key, key.partition(".")[0]} & TRAINING_ALONE:
            raise ValueError(f"--fp8-option {key} is about training, and changes nothing here; leave it out.")
    return fp8_config(pairs)


def _plugin_class(name: str) -> type[Plugin]:
    import fp8booster.plugins

    return getattr(fp8booster.plugins, PLUGINS[name])


def _plugin_arguments(options: TrainOptions, plugin_class: type[Plugin]) -> dict[str, Any]:
    for pair in options.plugin_options:
        key = pair.partition("=")[0]
        if key in _OWN_FLAGS:
            raise ValueError(f"The plugin's option {key!r} is set by {_OWN_FLAGS[key]}; use that.")
    known = {
        name: argument for name, argument in _constructor_arguments(plugin_class).items() if name not in _OWN_FLAGS
    }
    arguments = parse_pairs(options.plugin_options, "--plugin-option")
    _require_known(arguments, f"The plugin {options.plugin}", known)
    for name, value in arguments.items():
        _require_value(known[name], value)
        if (reason := _why_no_effect(name, arguments, options)) is not None:
            raise ValueError(f"The plugin's option {name!r} changes nothing: {reason}, or leave it out.")
    return with_chunks(arguments, options.parallel)


def _constructor_arguments(plugin_class: type) -> dict[str, inspect.Parameter]:
    """Named arguments of a constructor, and of those above it that it passes `**kwargs` to."""
    found: dict[str, inspect.Parameter] = {}
    for ancestor in plugin_class.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = list(inspect.signature(ancestor.__init__).parameters.values())[1:]
        named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        found = {each.name: each for each in named} | found
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
    return found


def parse_pairs(pairs: Iterable[str], flag: str) -> dict[str, Any]:
    """`key=value` pairs as arguments: Python literals, names from _DTYPES, else strings.

    Raises ValueError for a pair without `=`, or with a value too long to be one, and for a key that is given twice.
    """
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{flag} {pair!r} has no '='; write it as key=value.")
        if len(text) > _LONGEST:
            raise ValueError(f"{flag} {key} has a value of {len(text)} characters; give one of at most {_LONGEST}.")
        if key in arguments:
            raise ValueError(f"{flag} {key} is given twice; give it once.")
        arguments[key] = _parse(text)
    return arguments


def _require_known(arguments: Iterable[str], owner: str, known: Collection[str]) -> None:
    for key in arguments:
        if key not in known:
            raise ValueError(f"{owner} has no option {key!r}; {suggestion(key, known)}")


def _parse(text: str) -> Any:
    if text in _DTYPES:
        return _DTYPES[text]
    try:
        return ast.literal_eval(text.title() if text in ("true", "false") else text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _require_value(argument: inspect.Parameter, value: Any) -> None:
    """Raise ValueError for a value that a constructor's argument does not take, or would take and go wrong with."""
    name = argument.name
    types = types_of(argument.annotation, argument.default)
    if not types:
        raise ValueError(f"The plugin's option {name!r} is an object of Python's; it can be set in a script alone.")
    if not any(is_of(value, each) for each in types):
        raise ValueError(
            f"The plugin's option {name!r} is {value!r}; it must be {' or '.join(WORDS[each] for each in types)}."
        )
    if value is not None and name in _RANGES and not _RANGES[name][0](value):
        raise ValueError(f"The plugin's option {name!r} is {value!r}; it must be {_RANGES[name][1]}.")
