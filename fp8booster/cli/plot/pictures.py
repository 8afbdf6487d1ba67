"""The picture of a run's losses that its summary shows, by matplotlib."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fp8booster.files import naming

_CURVES = ({"linewidth": 3.5, "alpha": 0.55}, {"linewidth": 1.1})
_COLORS = ("#2f7fd6", "#d9622b")


def save_losses(path: Path, curves: Mapping[str, Mapping[int, float]], title: str) -> None:
    """Draw losses by steps into a PNG; of two, below, the relative difference from the first."""
    several = len(curves) > 1
    with rc_context({"text.parse_math": False}):
        figure = Figure(figsize=(8, 6 if several else 4.5), layout="constrained")
        panels = figure.subplots(1 + several, 1, sharex=True, squeeze=False, height_ratios=[3, 1.4][: 1 + several])[
            :, 0
        ]
        for (name, losses), style, color in zip(curves.items(), _CURVES[not several :], _COLORS, strict=False):
            panels[0].plot(list(losses), list(losses.values()), label=name, color=color, **style)
        panels[0].set(title=title, ylabel="loss")
        panels[0].legend(frameon=False)
        if several:
            (base, first), (_, other) = curves.items()
            shared = {step: 100 * (other[step] / first[step] - 1) for step in other if step in first}
            panels[1].axhline(0, color="black", linewidth=0.6)
            panels[1].plot(list(shared), list(shared.values()), linewidth=0.9, color=_COLORS[1])
            panels[1].set_ylabel(f"from {base}, %")
        for axes in panels:
            axes.grid(alpha=0.6, linewidth=0.5)
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
        with naming(path):
            figure.savefig(path, dpi=120)
