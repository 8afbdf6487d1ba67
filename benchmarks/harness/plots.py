"""Plots of results."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot_lines(
    path: Path, *, title: str, x_label: str, y_label: str, x: Sequence[float], lines: Mapping[str, Sequence[float]]
) -> None:
    """Write lines over sizes that double from one to the next, measured ones solid and rooflines dashed, as a PNG."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, values in lines.items():
        floor = name.startswith("roofline")
        axes.plot(x, values, label=name, linestyle="--" if floor else "-", marker="" if floor else "o")
    axes.set_xscale("log", base=2)
    axes.set_xticks(x, [f"{value:g}" for value in x])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_bars(
    path: Path, *, title: str, y_label: str, values: Mapping[str, float], captions: Mapping[str, str]
) -> None:
    """Write one bar for each name, its caption above it, as a PNG."""
    figure, axes = plt.subplots(figsize=(max(5, 1.6 * len(values) + 1), 4.5), layout="constrained")
    colors = [f"C{index}" for index in range(len(values))]
    bars = axes.bar([textwrap.fill(name, 16) for name in values], list(values.values()), color=colors)
    axes.bar_label(bars, [captions[name] for name in values], padding=3, fontsize="small")
    axes.margins(y=0.15)
    axes.set(title=title, ylabel=y_label)
    axes.tick_params(axis="x", labelsize="small")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_differences(
    path: Path, *, title: str, x_label: str, y_label: str, lines: Mapping[str, Mapping[float, tuple[float, float]]]
) -> None:
    """Write lines of (value, error) by x around zero, as a PNG; an error that is NaN is left out."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    axes.axhline(0, color="gray", linewidth=1)
    for name, points in lines.items():
        values, errors = zip(*points.values(), strict=True)
        axes.errorbar(list(points), values, yerr=errors, label=name, marker="o", capsize=3)
    axes.set(title=title, xlabel=x_label, ylabel=y_label)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def plot_points(
    path: Path, *, title: str, x_label: str, kinds: Mapping[str, Mapping[str, tuple[float, float]]]
) -> None:
    """Write (value, error) of names, a line each, of one or more kinds, as a PNG; an error that is NaN is left out."""
    names = list(dict.fromkeys(name for points in kinds.values() for name in points))
    figure, axes = plt.subplots(figsize=(7, 1.5 + 0.45 * len(names)), layout="constrained")
    axes.axvline(0, color="gray", linewidth=1)
    for number, (kind, points) in enumerate(kinds.items()):
        heights = [names.index(name) + 0.2 * (number - (len(kinds) - 1) / 2) for name in points]
        values, errors = zip(*points.values(), strict=True)
        axes.errorbar(values, heights, xerr=errors, label=kind, fmt="o", capsize=3)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(title=title, xlabel=x_label)
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    plt.close(figure)
