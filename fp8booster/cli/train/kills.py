"""Why a process was ended by SIGKILL, as far as the kernel tells."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class MemoryKills:
    """How many processes the kernel has ended for lack of memory; None where it does not tell."""

    group: int | None
    """In the control group of this process and of those that it starts."""
    machine: int | None

    @classmethod
    def now(cls) -> MemoryKills:
        """Read the counters."""
        files = (folder / name for folder in _groups() for name in ("memory.events", "memory.oom_control"))
        group = next((count for file in files if (count := _count(file)) is not None), None)
        return cls(group, _count(Path("/proc/vmstat")))

    def explain(self, since: MemoryKills) -> str:
        """The cause of a SIGKILL between two counts, and what to do."""
        if self.group is not None and since.group is not None and self.group > since.group:
            return (
                "for the memory of its control group (of a container, or of the batch system's job) ran out; lower "
                "--batch or --sequence or ask for more memory, and --resume the run"
            )
        if self.machine is not None and since.machine is not None:
            if self.machine > since.machine:
                return (
                    "while the kernel ended a process for lack of memory, most likely this one; lower --batch or "
                    "--sequence, and --resume the run"
                )
            return (
                "and not by the kernel for lack of memory, which it counts: a person, a batch system or a container's "
                "watch sent it; --resume the run"
            )
        return (
            "and the kernel does not tell here whether for lack of memory; look at dmesg and at the batch system's "
            "limits, and --resume the run"
        )


def _groups() -> list[Path]:
    """Where this process's control group may be mounted, of version 2 and of version 1."""
    try:
        lines = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    except OSError:
        return []
    roots = [(_CGROUPS / controllers, path) for _, controllers, path in lines if controllers in ("", "memory")]
    return [folder for root, path in roots for folder in (root / path.lstrip("/"), root)]


def _count(file: Path) -> int | None:
    """The line `oom_kill <number>` of a file of the kernel's."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
