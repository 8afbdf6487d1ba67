from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster import FP8Config, level
from fp8booster.argument_types import types_of
from fp8booster.cli.train.key_values import (
    _OWN_FLAGS,
    _constructor_arguments,
    _plugin_class,
    _require_value,
    build_plugin,
    check_plugin,
    fp8_config,
    inference_fp8_config,
    parse_pairs,
)
from fp8booster.cli.train.options import TrainOptions
from fp8booster.scaling import Delayed
from fp8booster.training.parallel import PLUGINS
from tests.colossal.models import tiny_llama


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"plugin": "low_level_ero"}, r"no plugin 'low_level_ero'; did you mean low_level_zero\?"),
        ({"plugin_options": ("overlap_comunication=1",)}, r"did you mean overlap_communication"),
        ({"plugin_options": ("verbose",)}, "'verbose' has no '='; write it as key=value"),
        ({"plugin_options": ("stage=1",)}, "'stage' is set by --zero"),
        ({"pp": 2, "accumulate": 2, "plugin_options": ("pp_style=zvb",)}, r"'zvb'; did you mean zbv\?"),
        ({"plugin_options": ("pp_style=zbv",)}, "pp_style=zbv is a pipeline's; give --pp"),
        (
            {"pp": 2, "accumulate": 3, "plugin_options": ("pp_style=interleaved",)},
            "--micro-batches is 3; with pp_style=interleaved it must be a multiple of --pp, which is 2",
        ),
        (
            {"pp": 2, "accumulate": 2, "plugin_options": ("pp_style=zbv", "num_model_chunks=3")},
            "num_model_chunks is 3; with pp_style=zbv it must be 2",
        ),
        ({"fp8_options": ("scalling=amax",)}, r"FP8Config has no option 'scalling'; did you mean scaling\?"),
        (
            {"fp8_options": ("formats.gradent=e4m3",)},
            r"FP8Config.formats has no option 'gradent'; did you mean gradient",
        ),
        ({"fp8_options": ("always.so=true",)}, "FP8Config.always has no option 'so'"),
        ({"fp8_options": ("fast_accumulation=fprop+wgrads",)}, "give a tuple of names, of"),
        ({"fp8_options": ("layers=q_proj",)}, "FP8Config.layers is a function; it can be set in a script alone"),
        ({"fp8_options": ("always=3",)}, "FP8Config.always is 3; use True or False"),
        ({"fp8_options": ("activations.saved=4-bit",)}, "Activations.saved is '4-bit'; use '16-bit' or '8-bit'"),
    ],
)
def test_a_wrong_option_is_told_with_close_ones(options, says):
    if "pp_style" in str(options):
        options = {"plugin": "hybrid", **options}
    with pytest.raises(ValueError, match=says):
        check_plugin(TrainOptions(**options))


def test_options_are_python_values_or_strings():
    pairs = ("a=1", "b=true", "c=None", "d=all_to_all", "e=(1, 2)", "f=a=b")
    expected = {"a": 1, "b": True, "c": None, "d": "all_to_all", "e": (1, 2), "f": "a=b"}
    assert parse_pairs(pairs, "--plugin-option") == expected


NO_OBJECT = "is an object of Python's; it can be set in a script alone"


@pytest.mark.parametrize(
    ("plugin", "option", "says"),
    [
        ("low_level_zero", "reduce_bucket_size_in_m=-1", "is -1; it must be finite and at least 1"),
        ("low_level_zero", "cpu_offload=banana", "is 'banana'; it must be true or false"),
        ("low_level_zero", "cpu_offload=1", "is 1; it must be true or false"),
        ("low_level_zero", "initial_scale=text", "is 'text'; it must be a number"),
        ("low_level_zero", "initial_scale=1e999", "is inf; it must be finite and above 0"),
        ("low_level_zero", f"max_scale=-{10**500}", "it must be finite and above 0"),
        ("low_level_zero", "hysteresis=2.5", "is 2.5; it must be a whole number"),
        ("low_level_zero", "hysteresis=true", "is True; it must be a whole number"),
        ("low_level_zero", "communication_dtype=e4m3", "it must be bf16, fp16 or fp32"),
        ("low_level_zero", "communication_dtype=float", "is 'float'; it must be bf16, fp16 or fp32 or None"),
        ("low_level_zero", "extra_dp_size=0", "is 0; it must be finite and at least 1"),
        ("gemini", "placement_policy=dynamic", "is 'dynamic'; it must be static or auto"),
        ("gemini", "offload_optim_frac=1.5", "is 1.5; it must be at least 0, and at most 1"),
        ("gemini", "offload_optim_frac=nan", "is 'nan'; it must be a number"),
        ("gemini", "memstats=3", NO_OBJECT),
        ("gemini", "backoff_factor=1", "is 1; it must be above 0 and below 1"),
        ("hybrid", "custom_policy=mine", NO_OBJECT),
        ("hybrid", "scheduler_nodes=[]", NO_OBJECT),
        ("hybrid", "num_layers_per_stage=[1,'a']", "it must be a list of whole numbers or None"),
        ("hybrid", "num_layers_per_stage=[2,0]", "it must be of at least one layer for each stage"),
        ("hybrid", "zero_bucket_size_in_m=0", "is 0; it must be finite and at least 1"),
        ("ddp", "bucket_cap_mb=0", "is 0; it must be finite and at least 1"),
        ("ddp", "static_graph=None", "is None; it must be true or false"),
        ("fsdp", "sharding_strategy=FULL_SHARD", NO_OBJECT),
        ("fsdp", "sync_module_states=2", "is 2; it must be true or false"),
    ],
)
def test_a_value_that_a_plugin_does_not_take_is_told(plugin, option, says):
    with pytest.raises(ValueError, match=rf"The plugin's option '{option.partition('=')[0]}' .*{says}"):
        check_plugin(TrainOptions(plugin=plugin, plugin_options=(option,)))


@pytest.mark.parametrize("plugin", PLUGINS)
def test_every_default_of_a_plugin_is_a_value_that_it_takes(plugin):
    arguments = _constructor_arguments(_plugin_class(plugin))
    checked = [
        each for each in arguments.values() if each.name not in _OWN_FLAGS and types_of(each.annotation, each.default)
    ]
    assert len(checked) >= (2 if plugin == "fsdp" else 6)
    for argument in checked:
        _require_value(argument, argument.default)


@pytest.mark.parametrize("value", ["-" * 3000 + "1", "-" * 900 + "1", "(" * 900, "[" * 200, "1" * 999, "{[]}", "\0"])
@pytest.mark.parametrize("kind", ["fp8_options", "plugin_options"])
def test_a_value_that_is_no_literal_is_told(kind, value):
    option = "always" if kind == "fp8_options" else "verbose"
    with pytest.raises(ValueError, match=r"use True or False|must be true or false|give one of at most 1000"):
        check_plugin(TrainOptions(**{kind: (f"{option}={value}",)}))


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_pipeline_of_more_pieces_than_layers_is_refused():
    options = TrainOptions(plugin="hybrid", pp=2, accumulate=2, plugin_options=("pp_style=zbv",))
    with pytest.raises(ValueError, match="has 2 layers and the pipeline 4 pieces"):
        build_plugin(options, use_fp8=False, network=tiny_llama())


def test_a_vocabulary_that_cannot_be_divided_is_refused():
    options = TrainOptions(plugin="hybrid", tp=2)
    with pytest.raises(ValueError, match="has 129 embeddings, which --tp 2 cannot divide"):
        build_plugin(options, use_fp8=False, network=tiny_llama(vocab_size=129))


@pytest.mark.usefixtures("one_rank")
def test_pairs_reach_the_plugin_and_the_config():
    options = TrainOptions(
        stage=1,
        max_norm=0.5,
        plugin_options=("reduce_bucket_size_in_m=3", "overlap_communication=false", "communication_dtype=fp32"),
        fp8_options=("formats.gradient=e4m3", "scaling=amax"),
    )
    check_plugin(options)
    plugin = build_plugin(options, use_fp8=True, network=nn.Module())
    assert plugin.stage == 1
    assert plugin.use_fp8
    assert plugin.fp8_config == fp8_config(options.fp8_options)
    assert plugin.fp8_config.gradient_format is torch.float8_e4m3fn
    assert plugin.zero_optim_kwargs["reduce_bucket_size"] == 3 * 1024 * 1024
    assert plugin.zero_optim_kwargs["overlap_communication"] is False
    assert plugin.zero_optim_kwargs["communication_dtype"] is torch.float32
    assert plugin.zero_optim_kwargs["clip_grad_norm"] == 0.5
    assert not build_plugin(options, use_fp8=False, network=nn.Module()).use_fp8


def test_pairs_choose_the_scaling_and_its_options():
    pairs = ("scaling=delayed(history=4, amax='most recent', margin=1)", "fast_accumulation=fprop+dgrad")
    expected = FP8Config(scaling=Delayed(history=4, amax="most recent", margin=1), fast_accumulation=("fprop", "dgrad"))
    assert fp8_config(pairs) == expected
    assert fp8_config(("scaling=constant(gradient_bias=-3)",)).scaling.gradient_bias == -3


def test_pairs_win_over_the_level():
    config = fp8_config(("weight_copies.transposes=true",), "lean")
    assert config.keeps_transposes
    assert not config.keeps_high_precision  # of the level
    assert config.activations == level("lean").config.activations
    with pytest.raises(ValueError, match=r"keep the transposes or use scaling"):
        check_plugin(TrainOptions(level="O3", fp8_options=("scaling=rowwise",)))


@pytest.mark.parametrize("kind", ["fp8_options", "plugin_options"])
@pytest.mark.parametrize("second", ["true", "false"])
def test_a_key_that_is_given_twice_is_told(kind, second):
    option = "always" if kind == "fp8_options" else "verbose"
    with pytest.raises(ValueError, match=f"-option {option} is given twice; give it once"):
        check_plugin(TrainOptions(**{kind: (f"{option}=true", f"{option}={second}")}))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"plugin_options": ("initial_scale=8",)},
            "'initial_scale' changes nothing: it is about the loss scale of FP16",
        ),
        (
            {"plugin": "gemini", "plugin_options": ("placement_policy=auto", "offload_optim_frac=0.5")},
            "'offload_optim_frac' changes nothing: placement_policy is auto; give placement_policy=static, or leave it",
        ),
        (
            {"plugin": "gemini", "plugin_options": ("steady_cuda_cap_ratio=0.5",)},
            "placement_policy is static; give placement_policy=auto",
        ),
        ({"plugin": "hybrid", "plugin_options": ("num_model_chunks=2",)}, "a stage holds one piece of the model"),
        ({"plugin": "hybrid", "plugin_options": ("num_layers_per_stage=[2]",)}, "there is one stage; give --pp"),
        ({"plugin": "hybrid", "plugin_options": ("inner_ring_size=2",)}, "give --sp-mode ring_attn"),
    ],
)
def test_an_option_of_a_plugin_that_changes_nothing_is_told(options, says):
    with pytest.raises(ValueError, match=says):
        check_plugin(TrainOptions(**options))


def test_options_that_change_something_are_taken():
    pairs = ("placement_policy=auto", "steady_cuda_cap_ratio=0.5")
    check_plugin(TrainOptions(plugin="gemini", plugin_options=pairs))
    check_plugin(TrainOptions(plugin="gemini", plugin_options=("offload_optim_frac=0.5",)))


def test_a_command_that_trains_nothing_refuses_what_is_of_training_alone():
    assert inference_fp8_config(("scaling=rowwise",)) == fp8_config(("scaling=rowwise",))
    for pair in ("formats.gradient=e4m3", "activations.recompute=all", "messages=None", "cuda_graphs=true"):
        with pytest.raises(ValueError, match=f"--fp8-option {pair.partition('=')[0]} is about training, and changes"):
            inference_fp8_config(("scaling=rowwise", pair))
