"""What a person sees while a run lasts: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

_LINES = 20  # lines of a whole run
_SILENCE = 30.0  # seconds after which a line is due in any case


class Silent:
    """Shows one run after another: of their progress nothing, only notices."""

    def begin(self, name: str) -> None:
        """A run (or a preparation) called `name` begins."""

    def show(self, event: dict[str, Any]) -> None:
        """Something happened in it (events.Events.send)."""
        if event["kind"] == "notice":
            stderr_console().print(event["text"])

    def end(self) -> None:
        """It is over."""


class Bar(Silent):
    """One moving bar for each run, on standard error."""

    def begin(self, name: str) -> None:
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn(f"{name:>4}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=Console(stderr=True),
        )
        self._task = self._progress.add_task("starting", total=None)
        self._figures = "no step left to do"
        self._progress.start()

    def show(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "status":
                self._progress.update(self._task, description=event["text"])
            case "notice":
                self._progress.console.print(event["text"], soft_wrap=True, highlight=False, markup=False)
            case "start":
                self._progress.update(
                    self._task, total=event["steps"], completed=event["done"], description="first step"
                )
            case "step":
                self._figures = figures(event)
                self._progress.update(self._task, completed=event["step"], description=self._figures)
            case "done":
                self._progress.update(self._task, description=self._figures)

    def end(self) -> None:
        self._progress.stop()


class Lines(Silent):
    """About 20 lines a run, and one at least every 30 seconds, on standard error."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._steps = 1
        self._shown = 0.0
        self._name = ""
        self._text = ""

    def begin(self, name: str) -> None:
        self._name = name

    def show(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "status":
                # "reading ...: 4 of 12 MB" changes often; its first words say whether it is news.
                topic = event["text"].partition(":")[0]
                if topic != self._text or self._overdue():
                    self._print(event["text"])
                self._text = topic
            case "notice":
                self._print(event["text"])
            case "start":
                self._steps = event["steps"]
            case "step":
                step = event["step"]
                due = step == 1 or step == self._steps or step % max(1, self._steps // _LINES) == 0
                if due or self._overdue():
                    self._print(f"step {step}/{self._steps}  {figures(event)}")
            case "checkpoint":
                self._print(f"saved {event['folder']}")

    def _overdue(self) -> bool:
        return time.monotonic() - self._shown > _SILENCE

    def _print(self, text: str) -> None:
        self._shown = time.monotonic()
        self._console.print(f"{self._name}: {text}")


def stderr_console() -> Console:
    """Prints sentences as they are: paths may have brackets."""
    return Console(stderr=True, soft_wrap=True, highlight=False, markup=False)


def figures(metrics: dict[str, Any]) -> str:
    """A step's metrics in one line."""
    return (
        f"loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.2f}  "
        f"{metrics['tokens_per_second']:,.0f} tokens/s"
    )


def make_display(progress: str) -> Silent:
    """The display for a value of `--progress`; "auto": a bar if standard error is a terminal, else lines."""
    if progress == "auto":
        progress = "bar" if sys.stderr.isatty() else "lines"
    return {"bar": Bar, "lines": Lines, "none": Silent}[progress]()
