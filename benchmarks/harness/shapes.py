"""The linear layers that are measured, and the three products of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DIRECTIONS = ("fprop", "dgrad", "wgrad")


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder's linear layers."""

    label: str
    hidden: int
    feed_forward: int
    heads: int
    key_value_heads: int

    @property
    def key_value(self) -> int:
        """Output features of k, and of v."""
        return self.hidden // self.heads * self.key_value_heads

    def layers(self, *, separate: bool, fused: bool) -> list[tuple[str, int, int]]:
        """Layers as (name, K, N): each projection by itself, and those that read one input as one product."""
        if self.key_value == self.hidden:
            attention = [("q,k,v,o", self.hidden, self.hidden)]
        else:
            attention = [("q,o", self.hidden, self.hidden), ("k,v", self.hidden, self.key_value)]
        apart = [*attention, ("gate,up", self.hidden, self.feed_forward), ("down", self.feed_forward, self.hidden)]
        together = [
            ("q+k+v", self.hidden, self.hidden + 2 * self.key_value),
            ("gate+up", self.hidden, 2 * self.feed_forward),
        ]
        return (apart if separate else []) + (together if fused else [])


MODELS = {
    "7b": Model("LLaMA-7B", 4096, 11008, 32, 32),
    "13b": Model("LLaMA-13B", 5120, 13824, 40, 40),
    "70b": Model("LLaMA-70B", 8192, 28672, 64, 8),
    "35b": Model("Command-R 35B", 8192, 22528, 64, 64),
    "tiny": Model("tiny", 64, 96, 4, 2),
}
"""Hidden and feed-forward sizes and heads as in each model's published configuration; "tiny" is for tests."""

PUBLISHED_LAYER = "te"
"""Name of the one layer that Transformer Engine's documentation measures, at its own number of tokens."""

MODEL_NAMES = (*MODELS, PUBLISHED_LAYER)


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
        elif name in MODELS:
            for m in tokens:
                for layer, k, n in MODELS[name].layers(separate=separate, fused=fused):
                    labels.setdefault((m, k, n), []).append(f"{MODELS[name].label} {layer}")
        else:
            raise ValueError(f"no model is called {name!r}; use {', '.join(MODEL_NAMES)}")
    return [Workload(*shape, tuple(names)) for shape, names in labels.items()]
