"""Plugins that shard models refuse a transformers whose models Colossal-AI cannot shard, before they build anything."""

from __future__ import annotations

import pytest

import fp8booster.plugins
from fp8booster.cli.train.key_values import check_plugin
from fp8booster.cli.train.options import TrainOptions
from fp8booster.colossal import sharding

SHARDING = [
    ("HybridParallelPlugin", {"tp_size": 2, "pp_size": 1}),
    ("HybridParallelPlugin", {"tp_size": 1, "pp_size": 1, "use_fp8": True}),
    ("MoeHybridParallelPlugin", {"tp_size": 1, "pp_size": 1, "ep_size": 2}),
    ("GeminiPlugin", {"tp_size": 2, "use_fp8": True}),
]


@pytest.fixture(params=["4.50.3", "4.56.2"])
def another(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Another version of transformers is installed."""
    monkeypatch.setattr(sharding, "version", lambda package: request.param)
    return request.param


@pytest.mark.parametrize(("plugin", "arguments"), SHARDING)
def test_it_says_what_to_install_and_what_runs(plugin: str, arguments: dict, another: str) -> None:
    # without ranks: what would be built needs a process group, and fails by its absence
    with pytest.raises(ImportError) as raised:
        getattr(fp8booster.plugins, plugin)(**arguments)
    sentence = str(raised.value)
    assert sentence.startswith(plugin)
    assert f"transformers {another} is installed; pip install transformers==4.51.3, or use LowLevelZero" in sentence


@pytest.mark.parametrize(("plugin", "arguments"), SHARDING)
@pytest.mark.parametrize("version", ["4.51.3", "4.57.1", "5.23.0"])
def test_versions_that_are_sharded_are_taken(
    plugin: str, arguments: dict, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sharding, "version", lambda package: version)
    with pytest.raises(Exception) as raised:  # there are no ranks  # noqa: PT011
        getattr(fp8booster.plugins, plugin)(**arguments)
    assert "4.51.3" not in str(raised.value)


def test_with_transformers_5_a_model_that_is_not_sharded_is_named_with_what_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "version", lambda package: "5.23.0")
    llama, gpt2 = (f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2"))
    assert sharding.why_model_is_not_sharded(llama, "LlamaForCausalLM") is None
    reason = sharding.why_model_is_not_sharded(gpt2, "GPT2LMHeadModel")
    assert reason.startswith("Colossal-AI 0.5.0 shards GPT2LMHeadModel of transformers 4.51.3 alone")
    assert "5.23.0 is installed, of which LLaMA, Mistral" in reason
    jetmoe = "transformers.models.jetmoe.modeling_jetmoe"
    reason = sharding.why_model_is_not_sharded(jetmoe, "JetMoeForCausalLM", has_policy=False)
    assert reason.startswith("Colossal-AI 0.5.0 shards no JetMoeForCausalLM, with any transformers; use LowLevelZero")
    mixtral = "transformers.models.mixtral.modeling_mixtral"
    assert sharding.why_model_is_not_sharded(mixtral, "MixtralForCausalLM") is None
    monkeypatch.setattr(sharding, "version", lambda package: "4.57.1")
    assert sharding.why_model_is_not_sharded(llama, "LlamaForCausalLM") is None
    assert "4.57.1 is installed" in sharding.why_model_is_not_sharded(mixtral, "MixtralForCausalLM")
    monkeypatch.setattr(sharding, "version", lambda package: "4.51.3")
    assert sharding.why_model_is_not_sharded(gpt2, "GPT2LMHeadModel") is None


def test_a_policy_of_ones_own_is_taken(another: str) -> None:
    with pytest.raises(Exception) as raised:  # there are no ranks  # noqa: PT011
        fp8booster.plugins.HybridParallelPlugin(tp_size=1, pp_size=1, custom_policy=object())
    assert another not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "what"),
    [({"plugin": "hybrid", "tp": 2}, "--plugin hybrid"), ({"plugin": "gemini", "tp": 2}, "--plugin gemini --tp 2")],
)
def test_training_is_refused_before_ranks_start(options: dict, what: str, another: str) -> None:
    with pytest.raises(ValueError, match=rf"^{what} shards models.*{another} is installed; pip .*gemini without"):
        check_plugin(TrainOptions(**options))


@pytest.mark.parametrize("plugin", ["low_level_zero", "gemini", "ddp", "fsdp"])
def test_what_does_not_shard_is_let_through(plugin: str, another: str) -> None:
    check_plugin(TrainOptions(plugin=plugin))
