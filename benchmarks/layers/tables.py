"""Show the records of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.harness.products import FAST, GRADIENT
from benchmarks.harness.results import Column, Record, Table, spread
from benchmarks.harness.shapes import DIRECTIONS
from benchmarks.layers import LAYERS
from benchmarks.layers.peers import BASELINE
from benchmarks.layers.records import summarize

BREAKDOWN = Table(
    "breakdown",
    "Where the microseconds of a step go",
    [
        Column("measured", lambda r: r["name"]),
        Column("layer", lambda r: r["layer"]),
        Column("M x K -> N", lambda r: "{} x {} -> {}".format(*r["shape"])),
        Column("products (alone)", lambda r: f"{r['products']:.0f} ({r['products_alone']:.0f})"),
        Column("casts (floor)", lambda r: f"{r['casts']:.0f} ({r['casts_floor']:.0f})"),
        Column("other kernels", lambda r: f"{r['other']:.0f}"),
        Column("idle", lambda r: f"{r['idle']:.0f}"),
    ],
    (),
    "Kernels by torch's profiler, in steps of their own; idle is what is left of the median step timed without it. The "
    "roofline is in brackets: the products by themselves and the casts' bytes at the copy bandwidth.",
)
SHAPE = (Column("layer", lambda r: r["layer"]), Column("M x K -> N", lambda r: "{} x {} -> {}".format(*r["shape"])))


def tables(records: list[Record], names: Sequence[str]) -> list[Table]:
    """All that is shown of the records."""
    fp8 = [name for name in names if not name.startswith("bf16")]
    return [
        Table(
            "summary",
            "Over all shapes",
            [
                Column("layer", lambda r: LAYERS[r["name"]].name),
                Column("shapes", lambda r: str(r["shapes"])),
                Column("over BF16: median (least to most)", lambda r: _show_extremes(r["over_bf16"])),
                Column("over torchao: median (least to most)", lambda r: _show_extremes(r["over_torchao"])),
                Column("of the roofline: median (least to most)", lambda r: _show_extremes(r["fraction"])),
            ],
            summarize(records, names),
            "Speed: 2 is twice as fast. The roofline of every layer is three FP8 products and the casts of x and dy, "
            "with the weight cast already; a layer that casts its weight each step cannot reach it.",
        ),
        Table(
            "shapes",
            "Milliseconds of a step",
            [
                *SHAPE,
                *(_layer_column(name, lambda each: spread(each["ms"], 3)) for name in names),
                Column("roofline", lambda r: f"{_roofline(r, 'roofline_ms'):.3f}"),
            ],
            records,
            "Median [10th-90th percentile] of the rounds.",
        ),
        Table(
            None,
            "Speed over BF16",
            [
                *SHAPE,
                *(_layer_column(name, lambda each: f"{each['over_bf16']['median']:.2f}") for name in names),
                Column("roofline", lambda r: f"{_roofline(r, 'roofline_over_bf16'):.2f}"),
            ],
            records,
            "Medians of ratios round by round.",
        ),
        Table(
            None,
            "Fraction of the roofline, and the host's microseconds for a step",
            [
                *SHAPE,
                *(
                    _layer_column(name, lambda each: f"{each['fraction']:.3f}, {1e3 * each['host_ms']['median']:.0f}")
                    for name in fp8
                ),
                *(_product_column(direction) for direction in DIRECTIONS),
                Column("copy GB/s", lambda r: f"{r['copy_bytes_per_second'] / 1e9:.0f}"),
            ],
            records,
            f"The roofline is the three products at the rates measured interleaved with the layers (fprop {FAST.name}, "
            f"dgrad and wgrad {GRADIENT.name}), and the casts of x and dy at the bytes' floor and the bandwidth of the "
            "copy: 6 bytes an element, 4 where the amax is delivered.",
        ),
    ]


def _layer_column(name: str, show: Callable[[Record], str]) -> Column:
    def cell(record: Record) -> str:
        return show(record["layers"][name]) if name in record["layers"] else "left out"

    return Column(LAYERS[name].name, cell)


def _product_column(direction: str) -> Column:
    def cell(record: Record) -> str:
        product = record["products"][direction]
        return f"{product['ms']['median']:.3f} ({product['tflops']:.0f})"

    return Column(f"{direction} ms (TFLOP/s)", cell)


def _roofline(record: Record, key: str) -> float:
    """Return the baseline's roofline, to which nobody delivers an amax."""
    return record["layers"][BASELINE][key]


def _show_extremes(values: Record | None) -> str:
    return "" if values is None else f"{values['median']:.2f} ({values['least']:.2f} to {values['most']:.2f})"
