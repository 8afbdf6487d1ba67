"""Linear layers of one input, as one product of them is held beside the module that has the layers."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn


class LayersOfOneInput:
    """What `merged.MergedLayers` and `merged_linear.MergedLinears` share.

    Args:
        layers: in the order of their outputs.
    """

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = tuple(layers)
        self._why_replaced: str | None = None

    @property
    def weights(self) -> list[nn.Parameter]:
        """The layers' weights, in the order of their outputs."""
        return [layer.weight for layer in self.layers]

    def stands_for(self, *called: nn.Module) -> bool:
        """Whether these are the layers still; one may have been replaced since, as by an adapter of PEFT's.

        Args:
            called: what the module that has the layers would call one by one now.
        """
        why = None if called == self.layers else "a layer was replaced, as by an adapter"
        if why != self._why_replaced:
            self._why_replaced = why
        return why is None
