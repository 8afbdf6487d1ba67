from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fp8booster.cli.train.options import TrainOptions
from fp8booster.cli.train.plugins import build_plugin, check_plugin, fp8_config
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
        (
            {"fp8_options": ("powr_of_two=true",)},
            r"FP8Config has no option 'powr_of_two'; did you mean power_of_two\?",
        ),
        ({"fp8_options": ("power_of_two=3",)}, "FP8Config.power_of_two is 3; use True or False"),
    ],
)
def test_a_wrong_option_is_told_with_close_ones(options, says):
    if "pp_style" in str(options):
        options = {"plugin": "hybrid", **options}
    with pytest.raises(ValueError, match=says):
        check_plugin(TrainOptions(**options))


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
        plugin_options=(
            "reduce_bucket_size_in_m=3",
            "overlap_communication=false",
            "communication_dtype=fp32",
        ),
        fp8_options=("gradient_format=e4m3", "power_of_two=true"),
    )
    check_plugin(options)
    plugin = build_plugin(options, use_fp8=True, network=nn.Module())
    assert plugin.stage == 1
    assert plugin.use_fp8
    assert plugin.fp8_config == fp8_config(options)
    assert plugin.fp8_config.gradient_format is torch.float8_e4m3fn
    assert plugin.zero_optim_kwargs["reduce_bucket_size"] == 3 * 1024 * 1024
    assert plugin.zero_optim_kwargs["overlap_communication"] is False
    assert plugin.zero_optim_kwargs["communication_dtype"] is torch.float32
    assert plugin.zero_optim_kwargs["clip_grad_norm"] == 0.5
    assert not build_plugin(options, use_fp8=False, network=nn.Module()).use_fp8
