"""The models that Colossal-AI can shard, with the transformers that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SHARDED_TRANSFORMERS = "4.51.3"
"""The version that Colossal-AI 0.5.0 was written for: all models that it has policies for are sharded."""

FAMILIES_OF_5 = {"llama": "LLaMA", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Folders of `transformers.models`, and their names in messages: sharded with transformers 5 too (`tensor/body.py`)."""

_OTHERS = "use LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin or GeminiPlugin without tensor parallelism"

_4_51, _LAST_4, _5 = (4, 51), (4, 57), (5, 0)
"""From the last 4 on models are those of 5, as far as sharding asks, but for experts, which are modules there."""


def _installed_transformers() -> tuple[str, tuple[int, ...]]:
    """Return the version, and its first two numbers; without one, that which is sharded."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        installed = SHARDED_TRANSFORMERS
    return installed, tuple(int(part) for part in installed.split(".")[:2])


def is_transformers_5() -> bool:
    """Tell whether transformers is of version 5 or later."""
    return _installed_transformers()[1] >= _5


def why_not_sharded(what: str, instead: str) -> str | None:
    """Return why tensor, sequence, pipeline and expert parallelism do not run here; None where they do.

    Args:
        what: shards models; the sentence begins with it.
        instead: does what can be done without another transformers; the sentence ends with it.
    """
    installed, numbers = _installed_transformers()
    if numbers == _4_51 or numbers >= _LAST_4:
        return None
    return (
        f"{what} shards models of transformers {SHARDED_TRANSFORMERS}, 4.57 and 5, and transformers {installed} is "
        f"installed; pip install transformers=={SHARDED_TRANSFORMERS}, or {instead}"
    )


def why_model_is_not_sharded(module: str, name: str, has_policy: bool = True) -> str | None:
    """Return why a model is not sharded with the transformers that is installed, in a sentence; None where it is.

    Args:
        module, name: of its class.
        has_policy: whether Colossal-AI has a policy for it, for whatever transformers.
    """
    installed, numbers = _installed_transformers()
    known = {folder: family for folder, family in FAMILIES_OF_5.items() if numbers >= _5 or folder != "mixtral"}
    if numbers < _LAST_4 or module in {f"transformers.models.{folder}.modeling_{folder}" for folder in known}:
        return None
    if not has_policy:
        return f"Colossal-AI 0.5.0 shards no {name}, with any transformers; {_OTHERS}"
    families = ", ".join(known.values())
    return (
        f"Colossal-AI 0.5.0 shards {name} of transformers {SHARDED_TRANSFORMERS} alone, and transformers "
        f"{installed} is installed, of which {families} are sharded; pip install "
        f"transformers=={SHARDED_TRANSFORMERS}, or {_OTHERS}"
    )


def require_sharding(plugin: str) -> None:
    """Raise ImportError, with a sentence that says what to do, where a plugin could not shard any model.

    Args:
        plugin: its name, with the argument that makes it shard models.
    """
    reason = why_not_sharded(plugin, _OTHERS)
    if reason is not None:
        raise ImportError(reason)
