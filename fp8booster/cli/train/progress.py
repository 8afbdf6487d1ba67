"""The progress of a run for a person: a bar on a terminal, lines in a log."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

_LINES = 20  # lines of a whole run
_SILENCE = 30.0  # seconds after which a line is due in any case
_RECENT = 20  # steps by which the time left is estimated


class TimeLeft:
    """The time that a run's other steps will take, by those before."""

    def __init__(self, steps: int) -> None:
        """Begin with the first step; `steps` is the number of the last one."""
        self._steps = steps
        self._ends = deque([time.monotonic()], maxlen=_RECENT + 1)

    def after(self, step: int) -> str:
        """Note that a step has ended; return the time after it, as "3 min left", and nothing after the last."""
        self._ends.append(time.monotonic())
        seconds = (self._steps - step) * (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return f"{_duration(seconds)} left" if step < self._steps else ""


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Silent:
    """Show of a run nothing but notices."""

    def __init__(self, name: str, stream: TextIO) -> None:
        self._name = name
        self._console = plain_console(stream)

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None: ...

    def show(self, kind: str, **values: Any) -> None:
        """Show one event.

        Kinds: "status" (text), "notice" (text, a sentence to keep), "start" (done, steps), "step" (metrics, and
        the share of the FP8 peak or None),
        "checkpoint" (folder), "done".
        """
        if kind == "notice":
            self._console.print(values["text"])


class Bar(Silent):
    """One moving bar."""

    def __enter__(self) -> Silent:
        own = self._console.file is sys.stderr  # a rank's standard error is its log, and not what the bar is on
        self._progress = Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn(f"{self._name:>4}"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=Console(file=self._console.file),
            refresh_per_second=2,  # it takes the interpreter from the training step
            redirect_stdout=own,
            redirect_stderr=own,
        )
        self._task = self._progress.add_task("starting", total=None, left="")
        self._figures = "no step left to do"
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def show(self, kind: str, **values: Any) -> None:
        match kind:
            case "status":
                self._progress.update(self._task, description=values["text"])
            case "notice":
                self._progress.console.print(values["text"], soft_wrap=True, highlight=False, markup=False)
            case "start":
                self._left = TimeLeft(values["steps"])
                self._progress.update(
                    self._task, total=values["steps"], completed=values["done"], description="first step"
                )
            case "step":
                self._figures = figures(values)
                self._progress.update(
                    self._task,
                    completed=values["step"],
                    description=self._figures,
                    left=self._left.after(values["step"]),
                )
            case "done":
                self._progress.update(self._task, description=self._figures)


class Lines(Silent):
    """About 20 lines, and one at least every 30 seconds."""

    def __init__(self, name: str, stream: TextIO) -> None:
        super().__init__(name, stream)
        self._steps = 1
        self._shown = 0.0
        self._topic = ""

    def show(self, kind: str, **values: Any) -> None:
        match kind:
            case "status":
                # "reading ...: 4 of 12 MB" changes often; its first words say whether it is news.
                topic = values["text"].partition(":")[0]
                if topic != self._topic or self._overdue():
                    self._print(values["text"])
                self._topic = topic
            case "notice":
                self._print(values["text"])
            case "start":
                self._steps = values["steps"]
                self._left = TimeLeft(self._steps)
            case "step":
                step = values["step"]
                left = self._left.after(step)
                due = step == 1 or step == self._steps or step % max(1, self._steps // _LINES) == 0
                if due or self._overdue():
                    self._print(f"step {step}/{self._steps}  {figures(values)}  {left}".rstrip())
            case "checkpoint":
                self._print(f"saved {values['folder']}")

    def _overdue(self) -> bool:
        return time.monotonic() - self._shown > _SILENCE

    def _print(self, text: str) -> None:
        self._shown = time.monotonic()
        self._console.print(f"{self._name}: {text}")


def plain_console(stream: TextIO) -> Console:
    """Return a console that prints sentences as they are: paths may have brackets."""
    return Console(file=stream, soft_wrap=True, highlight=False, markup=False)


def figures(metrics: dict[str, Any]) -> str:
    """Return a step's metrics in one line, with its `share` of the GPU's FP8 peak where this is known."""
    share = metrics.get("share")
    return (
        f"loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  norm {metrics['grad_norm']:.2f}  "
        f"{metrics['tokens_per_second']:,.0f} tokens/s{'' if share is None else f', {share:.0%} of FP8 peak'}"
    )


def make_display(progress: str, name: str, stream: TextIO | None = None) -> Silent:
    """Return the display of `--progress` for a run, or a preparation, called `name`.

    Args:
        progress: "auto" is a bar if the stream is a terminal, else lines.
        stream: None is standard error.
    """
    stream = sys.stderr if stream is None else stream
    if progress == "auto":
        progress = "bar" if stream.isatty() else "lines"
    return {"bar": Bar, "lines": Lines, "none": Silent}[progress](name, stream)
