"""The model of a plan."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from fp8booster.cli.train.key_values import parse_pairs
from fp8booster.cli.train.model_folder import is_folder, load_config
from fp8booster.cli.train.options import TrainOptions
from fp8booster.training.models import MODELS

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def planned_config(options: TrainOptions) -> PretrainedConfig:
    """The config of the model that options name; errors as `load_config`."""
    vocabulary = 1 if is_folder(options.model) else MODELS[options.model].vocabulary
    return load_config(options.model, vocabulary, options.sequence)


def fewest_layers(options: TrainOptions) -> int:
    """One for each piece that a pipeline's stages hold."""
    given = parse_pairs(options.plugin_options, "--plugin-option")
    return options.pp * given.get("num_model_chunks", 1 if given.get("pp_style", "1f1b") == "1f1b" else 2)


def shortened(config: PretrainedConfig, layers: int) -> PretrainedConfig:
    """A config with so many layers; its lists with an entry for each layer are cut too."""
    short = copy.deepcopy(config)
    for name, value in vars(config).items():
        if isinstance(value, list) and len(value) == config.num_hidden_layers:
            setattr(short, name, value[:layers])
    short.num_hidden_layers = layers
    return short
