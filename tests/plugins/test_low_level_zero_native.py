"""`use_fp8=False` is Colossal-AI's plugin, bit for bit; what the constructor refuses."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from fp8booster import FP8Config
from tests.distributed import ranks
from tests.plugins.training import STAGES, assert_trains_equally, boost, fp8, native, native_class, our_class, ours

FP16 = {"precision": "fp16", "initial_scale": 2.0**8}
OVERFLOWING = {"precision": "fp16", "initial_scale": 2.0**26, "hysteresis": 1, "backoff_factor": 2.0**-9}
"""The first step of such a run is skipped."""

OPTIONS: dict[str, list[dict[str, Any]]] = {
    "stage": [{}],  # every case runs with both
    "precision": [{"precision": "fp32"}, {"precision": "bf16"}, FP16],
    "initial_scale": [FP16 | {"initial_scale": 2.0**18}],
    "min_scale": [OVERFLOWING | {"backoff_factor": 2.0**-16, "min_scale": 2.0**17}],
    "growth_factor": [FP16 | {"growth_factor": 4.0, "growth_interval": 1}],
    "backoff_factor": [OVERFLOWING],
    "growth_interval": [FP16 | {"growth_interval": 1}],
    "hysteresis": [OVERFLOWING | {"hysteresis": 2}],
    "max_scale": [FP16 | {"max_scale": 2.0**9, "growth_interval": 1}],
    "max_norm": [{"max_norm": 0.1}],
    "norm_type": [{"norm_type": 2.0}],
    "reduce_bucket_size_in_m": [{"reduce_bucket_size_in_m": 0.01}],
    "communication_dtype": [{"communication_dtype": torch.float32}],
    "overlap_communication": [{"overlap_communication": False}],
    "overlap_allgather": [{"overlap_allgather": True}],
    "cpu_offload": [{"cpu_offload": True}],
    "master_weights": [{"master_weights": False}],
    "verbose": [{"verbose": True}],
    "cast_inputs": [{"cast_inputs": False}],
    "fp8_communication": [{"fp8_communication": True}],
    "use_fp8": [{"use_fp8": False}],
    "extra_dp_size": [{"extra_dp_size": 2}],
}
"""For every argument of Colossal-AI's plugin, arguments with another value of it."""


def native_arguments() -> list[inspect.Parameter]:
    """Those of Colossal-AI's constructor, in order."""
    return list(inspect.signature(native_class().__init__).parameters.values())[1:]


@ranks(2)
def test_every_argument_of_the_native_plugin_is_tried() -> None:
    assert [argument.name for argument in native_arguments()] == list(OPTIONS)


@ranks(2)
@pytest.mark.parametrize("option", OPTIONS)
def test_without_fp8_it_trains_as_the_native_plugin(option: str) -> None:
    for stage in STAGES:
        for arguments in OPTIONS[option]:
            theirs, mine = native(stage=stage, **arguments), ours(stage=stage, **arguments)
            groups = "extra_dp_group", "dp_process_group"  # each plugin makes its own
            for name in theirs.zero_optim_kwargs.keys() - set(groups):
                assert theirs.zero_optim_kwargs[name] == mine.zero_optim_kwargs[name], name
            for name in ("stage", "precision", "cast_inputs", "verbose", "use_fp8"):
                assert getattr(theirs, name) == getattr(mine, name), name
            assert_trains_equally(boost(theirs), boost(mine))


@ranks(2)
@pytest.mark.parametrize("stage", STAGES)
def test_positional_arguments_mean_what_they_mean_in_the_native_plugin(stage: int) -> None:
    changed = {
        "stage": stage,
        "precision": "bf16",
        "max_norm": 0.1,
        "communication_dtype": torch.float32,
        "overlap_communication": False,
        "overlap_allgather": True,
    }
    values = [changed.get(argument.name, argument.default) for argument in native_arguments()]
    expected = native(**changed)
    assert_trains_equally(boost(expected), boost(our_class()(*values)))
    named = dict(list(changed.items())[2:])
    assert_trains_equally(boost(expected), boost(our_class()(*values[:2], **named)))


@ranks(2)
def test_an_unknown_option_is_named_with_those_it_resembles() -> None:
    with pytest.raises(TypeError, match=r"'stages'; did you mean stage"):
        ours(stages=2)
    with pytest.raises(TypeError, match=r"did you mean fp8_config"):
        ours(fp8_confg=FP8Config())
    with pytest.raises(TypeError, match=r"it takes stage, precision,"):
        ours(zzz=1)
    with pytest.raises(TypeError, match=r"too many positional arguments"):
        our_class()(*[0] * 23)


@ranks(2)
def test_wrong_values_are_refused_with_what_to_give() -> None:
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        fp8(fp8_config={"scaling": "amax"})
    with pytest.raises(TypeError, match=r"give an fp8booster.FP8Config"):
        ours(fp8_config="e4m3")
    with pytest.raises(ValueError, match=r"'bf16' or 'fp16', not 'fp32'"):
        fp8(precision="fp32")
