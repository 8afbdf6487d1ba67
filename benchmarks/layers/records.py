"""Times of a shape compared with BF16, the peers and the roofline, as records for JSON and tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from benchmarks.harness.breakdown import by_part
from benchmarks.harness.results import Record
from benchmarks.harness.roofline import cast_bytes
from benchmarks.harness.shapes import DIRECTIONS, Workload
from benchmarks.harness.timing import Timing
from benchmarks.layers import LAYERS
from benchmarks.layers.layer import Layer
from benchmarks.layers.peers import BASELINE


def casts_ms(work: Workload, layer: Layer, bytes_per_second: float) -> float:
    """Floor of the casts of x and dy, both layouts each; the weight is cast already."""
    x = cast_bytes(work.m * work.k, amax_given=layer.x_amax_given, layouts=2)
    dy = cast_bytes(work.m * work.n, amax_given=layer.dy_amax_given, layouts=2)
    return 1e3 * (x + dy) / bytes_per_second


def layer_record(
    work: Workload, timings: dict[str, Timing], kernels: dict[str, dict[str, float]], bytes_per_second: float
) -> Record:
    """Record the times of one shape's layers, compared with BF16 and with their rooflines, and the parts of these."""
    products = {direction: timings[direction].ms for direction in DIRECTIONS}
    products_ms = sum(samples.median for samples in products.values())
    measured = {name: timings[name] for name in LAYERS if name in timings}
    baseline = measured[BASELINE].ms
    layers = {}
    for name, timing in measured.items():
        casts_floor_ms = casts_ms(work, LAYERS[name], bytes_per_second)
        roofline_ms = products_ms + casts_floor_ms
        layers[name] = {
            "ms": timing.ms.as_record(),
            "host_ms": timing.host_ms.as_record(),
            "over_bf16": baseline.over(timing.ms).as_record(),
            "casts_floor_ms": casts_floor_ms,
            "roofline_ms": roofline_ms,
            "roofline_over_bf16": baseline.median / roofline_ms,
            "fraction": roofline_ms / timing.ms.median,
        }
        if "torchao" in measured:
            layers[name]["over_torchao"] = measured["torchao"].ms.over(timing.ms).as_record()
    return {
        "layer": work.label,
        "shape": [work.m, work.k, work.n],
        "products": {
            direction: {"ms": samples.as_record(), "tflops": work.flops / samples.median / 1e9}
            for direction, samples in products.items()
        },
        "copy_bytes_per_second": bytes_per_second,
        "layers": layers,
        "kernels_us": kernels,
    }


def summarize(records: Sequence[Record], names: Sequence[str]) -> list[Record]:
    """For each layer, over all shapes: median and extremes of its speed over BF16, torchao and its roofline."""
    rows = []
    for name in names:
        found = [record["layers"][name] for record in records if name in record["layers"]]
        if not found:
            continue
        row: Record = {"name": name, "shapes": len(found)}
        for key in ("over_bf16", "over_torchao"):
            row[key] = _extremes([each[key]["median"] for each in found if key in each])
        row["fraction"] = _extremes([each["fraction"] for each in found])
        rows.append(row)
    return rows


def _extremes(values: Sequence[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def breakdown_records(records: Sequence[Record]) -> list[Record]:
    """Record each profiled layer: its parts' time compared with the roofline's, and the time without a kernel."""
    return [
        {
            "name": LAYERS[name].name,
            "layer": record["layer"],
            "shape": record["shape"],
            **by_part(kernels),
            "idle": 1e3 * record["layers"][name]["ms"]["median"] - sum(kernels.values()),
            "products_alone": sum(1e3 * each["ms"]["median"] for each in record["products"].values()),
            "casts_floor": 1e3 * record["layers"][name]["casts_floor_ms"],
        }
        for record in records
        for name, kernels in record["kernels_us"].items()
    ]
