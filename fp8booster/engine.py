"""The limits of each way of training: which options of `FP8Config` it does not use, and why."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from operator import attrgetter

from fp8booster.config import FP8Config

BY_BLOCK = "gradients are scaled by block; use LowLevelZeroPlugin, or leave the option out"


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The limits of what trains a model: a plugin's engine, found when the plugin is made, or PyTorch's own.

    A sentence is the reason why an option has no effect, and what to do; None: it has its effect.
    """

    high_precision_weights: str | None
    transposes: str | None = None
    messages: str | None = None
    automatic_scaling: str | None = None
    gradient_accumulation: str | None = (
        "gradients add up as they are here; use LowLevelZeroPlugin, or leave the option out"
    )
    cuda_graphs: str | None = None

    update_in_backward: str | None = "this plugin updates when all gradients are reduced; use LowLevelZeroPlugin"
    """An option of the optimizer, which is refused."""

    in_buffers: bool = False
    """Trainable parameters lie one after the other in buffers, of which each rank has a part."""

    sparse_gradients: bool = False
    """Sparse gradients are reduced."""

    def no_effect(self, config: FP8Config, argument: str = "config") -> list[str]:
        """Return a sentence for each option that differs from its default and changes nothing here.

        Args:
            config: as the user gave it.
            argument: its name.
        """
        return [
            f"{argument}.{name}={attrgetter(name)(config)!r} has no effect: {reason}"
            for name, reason in self._unused(config).items()
        ]

    def used(self, config: FP8Config) -> FP8Config:
        """Return a configuration with defaults in place of the options that have no effect here."""
        for name in self._unused(config):
            default = attrgetter(name)(_DEFAULT)
            of, _, part = name.partition(".")
            config = replace(config, **{of: replace(getattr(config, of), **{part: default}) if part else default})
        return config

    def used_with_warnings(self, config: FP8Config, *, stacklevel: int) -> FP8Config:
        """Return what `used` does, and warn of each option that has no effect.

        Args:
            config: as in `no_effect`.
            stacklevel: as of `warnings.warn`, counted from the caller, which is 1.
        """
        for sentence in self.no_effect(config):
            warnings.warn(sentence, stacklevel=stacklevel + 1)
        return self.used(config)

    def _unused(self, config: FP8Config) -> dict[str, str]:
        """Return the reasons of the options without effect that differ from their defaults."""
        reasons = {
            "weight_copies.high_precision": self.high_precision_weights,
            "weight_copies.transposes": self.transposes,
            "messages": self.messages,
            # a part of what is named already, or of nothing
            "messages.automatic_scaling": None if self.messages or not config.messages else self.automatic_scaling,
            # False asks for what is done
            "cuda_graphs": self.cuda_graphs if config.cuda_graphs else None,
            "gradient_accumulation": self.gradient_accumulation,
        }
        return {
            name: reason
            for name, reason in reasons.items()
            if reason is not None and attrgetter(name)(config) != attrgetter(name)(_DEFAULT)
        }


_DEFAULT = FP8Config()


DDP = Engine(
    high_precision_weights="DDP sends no weights, and trains those of the model; use LowLevelZeroPlugin, or leave the "
    "option out",
    automatic_scaling=f"DDP's {BY_BLOCK}",
)
"""PyTorch's DistributedDataParallel, and a model that one process trains."""

FSDP = Engine(
    high_precision_weights="FSDP frees by itself what it gathers; leave the option out",
    transposes="FSDP's layers keep no transposes from forward to backward; leave the option out",
    automatic_scaling=f"FSDP's {BY_BLOCK}",
)
"""PyTorch's FSDP and FSDP2."""
