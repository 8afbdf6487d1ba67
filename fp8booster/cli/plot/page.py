"""One HTML file about a run, which opens without a network: the template is `page.html`."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from fp8booster.cli.metrics import not_in_fp8
from fp8booster.files import write_whole

from .advice import FLUSHED, SATURATED, Scales, Tensor, depth_of, least_snr
from .pictures import Box, as_svg, depth_color, draw_axes, draw_losses, draw_map, flushed_norm
from .run import PAGE, PRECISIONS, Losses, RunRecord

_STEPS = 100  # samples that are drawn, at most
_CELLS = 70_000  # of a role's tensors by steps: together with the lines some 2 MB
_BLOCKS = 300  # of a loss curve, of each the lowest and the highest
_KINDS = 11  # panels of lines, and one for what is left
_SHOWN, _LISTED = 15, 1000  # rows of the table, and of that with all
_LINES = ("weight", "input", "output gradient")
_NO_LAYER = 1 << 16  # sorts tensors of no decoder layer behind all others
_LINE = 15  # letters of a name beside a map
_SNR = (5.0, 35.0)  # dB, from noise that hides the values to E4M3's own
_SCALES_NOTE = (
    "The binary logarithm of what values are multiplied by before the cast, a panel for each kind of layer, as in "
    "Perez et al. (arXiv 2309.17224)."
)


@dataclass(frozen=True)
class Picture:
    """A drawing, and the places of its data in it."""

    title: str
    svg: Markup
    text: str  # a description in words
    chart: dict[str, Any]
    """For the page's script: "kind", "box" of the axes and their "limits", "set", "rows" and "quantity" of the data,
    "label" and "unit", and "colors" where the script draws the lines."""
    shown: str = ""  # CSS class of the widths that show it; "": all


class _Page:
    """Draws pictures, and keeps the data that they share."""

    def __init__(self) -> None:
        self.data: list[dict[str, Any]] = []
        self._drawn = 0

    def keep(self, names: Sequence[str], steps: Sequence[int], **quantities: list[list[float | None]]) -> int:
        """Keep values by names and steps; return the number of the set."""
        self.data.append({"names": list(names), "steps": [int(step) for step in steps], **quantities})
        return len(self.data) - 1

    def draw(self, figure: Figure) -> tuple[Markup, dict[str, Any]]:
        """Return the drawing, and the box of its axes for the page's script."""
        self._drawn += 1
        svg, boxes = as_svg(figure, f"p{self._drawn}")
        return Markup(svg), {"box": [round(float(value), 1) for value in boxes[0]]}


def require_replaceable(path: Path) -> None:
    """Raise ValueError for a place at which something other than a page would be lost."""
    if path.is_dir():
        raise ValueError(f"--out {path} is a folder; give the page's file, as {path / PAGE}.")
    if path.exists() and not (path.is_file() and _is_page(path)):  # a pipe would never end
        raise ValueError(f"--out {path} is there and no HTML page, and is left as it is; give another file.")


def _is_page(file: Path) -> bool:
    """Tell whether a file begins as a page, or is empty."""
    beginning = b"<!doctype html"
    with file.open("rb") as stream:
        return stream.read(len(beginning)).lower() in (b"", beginning)


def write_page(path: Path, run: RunRecord, against: RunRecord | None = None) -> None:
    """Write the page of a run, its losses compared with those of another run."""
    page, scales = _Page(), run.scales
    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], "."), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters.update(share=_share, digits=_digits, least_snr=least_snr)
    sections = _loss_section(page, _curves(run, against))
    if scales and scales.tensors:
        sections += _scale_sections(page, scales)
    text = environment.get_template("page.html").render(
        run=run,
        name=run.folder.absolute().name,
        against=against,
        facts=_facts(run),
        shown=_SHOWN,
        listed=_LISTED,
        limits={"saturated": SATURATED, "flushed": FLUSHED},
        configuration=run.scales.about["config"] if run.scales else {},
        sections=sections,
        data=page.data,
    )
    write_whole(path, text)


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    facts = [(name, str(run.about[name])) for name in ("command", "hardware", "versions", "date") if name in run.about]
    for name, losses in run.losses.items():
        if losses:
            facts.append((f"loss, {_called(name)}", f"{losses[max(losses)]:.4f} at step {max(losses)}"))
    if run.in_fp8:
        facts.append(("linear layers in FP8", run.in_fp8))
    facts += [("not in FP8", line) for line in not_in_fp8(run.layers or ())]
    if run.scales:
        tensors, samples, every = len(run.scales.tensors), run.scales.samples, run.scales.about["every"]
        facts.append(("recorded", f"{tensors} tensors at {samples} steps, every {every}"))
    return facts


def _curves(run: RunRecord, against: RunRecord | None) -> dict[str, Losses]:
    """Return losses by their names on the page; the others are compared with the first."""
    curves = {_called(name): losses for name, losses in run.losses.items()}
    if against is None or not against.losses:
        return curves
    precision, losses = list(against.losses.items())[-1]
    other = against.folder.absolute().name
    other = other if other != run.folder.absolute().name else str(against.folder)
    return {other if precision == other else f"{other} {precision.upper()}": losses, **curves}


def _called(name: str) -> str:
    return name.upper() if name in PRECISIONS else name


def _loss_section(page: _Page, curves: Mapping[str, Losses]) -> list[dict[str, Any]]:
    curves = {name: losses for name, losses in curves.items() if losses}
    if not curves:
        return []
    steps = sorted({step for losses in curves.values() for step in _extremes(losses)})
    drawn = {name: {step: losses[step] for step in steps if step in losses} for name, losses in curves.items()}
    values = [[_rounded(losses.get(step), 5) for step in steps] for losses in curves.values()]
    number = page.keep(list(curves), steps, loss=values)
    last = ", ".join(f"{name} {losses[max(losses)]:.4f}" for name, losses in curves.items())
    chart = {"kind": "lines", "set": number, "rows": list(range(len(curves))), "quantity": "loss"}
    pictures = []
    for shown, width in (("wide", 8.5), ("narrow", 3.6)):
        figure = draw_losses(drawn, "", width, font=9.0)
        (left, right), (bottom, top) = figure.axes[-1].get_xlim(), figure.axes[0].get_ylim()
        svg, place = page.draw(figure)
        place |= chart | {"limits": [left, top, right, bottom], "label": "loss", "unit": ""}
        pictures.append(Picture("", svg, f"Loss over steps; at the last step {last}.", place, shown))
    thinned = len(steps) < max(map(len, curves.values()))
    note = "Of each stretch of steps the lowest and the highest are drawn." if thinned else ""
    return [{"title": "Loss", "note": note, "pictures": pictures, "layout": "single"}]


def _extremes(losses: Losses) -> set[int]:
    """Return the steps of the lowest and the highest loss of each stretch, and the first and the last."""
    steps = sorted(losses)
    kept = {steps[0], steps[-1]}
    for block in np.array_split(np.array(steps), min(_BLOCKS, len(steps))):
        values = [losses[step] for step in block]
        kept |= {int(block[np.argmin(values)]), int(block[np.argmax(values)])}
    return kept


def _scale_sections(page: _Page, scales: Scales) -> list[dict[str, Any]]:
    flushed, noise = [], []
    lines: list[dict[str, Any]] = []
    most = 100 * max((float(np.nanmax(tensor.values["flushed"], initial=0)) for tensor in scales.tensors), default=0)
    roles = dict.fromkeys(tensor.role for tensor in scales.tensors)
    for role in sorted(roles, key=lambda role: _LINES.index(role) if role in _LINES else len(_LINES)):
        tensors = sorted((each for each in scales.tensors if each.role == role), key=_depth)
        steps = np.unique(np.concatenate([tensor.steps for tensor in tensors]))
        steps = _thinned(steps, max(2, min(_STEPS, _CELLS // len(tensors))))
        exponents = np.log2(_by_step(tensors, steps, "scale"))
        percent, snr = 100 * _by_step(tensors, steps, "flushed"), _by_step(tensors, steps, "snr_db")
        number = page.keep(
            [tensor.layer for tensor in tensors],
            steps,
            scale=[[_rounded(value, decimals=2) for value in row] for row in exponents],
            flushed=[[_rounded(value, 2) for value in row] for row in percent],
            snr=[[_rounded(value, decimals=1) for value in row] for row in snr],
        )
        labels = [_label(tensor) for tensor in tensors]
        for quantity, values, label, unit, norm, colors, pictures in (
            ("flushed", percent, "flushed", "%", flushed_norm(most), "cividis", flushed),
            ("snr", snr, "signal to noise", "dB", Normalize(*_SNR, clip=True), "cividis_r", noise),
        ):
            svg, place = page.draw(draw_map(steps, values, labels, norm, colors))
            place |= {"kind": "map", "set": number, "rows": list(range(len(tensors))), "quantity": quantity}
            place |= {"label": label, "unit": f" {unit}"}
            text = f"{label}, {role}: {len(tensors)} tensors by {len(steps)} steps, {_range(values, unit)}."
            pictures.append(Picture(f"{role}: {label}, {unit}", svg, text, place))
        if role in _LINES:
            panels = _line_panels(page, role, tensors, number, steps, exponents)
            lines.append({"title": f"Scales: {role}", "note": _SCALES_NOTE, "pictures": panels, "layout": "grid"})
    note = "Layer by layer; point at a cell or a line, or use the arrow keys, to read its value."
    return [
        {"title": "Share flushed to zero", "note": note, "pictures": flushed, "layout": "grid maps"},
        {"title": "Noise", "note": "Bright: much noise. Empty: no number.", "pictures": noise, "layout": "grid maps"},
        *lines,
    ]


def _line_panels(
    page: _Page, role: str, tensors: Sequence[Tensor], number: int, steps: np.ndarray, exponents: np.ndarray
) -> list[Picture]:
    kinds = [tensor.layer.rpartition(".")[2] for tensor in tensors]
    common = [kind for kind, _ in Counter(kinds).most_common(_KINDS)]
    kinds = [kind if kind in common else "others" for kind in kinds]
    found = exponents[np.isfinite(exponents)]
    if not found.size:
        return []
    top, bottom = math.ceil(found.max() + 0.5), math.floor(found.min() - 0.5)
    limits: Box = (float(steps[0]), top, float(max(steps[-1], steps[0] + 1)), bottom)
    layers = 1 + max((depth for tensor in tensors if (depth := _depth(tensor)) < _NO_LAYER), default=0)
    svg, place = page.draw(draw_axes(limits, layers))  # one for all, as they have the same limits
    pictures = []
    for kind in dict.fromkeys(kinds):
        rows = [row for row, each in enumerate(kinds) if each == kind]
        chart = {"kind": "lines", "set": number, "rows": rows, "quantity": "scale", "limits": limits}
        chart |= {"colors": [depth_color(min(_depth(tensors[row]), layers - 1), layers) for row in rows]}
        text = f"Binary logarithm of the scale, {role} of {len(rows)} layers {kind}: {_range(exponents[rows], '')}."
        pictures.append(Picture(f"{role}: {kind}", svg, text, place | chart | {"label": "log2 of scale", "unit": ""}))
    return pictures


def _by_step(tensors: Sequence[Tensor], steps: np.ndarray, name: str) -> np.ndarray:
    """Return a quantity as [tensors, steps], NaN where a tensor has no sample."""
    found = np.full((len(tensors), len(steps)), np.nan)
    for row, tensor in zip(found, tensors, strict=True):
        _, at, own = np.intersect1d(steps, tensor.steps, assume_unique=True, return_indices=True)
        row[at] = tensor.values[name][own]
    found[~np.isfinite(found)] = np.nan
    return found


def _thinned(steps: np.ndarray, most: int) -> np.ndarray:
    return steps[np.unique(np.linspace(0, len(steps) - 1, min(most, len(steps))).round().astype(int))]


def _depth(tensor: Tensor) -> int:
    depth = depth_of(tensor.layer)
    return _NO_LAYER if depth is None else depth


def _label(tensor: Tensor) -> str:
    """Return the number of a tensor's decoder layer; else the end of its name, in two lines of `_LINE` at most."""
    depth = _depth(tensor)
    if depth < _NO_LAYER:
        return str(depth)
    lines = [""]
    for piece in re.findall(r"[^_ ]*[_ ]?", tensor.layer.removesuffix(".weight").rpartition(".")[2]):
        if lines[-1] and len(lines[-1] + piece) > _LINE:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line if len(line) <= _LINE else f"{line[: _LINE - 1]}…" for line in lines[:2])


def _range(values: np.ndarray, unit: str) -> str:
    found = values[np.isfinite(values)]
    return f"from {found.min():.3g} to {found.max():.3g} {unit}".strip() if found.size else "no values"


def _rounded(value: float | None, digits: int = 0, decimals: int | None = None) -> float | None:
    """Round to so many significant digits, or decimals; None for NaN and infinity, which JSON has not."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}") if decimals is None else round(float(value), decimals)
    return int(rounded) if rounded == int(rounded) else rounded


def _share(value: float) -> str:
    return "–" if math.isnan(value) else "0" if value == 0 else f"{100 * value:.3g} %"


def _digits(value: float, digits: int = 3) -> str:
    return "–" if not math.isfinite(value) else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"
