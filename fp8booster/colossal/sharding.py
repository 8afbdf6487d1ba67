"""Which models Colossal-AI can shard, with the transformers that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SHARDED_TRANSFORMERS = "4.51.3"
"""The version that Colossal-AI 0.5.0 was written for: all models that it has policies for are sharded."""

FAMILIES_OF_5 = {"llama": "LLaMA", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
"""Folders of `transformers.models`, and their names in messages: sharded with transformers 5 too (`tensor/body.py`)."""

_OTHERS = "use LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin or GeminiPlugin without tensor parallelism"


def installed_transformers() -> str | None:
    """Its version; None without one."""
    try:
        return version("transformers")
    except PackageNotFoundError:
        return None


def is_transformers_5() -> bool:
    """Whether its major version is 5, or a later one."""
    installed = installed_transformers()
    return installed is not None and _is_major_5(installed)


def why_not_sharded(what: str, instead: str) -> str | None:
    """Why tensor, sequence, pipeline and expert parallelism do not run here, in a sentence; None where they do.

    Args:
        what: shards models; the sentence begins with it.
        instead: does what can be done without another transformers; the sentence ends with it.
    """
    installed = installed_transformers()
    if installed is None or _is_4_51(installed) or _is_newer(installed):
        return None
    return (
        f"{what} shards models of transformers {SHARDED_TRANSFORMERS}, 4.57 and 5, and transformers {installed} is "
        f"installed; pip install transformers=={SHARDED_TRANSFORMERS}, or {instead}"
    )


def why_model_is_not_sharded(module: str, name: str) -> str | None:
    """Why a model is not sharded with the transformers that is installed, in a sentence; None where it is.

    Args:
        module, name: of its class.
    """
    installed = installed_transformers()
    if installed is None or not _is_newer(installed):
        return None
    # 4.57 has experts in modules of its own
    known = {
        folder: family for folder, family in FAMILIES_OF_5.items() if _is_major_5(installed) or folder != "mixtral"
    }
    if module in {f"transformers.models.{folder}.modeling_{folder}" for folder in known}:
        return None
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


def _is_4_51(installed: str) -> bool:
    return installed.split(".")[:2] == SHARDED_TRANSFORMERS.split(".")[:2]


def _is_newer(installed: str) -> bool:
    """Whether models are those of 5, as far as sharding asks: from the last 4 on."""
    return tuple(int(part) for part in installed.split(".")[:2]) >= (4, 57)


def _is_major_5(installed: str) -> bool:
    return int(installed.partition(".")[0]) >= 5
