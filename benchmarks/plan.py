"""Compare `fp8booster plan` with the peaks of torch's allocator that other results measured on GPUs.

    python -m benchmarks.plan --out results

The measured figures are read from benchmarks/results: every mode on four H200s that can be planned, 7B on two, and 1B
on one H100 with and without CUDA graphs.
"""

from __future__ import annotations

import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from transformers import LlamaConfig

from benchmarks.harness import command, environment
from benchmarks.harness.results import Column, Result, Table
from fp8booster.cli.plan.configurations import GIB, GPUS
from fp8booster.cli.plan.dry_run import footprint
from fp8booster.cli.plan.planning import NEEDS_VALUES
from fp8booster.cli.train.options import TrainOptions
from fp8booster.monitor.memory import FREE_IN_POOLS

RESULTS = Path(__file__).parent / "results/h200"

GRAPHS = Path(__file__).parent / "results/h100/llama-1b-1-by-default.md"
"""1B with CUDA graphs and without."""

PRECISIONS = ("bf16", "fp8")

LEFT_OUT = NEEDS_VALUES | {
    "moe": "its runs are not those of `fp8booster train`",
    "ddp": "its weights were BF16 there, and are FP32 in `fp8booster train`",
}
"""Modes that a plan cannot count, and why."""

COLUMNS = (
    Column("run", lambda record: record["name"]),
    Column("measured", lambda record: f"{record['measured']:.1f}"),
    Column("planned", lambda record: f"{record['planned']:.1f}"),
    Column("difference", lambda record: f"{record['planned'] / record['measured'] - 1:+.1%}"),
)

_FIELDS = {
    "--model": "model",
    "--ep": "ep",
    "--plugin": "plugin",
    "--zero": "stage",
    "--tp": "tp",
    "--pp": "pp",
    "--sp": "sp",
    "--sp-mode": "sp_mode",
    "--micro-batch": "batch",
    "--micro-batches": "accumulate",
    "--plugin-option": "plugin_options",
}
"""By flag of `benchmarks.llama`, the field of `TrainOptions`."""


@dataclass(frozen=True)
class Case:
    """A run that was measured."""

    name: str
    options: TrainOptions
    precision: str
    measured: float
    """GiB."""
    gpu: str = "H200"


def cases(folder: Path) -> Iterator[Case]:
    """Return the cases that result files of H200s measured and a plan can count.

    Args:
        folder: for configs of models with other numbers of layers.
    """
    short = str(folder / "7b-4-layers")
    LlamaConfig(
        hidden_size=4096,
        intermediate_size=11008,
        num_hidden_layers=4,
        num_attention_heads=32,
        max_position_embeddings=4096,
    ).save_pretrained(short)
    (modes,) = RESULTS.glob("modes-4_*.md")
    row = re.compile(
        r"^\| (?P<name>[^|]+) \| (?:`(?P<options>[^`|]*)`)? ?\|.*\| (?P<bf16>[\d.]+), (?P<fp8>[\d.]+) \| [\d.]+ \|$"
    )
    for line in modes.read_text().splitlines():
        found = row.match(line)
        if found is not None:
            yield from _pair(found["name"], short, 4, shlex.split(found["options"] or ""), found)
    (seven,) = RESULTS.glob("llama-7b-2-defaults_*.md")
    rows = re.findall(r"^\| fp8booster, (BF16|FP8) \|(?:[^|]*\|){10} ([\d.]+) \|", seven.read_text(), re.M)
    peaks = dict(reversed(rows))  # the first table has the peaks, later ones other figures
    yield from _pair("LowLevelZeroPlugin, 7B, 2 GPUs", "7b", 2, [], {"bf16": peaks["BF16"], "fp8": peaks["FP8"]})
    yield from graph_cases()


def graph_cases() -> Iterator[Case]:
    """Return the runs of 1B in FP8 on one GPU whose peaks were measured with CUDA graphs and without."""
    sizes = ""
    for line in GRAPHS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if not line.startswith("|") or len(cells) < 6 or cells[1] not in _GRAPHS:
            sizes = cells[0] if line.startswith("|") and cells[0] else sizes
            continue
        sizes = cells[0] or sizes
        batch, micro_batches = map(int, sizes.partition(",")[0].split(" x "))
        captured = _GRAPHS[cells[1]]
        options = TrainOptions(
            model="1b",
            sequence=2048,
            nproc=1,
            batch=batch,
            accumulate=micro_batches,
            fp8_options=(f"cuda_graphs={str(captured).lower()}",),
        )
        kind = "CUDA graphs" if captured else "no CUDA graphs"
        yield Case(f"1B, 1 GPU, {sizes}, {kind}", options, "fp8", float(cells[4]), "H100")


_GRAPHS = {"FP8, by default: graphs": True, "FP8, eager": False}


def _pair(name: str, model: str, gpus: int, words: list[str], peaks: Mapping[str, str]) -> Iterator[Case]:
    """A run in BF16 and in FP8, from the words of `benchmarks.llama` that asked for it."""
    given: dict[str, Any] = {"batch": 2, "plugin_options": ()}
    for flag, value in zip(words[::2], words[1::2], strict=True):
        field = _FIELDS[flag]
        given[field] = (value,) if field == "plugin_options" else int(value) if value.isdigit() else value
    if given.get("plugin") in LEFT_OUT or given.get("sp_mode") in LEFT_OUT:
        return
    options = TrainOptions(**{"model": model, "sequence": 4096, "nproc": gpus} | given)
    for precision in PRECISIONS:
        yield Case(f"{name.strip()}, {precision.upper()}", options, precision, float(peaks[precision]))


_ABOUT = (
    "GiB on the rank with most. Measured: torch's allocator, H200s; 1B on H100s, by benchmarks/results/h100/"
    "llama-1b-1-by-default.md. CUDA graphs were measured before commits that save two bytes a weight of their layers, "
    "1.8 GiB: gradients of one micro-batch are no longer copied, and those of several keep no FP8 weights of their own."
)


def planned_peak(case: Case) -> float:
    """Return the planned GiB of tensors at the peak."""
    peaks = footprint(case.options, case.precision, int(GPUS[case.gpu].memory * GIB))
    # torch's allocator counts what tensors hold, and not what pools of graphs have free
    return max(parts.total() - parts[FREE_IN_POOLS] for parts in peaks.values()) / GIB


def main(
    quick: command.Quick = False,
    folder: command.Folder = None,
    json_file: command.JsonFile = None,
    commit: command.Commit = None,
) -> None:
    """Plan what was measured, and compare."""
    _, cpu = command.measured_device("cpu")
    records = []
    with tempfile.TemporaryDirectory() as configs:
        for case in list(cases(Path(configs)))[: 1 if quick else None]:
            typer.echo(case.name, err=True)
            planned = planned_peak(case)
            records.append({"name": case.name, "measured": case.measured, "planned": planned})
    result = Result(
        "plan",
        "Planned and measured memory",
        environment.head(cpu, commit=commit) | {"model": "LLaMA-2 7B, 4 layers on 4 GPUs, 32 on 2; sequences of 4096"},
        [Table("peaks", "Peaks", COLUMNS, records, _ABOUT)],
        dict(LEFT_OUT),
    )
    command.deliver(result, folder=folder, json_file=json_file)


if __name__ == "__main__":
    command.run_command(main)
