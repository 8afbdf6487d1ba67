"""`fp8booster doctor --fix`: installs what training waits for."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable

from fp8booster.cli.doctor.problems import Problem


def install(problems: Iterable[Problem]) -> bool:
    """Install the packages without which nothing trains, with this interpreter's pip; tell whether there were any.

    Raises:
        ValueError: pip refuses; the sentence names the command.
    """
    missing = [problem.remedy for problem in problems if problem.is_installed_away]
    for remedy in missing:
        command = [sys.executable, "-m", *shlex.split(remedy)]
        # what pip prints must not get into a JSON object
        if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
            raise ValueError(f"`{shlex.join(command)}` failed; install the package as this environment wants it.")
    return bool(missing)


def look_again(flags: list[str]) -> int:
    """Return the exit status of `fp8booster doctor` with these flags, in a process that sees what was installed."""
    return subprocess.run([sys.executable, "-m", "fp8booster", "doctor", *flags], check=False).returncode
