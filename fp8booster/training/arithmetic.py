"""Count the floating-point operations of a training step, and the rate at which a GPU could do them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fp8booster.nn.linear.speed_model import Rates
from fp8booster.nn.report import report

_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""What configs call the number of experts of a block."""


@dataclass(frozen=True)
class TokenFlops:
    """The floating-point operations that one token of a training step needs.

    Recomputation counts as nothing, nor do embeddings, norms and other pointwise parts.
    """

    products: Mapping[str, int]
    """2 for each weight of a product that a token goes through, by the weight's name in `fp8booster.report`."""

    frozen: frozenset[str]
    """Those whose weight does not train: they run twice, others three times."""

    attention: int
    """Of scores and values in forward and backward, the half that a causal mask leaves."""

    @property
    def total(self) -> int:
        """Return the sum."""
        return self.attention + sum(self._passes(name) * flops for name, flops in self.products.items())

    def _passes(self, name: str) -> int:
        return 2 if name in self.frozen else 3

    def reachable(self, passes: Mapping[str, Sequence[str]], rates: Rates) -> float:
        """Return the operations a second at which a GPU could do all of these and nothing else.

        Args:
            passes: what fprop, dgrad and wgrad of products compute in, as `LayerRow.passes`; one of no row, and
                attention, in 16 bits.
            rates: of the GPU's products.
        """
        seconds = self.attention / rates.bf16
        for name, flops in self.products.items():
            kinds = passes.get(name, ("BF16",) * 3)[: self._passes(name)]
            seconds += sum(flops / (rates.fp8 if kind == "FP8" else rates.bf16) for kind in kinds)
        return self.total / seconds


def token_flops(model: Any, sequence: int) -> TokenFlops:
    """Count the operations of a token of a transformers model that is whole, before an engine shards it.

    Args:
        model: with or without adapters; on any device, "meta" too.
        sequence: tokens that attention reads; packed documents count as one.

    Raises:
        ValueError: the config does not tell its attention heads, or how many experts a token goes through.
    """
    # its names are those of the model that peft changes
    model = model.get_base_model() if hasattr(model, "get_base_model") else model
    config = model.config.get_text_config()
    found = report(model)
    products, frozen = {}, set()
    for row in (*found.rows, *found.outside):
        products[row.name] = 2 * row.weights
        if "experts" in row.name.split("."):
            products[row.name] = round(products[row.name] * _chosen(config))
        if row.passes[2] == "none":
            frozen.add(row.name)
    return TokenFlops(products, frozenset(frozen), _attention(config, sequence))


def experts_of(config: Any) -> int | None:
    """Return how many experts a config gives each of its mixtures; None: it names none."""
    return next((count for name in _EXPERTS if (count := getattr(config, name, None))), None)


def _chosen(config: Any) -> float:
    """The share of experts that a token goes through."""
    count = experts_of(config)
    chosen = getattr(config, "num_experts_per_tok", None)
    if count is None or chosen is None:
        raise ValueError(
            f"the config of {type(config).__name__} does not tell how many experts a token goes through; give it "
            "num_experts_per_tok and num_local_experts"
        )
    return float(chosen / count)


def _attention(config: Any, sequence: int) -> int:
    """Operations of a token's scores and values, forward once and backward twice."""
    heads, layers = (getattr(config, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
    if not isinstance(heads, int) or not isinstance(layers, int):
        raise ValueError(
            f"the config of {type(config).__name__} does not tell how many heads attention has; give it "
            "num_attention_heads and num_hidden_layers"
        )
    features = getattr(config, "head_dim", None) or config.hidden_size // heads
    # the two are of other sizes in latent attention
    both = (getattr(config, "qk_head_dim", None) or features) + (getattr(config, "v_head_dim", None) or features)
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    keys = sum(_keys(kind, sequence, window) for kind in kinds)
    return round(3 * 2 * keys * heads * both)


def _keys(kind: str, sequence: int, window: int | None) -> float:
    """How many keys a token attends to in a layer, on average over a causal sequence."""
    if kind == "full_attention" or (kind == "sliding_attention" and (window is None or window >= sequence)):
        return sequence / 2
    # the first tokens of a sequence see no whole window; linear attention has no keys
    return window - window**2 / (2 * sequence) if kind == "sliding_attention" and window is not None else 0.0
