"""An examination as tables for a terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8booster.cli.doctor.examination import Examination
from fp8booster.cli.doctor.links import LinkTimes, sentences
from fp8booster.cli.doctor.problems import Colossal, Environment
from fp8booster.cli.doctor.products import Speed


def show(examination: Examination, console: Console, patches: bool = False) -> None:
    """Print the tables, the problems, and the answer to "can it train in FP8?".

    Args:
        patches: list each patch of Colossal-AI; otherwise they are counted.
    """
    console.print(_environment(examination.environment))
    table = _table("FP8 products", "device", "formats", "result")
    for check in examination.checks:
        answer = (
            Text(check.reason, "red")
            if check.reason is not None
            else Text(f"runs, {check.error:.2%} off the FP32 product", "green")
        )
        table.add_row(check.device, check.formats, answer)
    console.print(table)
    if examination.speeds:
        console.print(_speeds(examination.speeds))
    console.print(_patches(examination.colossal) if patches else _counted_patches(examination.colossal))
    for problem in examination.problems:
        heading = ("stops training: ", "bold red") if problem.stops_training else ("note: ", "bold yellow")
        text = Text.assemble(heading, problem.sentence)
        if problem.remedy is not None:
            text.append("\n    remedy: ").append(problem.remedy, style="cyan")
        console.print(text, soft_wrap=True)
    if examination.can_train:
        console.print("FP8 training can run here.", style="bold green")
    else:
        console.print("FP8 training cannot run here.", style="bold red")


def show_links(found: LinkTimes, console: Console) -> None:
    """Print the times of collectives on each link, and which gain in FP8."""
    nodes, each_has = found.ranks // found.ranks_of_a_node, found.ranks_of_a_node
    group = f"{nodes} node{'s' * (nodes > 1)} of {each_has} rank{'s' * (each_has > 1)}"
    for link in dict.fromkeys(each.link for each in found.times):
        numbers = ["MiB", "16 bits, ms", "FP8, ms", "FP8 / 16 bits"]
        by_nodes = any(each.link == link and each.by_nodes_ms is not None for each in found.times)
        numbers += ["by nodes, ms", "by nodes / best"] if by_nodes else []
        title = f"Collectives {link}: {group}, {found.device}"
        table = _table(title, "collective", *numbers, right=numbers)
        for each in found.times:
            if each.link == link:
                row = [f"{each.payload / 2**20:g}", f"{each.plain_ms:.3f}", f"{each.fp8_ms:.3f}"]
                ratios = [_ratio(each.fp8_ms / each.plain_ms, each.ratio_p90)]
                if each.by_nodes_ms is not None and each.by_nodes_ratio_p90 is not None:
                    best = min(each.plain_ms, each.fp8_ms)
                    ratios += [f"{each.by_nodes_ms:.3f}", _ratio(each.by_nodes_ms / best, each.by_nodes_ratio_p90)]
                table.add_row(each.collective, *row, *ratios)
        console.print(table)
    for line in sentences(found):
        console.print(line, soft_wrap=True)


def _ratio(median: float, ratio_p90: float) -> Text:
    return Text(f"{median:.2f}", "green" if ratio_p90 < 1 else "")


def _table(title: str, *columns: str, right: Iterable[str] = (), caption: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _environment(environment: Environment) -> Table:
    table = _table("Environment", "what", "found")
    for name, version in environment.versions.items():
        table.add_row(name, version or Text("not installed", style="dim"))
    table.add_row("CUDA", environment.cuda or "none: PyTorch was built for the CPU")
    table.add_row("driver", environment.driver or "none")
    table.add_row("NCCL", environment.nccl or "none")
    table.add_row("torch.distributed", ", ".join(environment.backends) or "none")
    for gpu in environment.gpus:
        memory = f"{gpu.memory / 2**30:.0f} GiB"
        table.add_row(f"GPU {gpu.index}", f"{gpu.name}, compute capability {gpu.capability}, {memory}")
        table.add_row("attention", gpu.attention)
    if not environment.gpus:
        table.add_row("GPU", "none visible")
    return table


def _speeds(speeds: list[Speed]) -> Table:
    numbers = ("tokens", "BF16", "FP8", "FP8, fast accumulation", "BF16 / FP8")
    small = "The CPU's shapes are small and its times say nothing about a GPU."
    table = _table(
        "Products without casts, milliseconds (TFLOP/s)",
        *("device", "tokens", "in -> out", *numbers[1:]),
        right=numbers,
        caption=small if any(speed.device == "cpu" for speed in speeds) else None,
    )
    for speed in speeds:
        cells = (f"{each:.3f} ({speed.teraflops(each):.3g})" for each in (speed.bf16, speed.fp8, speed.fp8_fast))
        gain = f"{speed.bf16 / speed.fp8:.2f}x, {speed.bf16 / speed.fp8_fast:.2f}x"
        table.add_row(speed.device, str(speed.tokens), f"{speed.features_in} -> {speed.features_out}", *cells, gain)
    return table


def _patches(colossal: Colossal) -> Table:
    table = _table("Patches of Colossal-AI", "why", "state", "patch", "place", "needed when")
    for patch in colossal.patches:
        table.add_row(*(patch[name] for name in ("kind", "state", "summary", "place", "needed_when")))
    return table


def _counted_patches(colossal: Colossal) -> Table:
    counts = Counter((patch["kind"], patch["state"]) for patch in colossal.patches)
    states = list(dict.fromkeys(state for _, state in counts))
    caption = "--patches lists them, with their places."
    table = _table("Patches of Colossal-AI", "why", *states, right=states, caption=caption)
    for kind in dict.fromkeys(kind for kind, _ in counts):
        table.add_row(kind, *(str(counts[kind, state]) for state in states))
    return table
