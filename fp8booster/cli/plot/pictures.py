"""Pictures of a run for a page and a summary, by matplotlib: losses, scales, shares flushed to zero and noise."""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize, to_hex
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fp8booster.files import naming

_INK, _RULE = "#010203", "#040506"
"""Stand for the page's colours of text and of rules, which differ between light and dark."""

_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "fp8booster",
    "font.family": "sans-serif",
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK),
    "grid.color": _RULE,
}
_CURVES = ({"linewidth": 3.5, "alpha": 0.55}, {"linewidth": 1.1}, {"linewidth": 1.1, "linestyle": "--"})
_COLORS = ("#2f7fd6", "#d9622b", "#8a63c9", "#2c9a6b")
_DEPTH = LinearSegmentedColormap.from_list("depth", ["#2f7fd6", "#9a62c4", "#d9622b"])  # all legible on white and black
_NO_METADATA = dict.fromkeys(("Date", "Creator", "Format", "Type"))
_MARGINS = {"left": 0.15, "right": 0.8}  # of a panel
_WIDTH = 3.6  # inches of a panel, whose text a telephone shows legibly

Box = tuple[float, float, float, float]
"""Left, top, right and bottom of the axes, in units of the drawing."""


def draw_losses(
    curves: Mapping[str, Mapping[int, float]], title: str, width: float = 8.0, font: float = 10.0
) -> Figure:
    """Draw losses by steps; of two or more, below, their relative difference from the first."""
    several = len(curves) > 1
    with rc_context(_STYLE | {"font.size": font}):
        figure = Figure(figsize=(width, 0.3 * width + (3.6 if several else 2.1)), layout="constrained")
        panels = figure.subplots(
            1 + several, 1, sharex=True, squeeze=False, height_ratios=[3, 1.4] if several else [1]
        )[:, 0]
        for number, (name, losses) in enumerate(curves.items()):
            style = _CURVES[min(number, 2)] if several else _CURVES[1]
            panels[0].plot(
                list(losses), list(losses.values()), label=name, color=_COLORS[number % len(_COLORS)], **style
            )
        panels[0].set(title=title, ylabel="loss")
        panels[0].legend(frameon=False)
        if several:
            base, first = next(iter(curves.items()))
            panels[1].axhline(0, color=_INK, linewidth=0.6)
            for number, (_, losses) in enumerate(list(curves.items())[1:], 1):
                shared = {step: 100 * (losses[step] / first[step] - 1) for step in losses if step in first}
                panels[1].plot(list(shared), list(shared.values()), linewidth=0.9, color=_COLORS[number % len(_COLORS)])
            panels[1].set_ylabel(f"from {base}, %")
        for axes in panels:
            axes.grid(alpha=0.6, linewidth=0.5)
        panels[-1].set_xlabel("step")
        panels[-1].xaxis.set_major_locator(MaxNLocator(6, integer=True))
    return figure


def save_losses(path: Path, curves: Mapping[str, Mapping[int, float]], title: str) -> None:
    """Draw losses into a PNG."""
    with naming(path):
        draw_losses(curves, title).savefig(path, dpi=120)


def draw_axes(limits: Box, layers: int) -> Figure:
    """Draw axes for lines that the page draws itself, one for each layer in the colours of `depth_color`."""
    with rc_context(_STYLE | {"font.size": 8}):
        figure = Figure(figsize=(_WIDTH, 2.1))
        axes = figure.subplots(gridspec_kw=_MARGINS | {"top": 0.97, "bottom": 0.20})
        left, top, right, bottom = limits
        axes.set(xlabel="step", ylabel="log2 of scale", xlim=(left, right), ylim=(bottom, top))
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.grid(alpha=0.6, linewidth=0.5)
        _add_bar(figure, axes, ScalarMappable(Normalize(0, max(layers - 1, 1)), _DEPTH), "layer")
    return figure


def depth_color(layer: int, layers: int) -> str:
    return to_hex(_DEPTH(layer / max(layers - 1, 1)))


def draw_map(steps: Sequence[int], rows: np.ndarray, labels: Sequence[str], norm: Normalize, colors: str) -> Figure:
    """Draw a cell for each row and step; a missing value stays empty.

    Args:
        labels: of rows: numbers of layers, and names in lines that fit left of the axes.
    """
    numbered = any(label.isdigit() for label in labels)
    letters = max(len(line) for label in labels for line in label.splitlines())
    height = min(3.5, max(1.6, 0.5 + 0.35 * len(labels)))
    with rc_context(_STYLE | {"font.size": 8}):
        figure = Figure(figsize=(_WIDTH, height))
        left = max(0.54, 0.12 + 0.07 * letters + 0.2 * numbered) / _WIDTH  # inches of the text, which a browser draws
        axes = figure.subplots(gridspec_kw=_MARGINS | {"top": 1 - 0.07 / height, "bottom": 0.42 / height, "left": left})
        image = axes.imshow(rows, aspect="auto", interpolation="none", norm=norm, cmap=colors)
        columns = range(0, len(steps), -(-len(steps) // 5))
        axes.set_xticks(columns, [str(steps[column]) for column in columns])
        starts = [row for row in range(len(labels)) if row == 0 or labels[row] != labels[row - 1]]
        lines = 1 + max(label.count("\n") for label in labels)
        starts = _apart(starts[:: -(-len(starts) // 8)], len(labels) * lines * 0.15 / (height - 0.5))
        axes.set_yticks(starts, [labels[row] for row in starts])
        axes.set(xlabel="step", ylabel="layer" if numbered else "")
        _add_bar(figure, axes, image, "").ax.minorticks_off()
    return figure


def _apart(rows: Sequence[int], least: float) -> list[int]:
    """Drop rows, which ascend, that are too close to the one before."""
    kept: list[int] = []
    for row in rows:
        if not kept or row - kept[-1] >= least:
            kept.append(row)
    return kept


def _add_bar(figure: Figure, axes: Axes, colors: ScalarMappable, label: str) -> Colorbar:
    place = axes.get_position()
    bar = figure.add_axes((0.82, place.y0, 0.02, place.height), label="<colorbar>")
    found = figure.colorbar(colors, cax=bar, label=label, format="{x:g}")
    found.outline.set_visible(False)
    return found


def flushed_norm(most: float) -> Normalize:
    """Return colours of percentages: by powers of ten up to the largest, as small shares differ by these."""
    return LogNorm(1e-4, max(most, 1.0), clip=True)


def as_svg(figure: Figure, prefix: str) -> tuple[str, list[Box]]:
    """Return a drawing to be part of a page, and the boxes of its axes, but for colour bars.

    Args:
        prefix: of its identifiers, for those of a page's drawings must differ.
    """
    stream = io.StringIO()
    with rc_context(_STYLE):
        figure.savefig(stream, format="svg", transparent=True, metadata=_NO_METADATA)
    drawn = stream.getvalue()
    drawn = drawn[drawn.index("<svg") :]
    drawn = re.sub(r' (?:xmlns(?::xlink)?|version|width|height)="[^"]*"', "", drawn, count=5)
    drawn = re.sub(r'(\bid="|"#|url\(#)', rf"\g<1>{prefix}-", drawn).replace("xlink:href", "href")
    drawn = drawn.replace("\nL ", " ")  # a path's points are joined by lines without being told
    drawn = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), drawn)
    drawn = drawn.replace(_INK, "var(--ink)").replace(_RULE, "var(--rule)")
    width, height = (72 * inches for inches in figure.get_size_inches())
    panels = (axes for axes in figure.axes if isinstance(axes, Axes) and axes.get_label() != "<colorbar>")
    places = [axes.get_position() for axes in panels]
    return drawn, [
        (place.x0 * width, (1 - place.y1) * height, place.x1 * width, (1 - place.y0) * height) for place in places
    ]
