"""Whether Colossal-AI can shard the models of the transformers that is installed."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

SHARDED_TRANSFORMERS = "4.51.3"
"""The version whose models Colossal-AI 0.5.0 shards: its policies replace forwards as that version writes them, and
import names that later ones have not (shardformer/policies/llama.py, `StaticCache`)."""


def why_not_sharded(what: str, instead: str) -> str | None:
    """Why tensor, sequence, pipeline and expert parallelism do not run here, in a sentence; None where they do.

    Args:
        what: shards models; the sentence begins with it.
        instead: does what can be done without another transformers; the sentence ends with it.
    """
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return None
    if installed.split(".")[:2] == SHARDED_TRANSFORMERS.split(".")[:2]:
        return None
    return (
        f"{what} shards models by Colossal-AI 0.5.0, which knows those of transformers {SHARDED_TRANSFORMERS} alone, "
        f"and transformers {installed} is installed; pip install transformers=={SHARDED_TRANSFORMERS}, or {instead}"
    )


def require_sharding(plugin: str) -> None:
    """Raise ImportError, with a sentence that says what to do, where a plugin could not shard any model.

    Args:
        plugin: its name, with the argument that makes it shard models.
    """
    reason = why_not_sharded(
        plugin, "use LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin or GeminiPlugin without tensor parallelism"
    )
    if reason is not None:
        raise ImportError(reason)
