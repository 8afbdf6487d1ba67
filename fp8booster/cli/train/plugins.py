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

from .options import PRECISIONS, TrainOptions
from .parallel import PLUGINS, suggestion

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

PIPELINE_STYLES = ("1f1b", "interleaved", "zbv")
"""The schedules of Colossal-AI's pipelines; zbv is zero-bubble."""

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": E4M3, "e5m2": E5M2}


def check_plugin(options: TrainOptions) -> None:
    """Check the plugin's options and those of FP8 before anything is started.

    Raises ValueError or TypeError for one that does not exist, and for FP8 on a GPU that has no FP8 products.
    """
    if options.plugin_options:
        with contextlib.redirect_stderr(io.StringIO()):  # what libraries say while they are imported
            plugin_class = _plugin_class(options.plugin)
        _plugin_arguments(options, plugin_class)
    config = fp8_config(options)
    if "fp8" in PRECISIONS[options.precision]:
        require_fp8(torch.device("cuda" if torch.cuda.is_available() else "cpu"), config.emulate)


def build_plugin(options: TrainOptions, use_fp8: bool, network: nn.Module) -> Plugin:
    """The plugin that the options ask for, to boost `network`.

    It may make process groups, so torch.distributed must run by then.
    """
    from .engine import plugin_arguments

    plugin_class = _plugin_class(options.plugin)
    arguments = plugin_arguments(options.parallel, options.max_norm, network)
    arguments |= _plugin_arguments(options, plugin_class)
    if use_fp8:
        arguments |= {"use_fp8": True, "fp8_config": fp8_config(options)}
    if arguments.get("pp_style") == "zbv":
        from fp8booster.colossal.pipeline import zero_bubble_schedule

        schedule = zero_bubble_schedule(options.pp, options.accumulate)
        arguments = {"scheduler_nodes": schedule} | arguments
    _require_layers(network, options.pp * arguments.get("num_model_chunks", 1))
    return plugin_class(**arguments)


def _require_layers(network: nn.Module, pieces: int) -> None:
    """Raise ValueError for a model that a pipeline cannot be cut from; its ranks would wait for each other."""
    layers = getattr(getattr(network, "config", None), "num_hidden_layers", None)
    if layers is not None and layers < pieces:
        raise ValueError(
            f"The model has {layers} layers and the pipeline {pieces} pieces (--pp times its chunks); give a smaller "
            "--pp"
        )


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
    known = [name for name in _constructor_arguments(plugin_class) if name not in _OWN_FLAGS]
    arguments = _parse_pairs(options.plugin_options, "--plugin-option", f"The plugin {options.plugin}", known)
    return _chunks(options, arguments) | arguments


def _chunks(options: TrainOptions, arguments: dict[str, Any]) -> dict[str, int]:
    """How many pieces of the model a pipeline's stage holds under its schedule, where it is more than one.

    Raises ValueError for a schedule that does not exist, and for sizes that it does not take.
    """
    style = arguments.get("pp_style", "1f1b")
    if style not in PIPELINE_STYLES:
        raise ValueError(f"pp_style is {style!r}; {suggestion(str(style), PIPELINE_STYLES)}")
    if style == "1f1b":
        return {}
    if options.pp < 2:
        raise ValueError(f"pp_style={style} is a pipeline's; give --pp, the number of its stages")
    if options.accumulate % options.pp:
        raise ValueError(
            f"--micro-batches is {options.accumulate}; with pp_style={style} it must be a multiple of --pp, which is "
            f"{options.pp}"
        )
    chunks = arguments.get("num_model_chunks", 2)
    if chunks != 2 and (style == "zbv" or not isinstance(chunks, int) or chunks < 2):
        more = "" if style == "zbv" else " or more"
        raise ValueError(f"num_model_chunks is {chunks!r}; with pp_style={style} it must be 2{more}")
    return {"num_model_chunks": 2}


def _constructor_arguments(plugin_class: type) -> list[str]:
    """Named arguments of a constructor, and of those above it that it passes `**kwargs` to."""
    names: list[str] = []
    for ancestor in plugin_class.__mro__:
        if "__init__" not in vars(ancestor):
            continue
        parameters = list(inspect.signature(ancestor.__init__).parameters.values())[1:]
        names += [
            each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
        ]
        if not any(each.kind is each.VAR_KEYWORD for each in parameters):
            break
    return names


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
        arguments[key] = _parse(text)
    return arguments


def _parse(text: str) -> Any:
    if text in _DTYPES:
        return _DTYPES[text]
    if text in ("true", "false"):
        return text == "true"
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _plugin_class(name: str) -> type[Plugin]:
    import fp8booster.plugins

    return getattr(fp8booster.plugins, PLUGINS[name])
