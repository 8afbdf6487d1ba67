"""The loss curves of a run as a picture."""

from __future__ import annotations

from pathlib import Path

from .metrics import StepMetrics

_STYLE = {"bf16": {"color": "tab:blue", "linewidth": 4.0, "alpha": 0.45}, "fp8": {"color": "tab:red", "linewidth": 1.0}}


def plot_losses(curves: dict[str, list[StepMetrics]], title: str, path: Path) -> None:
    """Draw the loss of each precision over steps to a PNG; of two, their relative difference below as well."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    both = len(curves) == 2
    figure = Figure(figsize=(8, 6 if both else 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2 if both else 1, 1, sharex=True, squeeze=False, height_ratios=[3, 1] if both else [1])
    top = panels[0][0]
    for precision, metrics in curves.items():
        top.plot(
            [step.step for step in metrics],
            [step.loss for step in metrics],
            label=precision.upper(),
            **_STYLE[precision],
        )
    top.set_title(title)
    top.set_ylabel("loss")
    top.grid(alpha=0.3)
    top.legend()
    if both:
        (first, base), (second, other) = curves.items()
        losses = {step.step: step.loss for step in base}
        shared = [(step.step, 100 * (step.loss / losses[step.step] - 1)) for step in other if step.step in losses]
        panels[1][0].plot(*zip(*shared, strict=True), color="black", linewidth=0.8)
        panels[1][0].axhline(0, color="gray", linewidth=0.8)
        panels[1][0].set_ylabel(f"{second.upper()} - {first.upper()}, %")
        panels[1][0].grid(alpha=0.3)
    panels[-1][0].set_xlabel("step")
    figure.savefig(path, dpi=120)
