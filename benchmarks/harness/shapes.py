"""The linear layers that are measured, and the three products of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fp8booster.training.models import MODELS, Architecture

DIRECTIONS = ("fprop", "dgrad", "wgrad")


def layers_of(model: Architecture, *, separate: bool, fused: bool) -> list[tuple[str, int, int]]:
    """Layers as (name, K, N): each projection by itself, and those that read one input as one product."""
    hidden, feed_forward, key_value = model.hidden, model.feed_forward, model.key_value
    if key_value == hidden:
        attention = [("q,k,v,o", hidden, hidden)]
    else:
        attention = [("q,o", hidden, hidden), ("k,v", hidden, key_value)]
    apart = [*attention, ("gate,up", hidden, feed_forward), ("down", feed_forward, hidden)]
    together = [("q+k+v", hidden, hidden + 2 * key_value), ("gate+up", hidden, 2 * feed_forward)]
    return (apart if separate else []) + (together if fused else [])


PUBLISHED_LAYER = "te"
"""Name of the one layer that Transformer Engine's documentation measures, at its own number of tokens."""

MODEL_NAMES = ("7b", "13b", "70b", "35b", "micro", PUBLISHED_LAYER)


@dataclass(frozen=True)
class Workload:
    """A linear layer over M tokens, from K to N features, and the layers of models that have this shape."""

    m: int
    k: int
    n: int
    labels: tuple[str, ...]

    @property
    def label(self) -> str:
        """For tables."""
        return "; ".join(self.labels)

    @property
    def shape(self) -> str:
        """For tables: tokens, input features, output features."""
        return f"{self.m} x {self.k} -> {self.n}"

    @property
    def flops(self) -> int:
        """Floating-point operations of one of the three products; all have the same."""
        return 2 * self.m * self.k * self.n

    def product(self, direction: str) -> tuple[int, int, int]:
        """(rows, inner size, columns) of one product: y = x w.T, dx = dy w, dw = dy.T x."""
        return {
            "fprop": (self.m, self.k, self.n),
            "dgrad": (self.m, self.n, self.k),
            "wgrad": (self.n, self.m, self.k),
        }[direction]


def workloads(
    models: Sequence[str], tokens: Sequence[int], *, separate: bool = True, fused: bool = False
) -> list[Workload]:
    """The layers of models, each shape once.

    Args:
        models: names in `MODEL_NAMES`.
        tokens: the values of M.
        separate: projections one by one.
        fused: q, k and v as one product, and gate and up.

    Raises:
        ValueError: a name that no model has.
    """
    labels: dict[tuple[int, int, int], list[str]] = {}
    for name in models:
        if name == PUBLISHED_LAYER:
            labels.setdefault((15872, 4096, 16384), []).append("Transformer Engine's documentation")
        elif name in MODEL_NAMES:
            for m in tokens:
                for layer, k, n in layers_of(MODELS[name], separate=separate, fused=fused):
                    labels.setdefault((m, k, n), []).append(f"{MODELS[name].label} {layer}")
        else:
            raise ValueError(f"no model is called {name!r}; use {', '.join(MODEL_NAMES)}")
    return [Workload(*shape, tuple(names)) for shape, names in labels.items()]
