"""What a plugin says of a configuration that changes nothing."""

from __future__ import annotations

from typing import Any

import pytest

import fp8booster.colossal  # noqa: F401  (patches colossalai before it is imported)
from fp8booster import FP8Config
from fp8booster.comm import Encoding
from fp8booster.config import WeightCopies
from tests.distributed import ranks

OFF = "fp8_config has no effect: use_fp8 is off; give use_fp8=True"
WEIGHTS = "fp8_config.weight_copies.high_precision=False has no effect: "
SCALING = "fp8_config.messages=Encoding("
IN_16_BITS = {"fp8_communication": False}

FP8_ALONE: dict[tuple[str, str], tuple[dict[str, Any], str | None]] = {
    ("LowLevelZeroPlugin", "FP8 on the wire"): ({}, None),
    ("LowLevelZeroPlugin", "16 bits on the wire"): (IN_16_BITS, "without fp8_communication; turn it on"),
    ("LowLevelZeroPlugin", "no masters"): ({"master_weights": False}, "but with master_weights=True"),
    ("LowLevelZeroPlugin", "two groups"): ({"extra_dp_size": 2}, "but with extra_dp_size=1"),
    ("HybridParallelPlugin", "ZeRO"): ({"zero_stage": 1}, None),
    ("HybridParallelPlugin", "no ZeRO"): ({}, "but with zero_stage=1 or 2"),
    ("HybridParallelPlugin", "16 bits on the wire"): ({"zero_stage": 1} | IN_16_BITS, "turn it on"),
    ("MoeHybridParallelPlugin", "ZeRO"): ({"zero_stage": 1}, None),
    ("GeminiPlugin", "FP8 on the wire"): ({}, "in FP8 alone by themselves; leave the option out"),
    ("GeminiPlugin", "16 bits on the wire"): (IN_16_BITS, "chunks hold weights in 16 bits; turn it on"),
    ("TorchDDPPlugin", "FP8 on the wire"): ({}, "use LowLevelZeroPlugin"),
    ("TorchFSDPPlugin", "FP8 on the wire"): ({}, "leave the option out"),
}
"""By plugin and case: arguments, and what `WeightCopies(high_precision=False)` is told."""

PLUGINS = tuple(dict.fromkeys(plugin for plugin, _ in FP8_ALONE))

SIZES = {
    "HybridParallelPlugin": {"tp_size": 1, "pp_size": 1},
    "MoeHybridParallelPlugin": {"tp_size": 1, "pp_size": 1, "ep_size": 2},
}


def warnings_of(plugin: str, **arguments: Any) -> list[str]:
    """What the constructor says of `fp8_config`."""
    from colossalai.logging import DistributedLogger

    import fp8booster.plugins

    said: list[str] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(DistributedLogger, "warning", lambda _, line, ranks=None: said.append(line))
        plugin_class = getattr(fp8booster.plugins, plugin)
        precision = {} if plugin.startswith("Torch") else {"precision": "bf16"}
        plugin_class(**precision | SIZES.get(plugin, {}) | arguments)
    return [line for line in said if line.startswith("fp8_config")]


@ranks(2)
@pytest.mark.parametrize("case", FP8_ALONE, ids=str)
def test_weights_in_fp8_alone_are_warned_of_where_that_changes_nothing(case: tuple[str, str]) -> None:
    arguments, says = FP8_ALONE[case]
    config = FP8Config(weight_copies=WeightCopies(high_precision=False))
    warnings = warnings_of(case[0], use_fp8=True, fp8_config=config, **arguments)
    assert len(warnings) == (says is not None), warnings
    if says is not None:
        assert warnings[0].startswith(WEIGHTS)
        assert says in warnings[0]
    assert not warnings_of(case[0], use_fp8=True, fp8_config=FP8Config(), **arguments)


COPIES: dict[str, dict[str, str]] = {
    "LowLevelZeroPlugin": {},
    "GeminiPlugin": {
        "high_precision": "in FP8 alone by themselves; leave the option out",
        "transposes": "keeps no transposes of weights that train; leave the option out, unless some are frozen",
    },
    "TorchDDPPlugin": {"high_precision": "trains those of the model"},
    "TorchFSDPPlugin": {"high_precision": "FSDP frees by itself", "transposes": "FSDP's layers keep no transposes"},
}
"""By plugin and kind of copies that it keeps, or does not, whatever it is asked: what it says of that."""


@ranks(2)
@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize("plugin", COPIES)
def test_a_choice_of_copies_that_a_plugin_does_not_have_is_warned_of(plugin: str, asked: bool) -> None:
    for copies in ("high_precision", "transposes"):
        config = FP8Config(weight_copies=WeightCopies(**{copies: asked}))
        warnings = warnings_of(plugin, use_fp8=True, fp8_config=config)
        assert len(warnings) == (copies in COPIES[plugin]), warnings
        if warnings:
            assert warnings[0].startswith(f"fp8_config.weight_copies.{copies}={asked} has no effect: ")
            assert COPIES[plugin][copies] in warnings[0]


@ranks(2)
def test_each_option_without_effect_is_named_once() -> None:
    config = FP8Config(
        weight_copies=WeightCopies(high_precision=True, transposes=True),
        messages=Encoding(automatic_scaling=True),
        cuda_graphs=True,
        gradient_accumulation="16-bit",
    )
    names = ["weight_copies.high_precision", "weight_copies.transposes", "messages.automatic_scaling"]
    others = ["cuda_graphs", "gradient_accumulation"]
    for arguments, said in (({}, [*names, *others]), (IN_16_BITS, [*names[:2], "messages", *others])):
        warnings = warnings_of("GeminiPlugin", use_fp8=True, fp8_config=config, **arguments)
        assert [line.split("=")[0] for line in warnings] == [f"fp8_config.{name}" for name in said]


@ranks(2)
def test_graphs_that_are_not_wanted_are_not_made_and_that_is_no_warning() -> None:
    for plugin in ("GeminiPlugin", "TorchFSDPPlugin"):
        assert not warnings_of(plugin, use_fp8=True, fp8_config=FP8Config(cuda_graphs=False))


@ranks(2)
def test_messages_that_are_sent_in_fp8_all_the_same_are_warned_of() -> None:
    config = FP8Config(messages=None)
    (warning,) = warnings_of("TorchDDPPlugin", use_fp8=True, fp8_communication=True, fp8_config=config)
    assert warning == (
        "fp8_config.messages=None has no effect: fp8_communication is on, and all is sent in FP8; leave one of the two "
        "out"
    )
    for arguments in ({}, IN_16_BITS):
        assert not warnings_of("TorchDDPPlugin", use_fp8=True, fp8_config=config, **arguments)


@ranks(2)
def test_rowwise_weights_are_gathered_in_16_bits_and_that_is_said() -> None:
    config = FP8Config(weight_copies=WeightCopies(high_precision=False), scaling="rowwise")
    (warning,) = warnings_of("LowLevelZeroPlugin", use_fp8=True, fp8_config=config)
    assert 'scaling="rowwise"; use "tensorwise"' in warning


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_scaling_of_gradients_that_are_sent_in_16_bits_is_warned_of(plugin: str) -> None:
    config = FP8Config(messages=Encoding(block_size=None))
    (warning,) = warnings_of(plugin, use_fp8=True, fp8_config=config, **IN_16_BITS)
    assert warning.startswith(SCALING)
    assert "has no effect: gradients are sent uncompressed without fp8_communication" in warning
    (warning,) = warnings_of(plugin, fp8_config=config)
    assert warning.startswith(OFF)
    assert not any(line.startswith(SCALING) for line in warnings_of(plugin, use_fp8=True, fp8_config=config))
    assert not warnings_of(plugin, use_fp8=True, fp8_config=FP8Config(), **IN_16_BITS)


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_config_without_use_fp8_is_warned_of_once(plugin: str) -> None:
    (warning,) = warnings_of(plugin, fp8_config=FP8Config(weight_copies=WeightCopies(high_precision=False)))
    assert warning.startswith(OFF)
    assert not warnings_of(plugin)


@ranks(2)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_the_configuration_decides_what_is_sent_unless_the_argument_does(plugin: str) -> None:
    import fp8booster.plugins

    def sends(**arguments: Any) -> bool:
        precision = {} if plugin.startswith("Torch") else {"precision": "bf16"}
        return getattr(fp8booster.plugins, plugin)(**precision | SIZES.get(plugin, {}) | arguments).sends_fp8

    off = FP8Config(messages=None)
    assert sends(use_fp8=True)
    assert not sends(use_fp8=True, fp8_config=off)
    assert sends(use_fp8=True, fp8_config=off, fp8_communication=True)
    assert not sends(use_fp8=True, fp8_communication=False)
    assert not sends()


BUCKETS = {
    ("HybridParallelPlugin", "zero_bucket_size_in_m"): lambda plugin: plugin.zero_config["reduce_bucket_size"],
    ("HybridParallelPlugin", "ddp_bucket_cap_mb"): lambda plugin: plugin.ddp_config["bucket_cap_mb"],
    ("TorchDDPPlugin", "bucket_cap_mb"): lambda plugin: plugin.ddp_kwargs["bucket_cap_mb"],
}
"""By plugin and argument: where it keeps the size of buckets; `test_low_level_zero_fp8` has LowLevelZero's."""


@ranks(2)
@pytest.mark.parametrize("case", BUCKETS, ids=str)
def test_a_size_of_buckets_is_kept_where_given_and_larger_where_not(case: tuple[str, str]) -> None:
    import fp8booster.plugins

    name, argument = case
    sizes = SIZES.get(name, {}) | ({"zero_stage": 1, "precision": "bf16"} if "Hybrid" in name else {})

    def size(**arguments: Any) -> int:
        return BUCKETS[case](getattr(fp8booster.plugins, name)(**sizes, **arguments))

    given = {argument: 3}
    assert size(use_fp8=True, **given) == size(**given) < size() < size(use_fp8=True)


SIZES_OF_2_20 = BUCKETS | {
    ("LowLevelZeroPlugin", "reduce_bucket_size_in_m"): lambda plugin: plugin.zero_optim_kwargs["reduce_bucket_size"],
    ("GeminiPlugin", "search_range_m"): lambda plugin: plugin.gemini_config["search_range_m"],
}
"""By plugin and argument that Colossal-AI annotates as a whole number: where it keeps the size."""


@ranks(2)
@pytest.mark.parametrize("case", SIZES_OF_2_20, ids=str)
def test_a_size_may_be_a_fraction(case: tuple[str, str]) -> None:
    import fp8booster.plugins

    name, argument = case
    sizes = SIZES.get(name, {}) | ({} if name.startswith("Torch") else {"precision": "bf16"})

    def size(value: Any) -> Any:
        return SIZES_OF_2_20[case](getattr(fp8booster.plugins, name)(**sizes, use_fp8=True, **{argument: value}))

    assert 4 * size(0.25) == size(1)
    with pytest.raises(TypeError, match=f"{argument} is '1'; it must be a number"):
        size("1")
    if argument in ("bucket_cap_mb", "ddp_bucket_cap_mb", "search_range_m"):
        assert size(None) is None  # what PyTorch's DDP and Gemini replace by their own size


ACCUMULATION: dict[tuple[str, str], tuple[dict[str, Any], str | None]] = {
    ("LowLevelZeroPlugin", "FP8 on the wire"): ({}, None),
    ("LowLevelZeroPlugin", "16 bits on the wire"): (IN_16_BITS, "without fp8_communication; turn it on"),
    ("HybridParallelPlugin", "ZeRO"): ({"zero_stage": 1}, None),
    ("HybridParallelPlugin", "no ZeRO"): ({}, "give zero_stage=1 or 2"),
    ("HybridParallelPlugin", "a pipeline"): (
        {"zero_stage": 1, "pp_size": 2, "num_microbatches": 2},
        "a pipeline adds the gradients of its micro-batches up whole",
    ),
    ("MoeHybridParallelPlugin", "ZeRO"): ({"zero_stage": 1}, None),
    ("GeminiPlugin", "FP8 on the wire"): ({}, "use LowLevelZeroPlugin"),
    ("TorchDDPPlugin", "FP8 on the wire"): ({}, "use LowLevelZeroPlugin"),
    ("TorchFSDPPlugin", "FP8 on the wire"): ({}, "use LowLevelZeroPlugin"),
}
"""By plugin and case: arguments, and what `gradient_accumulation="8-bit"` is told."""


@ranks(2)
@pytest.mark.parametrize("case", ACCUMULATION, ids=str)
def test_sums_of_gradients_in_8_bits_are_warned_of_where_others_add_them_up(case: tuple[str, str]) -> None:
    arguments, says = ACCUMULATION[case]
    config = FP8Config(gradient_accumulation="8-bit")
    warnings = warnings_of(case[0], use_fp8=True, fp8_config=config, **arguments)
    assert len(warnings) == (says is not None), warnings
    if says is not None:
        assert warnings[0].startswith("fp8_config.gradient_accumulation='8-bit' has no effect: ")
        assert says in warnings[0]
        assert not warnings_of(case[0], use_fp8=True, fp8_config=FP8Config(), **arguments)


NO_GRAPHS: dict[tuple[str, str], tuple[dict[str, Any], str | None]] = {
    ("LowLevelZeroPlugin", "any"): ({}, None),
    ("TorchDDPPlugin", "any"): ({}, None),
    ("HybridParallelPlugin", "whole layers"): ({}, None),
    ("HybridParallelPlugin", "tensor parallel"): ({"tp_size": 2}, None),
    ("HybridParallelPlugin", "sequence parallel"): (
        {"sp_size": 2, "enable_sequence_parallelism": True, "sequence_parallelism_mode": "ring_attn"},
        'sequence_parallelism_mode="ring_attn" sends piece by piece',
    ),
    ("GeminiPlugin", "any"): ({}, "Gemini moves weights"),
    ("TorchFSDPPlugin", "any"): ({}, "FSDP gathers weights elsewhere"),
}


@ranks(2)
@pytest.mark.parametrize("case", NO_GRAPHS, ids=str)
def test_graphs_that_nothing_captures_are_warned_of(case: tuple[str, str]) -> None:
    arguments, says = NO_GRAPHS[case]
    warnings = warnings_of(case[0], use_fp8=True, fp8_config=FP8Config(cuda_graphs=True), **arguments)
    assert len(warnings) == (says is not None), warnings
    if says is not None:
        assert f"fp8_config.cuda_graphs=True has no effect: {says}" in warnings[0]
    assert not warnings_of(case[0], use_fp8=True, fp8_config=FP8Config(cuda_graphs=None), **arguments)


@ranks(2)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"use_fp8": "no"}, "LowLevelZeroPlugin's use_fp8 is 'no'; it must be true or false"),
        ({"use_fp8": 1}, "use_fp8 is 1; it must be true or false"),
        ({"fp8_communication": "no"}, "fp8_communication is 'no'; it must be true or false or None"),
        ({"use_fp8": True, "overlap_communication": "no"}, "overlap_communication is 'no'; it must be true or false"),
        ({"use_fp8": True, "stage": True}, "stage is True; it must be a whole number"),
        ({"use_fp8": True, "max_norm": "1"}, "max_norm is '1'; it must be a number"),
    ],
    ids=str,
)
def test_an_argument_of_another_type_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(TypeError, match=says):
        warnings_of("LowLevelZeroPlugin", **arguments)
