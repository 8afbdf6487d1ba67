"""One HTML file about a run, which opens without a network: its data, which the script in `page.html` draws."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined

from fp8booster.files import write_whole

from .advice import FLUSHED, SATURATED, Scales, Tensor, depth_of, least_snr
from .run import PAGE, PRECISIONS, Losses, RunRecord

_STEPS = 100  # samples that are drawn, at most
_CELLS = 70_000  # of a role's tensors by steps: a page of 32 layers has 1.3 MB
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

Chart = dict[str, Any]
"""For the page's script: "kind", "lines" or "map"; "set", "rows" and "quantity" of the data; "title", and "text" in its
place; "axis", "label" and "unit". Of lines "limits", left, top, right and bottom, and "legend" or the number of
"layers" for colours; of a map the "range" of its colours, whether that is "log", and whether they "reverse"."""


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
    scales, data = run.scales, list[dict[str, Any]]()
    environment = Environment(
        loader=PackageLoader(__name__.rpartition(".")[0], "."), autoescape=True, undefined=StrictUndefined
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters.update(share=_share, digits=_digits, least_snr=least_snr)
    sections = _loss_section(data, _curves(run, against))
    if scales and scales.tensors:
        sections += _scale_sections(data, scales)
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
        data=data,
    )
    write_whole(path, text)


def _facts(run: RunRecord) -> list[tuple[str, str]]:
    facts = [(name, str(run.about[name])) for name in ("command", "hardware", "versions", "date") if name in run.about]
    for name, losses in run.losses.items():
        if losses:
            facts.append((f"loss, {_called(name)}", f"{losses[max(losses)]:.4f} at step {max(losses)}"))
    if run.in_fp8:
        facts.append(("linear layers in FP8", run.in_fp8))
    facts += [("not in FP8", line) for line in run.not_in_fp8]
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


def _loss_section(data: list[dict[str, Any]], curves: Mapping[str, Losses]) -> list[dict[str, Any]]:
    curves = {name: losses for name, losses in curves.items() if losses}
    if not curves:
        return []
    steps = sorted({step for losses in curves.values() for step in _extremes(losses)})
    base, first = next(iter(curves.items()))
    kept: dict[str, list[list[float | None]]] = {"loss": [], "change": []}
    for losses in curves.values():
        shared = [step for step in steps if step in losses and first.get(step)]  # a loss of 0 has no multiple
        changes = {step: 100 * (losses[step] / first[step] - 1) for step in shared}
        kept["loss"].append([_rounded(losses.get(step), 5) for step in steps])
        kept["change"].append([_rounded(changes.get(step), 4) for step in steps])
    last = ", ".join(f"{name} {losses[max(losses)]:.4f}" for name, losses in curves.items())
    text = f"Loss over steps; at the last step {last}."
    charts = []
    for quantity, rows, axis, unit in (
        ("loss", range(len(curves)), "loss", ""),
        ("change", range(1, len(curves)), f"from {base}, %", " %"),
    ):
        values = [value for row in rows for value in kept[quantity][row] if value is not None]
        if values:
            limits = _limits(steps, min(values), max(values), margin=0.05 * (max(values) - min(values)) or 0.5)
            chart = {"kind": "lines", "set": len(data), "rows": list(rows), "quantity": quantity, "limits": limits}
            charts.append(chart | {"axis": axis, "label": axis, "unit": unit, "legend": True, "text": text})
    data.append({"names": list(curves), "steps": steps, **kept})
    thinned = len(steps) < max(map(len, curves.values()))
    note = "Of each stretch of steps the lowest and the highest are drawn." if thinned else ""
    return [{"title": "Loss", "note": note, "charts": charts, "layout": "single"}]


def _limits(steps: Sequence[int], low: float, high: float, margin: float) -> list[float]:
    """Return left, top, right and bottom of the axes of lines."""
    return [int(steps[0]), high + margin, int(max(steps[-1], steps[0] + 1)), low - margin]


def _extremes(losses: Losses) -> set[int]:
    """Return the steps of the lowest and the highest loss of each stretch, and the first and the last."""
    steps = sorted(losses)
    kept = {steps[0], steps[-1]}
    for block in np.array_split(np.array(steps), min(_BLOCKS, len(steps))):
        values = [losses[step] for step in block]
        kept |= {int(block[np.argmin(values)]), int(block[np.argmax(values)])}
    return kept


def _scale_sections(data: list[dict[str, Any]], scales: Scales) -> list[dict[str, Any]]:
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
        labels = [_label(tensor) for tensor in tensors]
        for quantity, values, label, unit, colors, charts in (
            # small shares differ by powers of ten
            ("flushed", percent, "flushed", "%", {"range": [1e-4, max(most, 1.0)], "log": True}, flushed),
            ("snr", snr, "signal to noise", "dB", {"range": _SNR, "reverse": True}, noise),
        ):
            text = f"{label}, {role}: {len(tensors)} tensors by {len(steps)} steps, {_range(values, unit)}."
            chart = {"kind": "map", "set": len(data), "rows": list(range(len(tensors))), "quantity": quantity, **colors}
            axis = "layer" if any(map(str.isdigit, labels)) else ""
            chart |= {"axis": axis, "label": label, "unit": f" {unit}", "text": text}
            charts.append(chart | {"title": f"{role}: {label}, {unit}"})
        if role in _LINES:
            panels = _line_panels(len(data), role, tensors, steps, exponents)
            lines.append({"title": f"Scales: {role}", "note": _SCALES_NOTE, "charts": panels, "layout": "grid"})
        data.append(
            {
                "names": [tensor.layer for tensor in tensors],
                "steps": steps.tolist(),
                "labels": labels,
                "depths": [_depth(tensor) for tensor in tensors],
                "scale": [[_rounded(value, decimals=2) for value in row] for row in exponents],
                "flushed": [[_rounded(value, 2) for value in row] for row in percent],
                "snr": [[_rounded(value, decimals=1) for value in row] for row in snr],
            }
        )
    note = "Layer by layer; point at a cell or a line, or use the arrow keys, to read its value."
    return [
        {"title": "Share flushed to zero", "note": note, "charts": flushed, "layout": "grid maps"},
        {"title": "Noise", "note": "Bright: much noise. Empty: no number.", "charts": noise, "layout": "grid maps"},
        *lines,
    ]


def _line_panels(
    number: int, role: str, tensors: Sequence[Tensor], steps: np.ndarray, exponents: np.ndarray
) -> list[Chart]:
    kinds = [tensor.layer.rpartition(".")[2] for tensor in tensors]
    common = [kind for kind, _ in Counter(kinds).most_common(_KINDS)]
    kinds = [kind if kind in common else "others" for kind in kinds]
    found = exponents[np.isfinite(exponents)]
    if not found.size:
        return []
    # the same for all kinds, so that they can be compared
    limits = _limits(steps, math.floor(found.min() - 0.5), math.ceil(found.max() + 0.5), margin=0)
    layers = 1 + max((depth for tensor in tensors if (depth := _depth(tensor)) < _NO_LAYER), default=0)
    panels = []
    for kind in dict.fromkeys(kinds):
        rows = [row for row, each in enumerate(kinds) if each == kind]
        chart = {"kind": "lines", "set": number, "rows": rows, "quantity": "scale", "limits": limits, "layers": layers}
        text = f"Binary logarithm of the scale, {role} of {len(rows)} layers {kind}: {_range(exponents[rows], '')}."
        chart |= {"axis": "log2 of scale", "label": "log2 of scale", "unit": "", "text": text}
        panels.append(chart | {"title": f"{role}: {kind}"})
    return panels


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
