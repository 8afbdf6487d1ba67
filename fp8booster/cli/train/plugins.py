"""The plugins that `--plugin` names, and what `--plugin-option` and `--fp8-option` set."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import io
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fp8booster import FP8Config
from fp8booster.formats import E4M3, E5M2
from fp8booster.kernels.device import require_fp8
from fp8booster.training.parallel import PLUGINS, suggestion
from fp8booster.training.plugins import make_plugin, with_chunks

from .options import PRECISIONS, TrainOptions
from .plugin_options import require_value

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

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": E4M3, "e5m2": E5M2}


def check_plugin(options: TrainOptions) -> None:
    """Check the plugin, its options and those of FP8 before anything is started.

    Raises ValueError or TypeError for one that does not exist, for a plugin that cannot shard the models of the
    transformers that is installed, and for FP8 on a GPU that has no FP8 products.
    """
    if options.plugin == "hybrid" or options.tp > 1:
        _require_sharding(options)
    if options.plugin_options:
        with contextlib.redirect_stderr(io.StringIO()):  # what libraries say while they are imported
            plugin_class = _plugin_class(options.plugin)
        _plugin_arguments(options, plugin_class)
    config = fp8_config(options)
    if "fp8" in PRECISIONS[options.precision]:
        require_fp8(torch.device("cuda" if torch.cuda.is_available() else "cpu"), config.emulate)


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
        arguments |= {"use_fp8": True, "fp8_config": fp8_config(options)}
    return make_plugin(plugin_class, options.parallel, network, options.max_norm, arguments)


def fp8_config(options: TrainOptions) -> FP8Config:
    """The configuration that the `--fp8-option` pairs ask for.

    Raises ValueError or TypeError for a field that does not exist and for a value that is not allowed.
    """
    fields = [field.name for field in dataclasses.fields(FP8Config) if field.name != "layers"]
    return FP8Config(**_parse_pairs(options.fp8_options, "--fp8-option", "FP8Config", fields))


def _plugin_arguments(options: TrainOptions, plugin_class: type[Plugin]) -> dict[str, Any]:
    for pair in options.plugin_options:
        key = pair.partition("=")[0]
        if key in _OWN_FLAGS:
            raise ValueError(f"The plugin's option {key!r} is set by {_OWN_FLAGS[key]}; use that.")
    known = {
        name: argument for name, argument in _constructor_arguments(plugin_class).items() if name not in _OWN_FLAGS
    }
    owner = f"The plugin {options.plugin}"
    arguments = _parse_pairs(options.plugin_options, "--plugin-option", owner, list(known))
    for name, value in arguments.items():
        require_value(known[name], value)
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


def _parse_pairs(pairs: tuple[str, ...], flag: str, owner: str, known: list[str]) -> dict[str, Any]:
    """`key=value` pairs as arguments: Python literals, names from _DTYPES, else strings.

    Raises ValueError for a pair without `=` and for a key that is not known.
    """
    arguments = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"{flag} {pair!r} has no '='; write it as key=value.")
        if key not in known:
            raise ValueError(f"{owner} has no option {key!r}; {suggestion(key, known)}")
        if len(text) > _LONGEST:
            raise ValueError(f"{flag} {key} has a value of {len(text)} characters; give one of at most {_LONGEST}.")
        arguments[key] = _parse(text)
    return arguments


def _parse(text: str) -> Any:
    if text in _DTYPES:
        return _DTYPES[text]
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return text


def _plugin_class(name: str) -> type[Plugin]:
    import fp8booster.plugins

    return getattr(fp8booster.plugins, PLUGINS[name])
