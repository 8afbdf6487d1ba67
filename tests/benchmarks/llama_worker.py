"""Stands for `benchmarks.training.worker` in the test of its processes: does what its task is called, without torch."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

from benchmarks.training.host import Task, serve


def do(task: Task) -> int:
    """Do the task, or fail as it says."""
    outcome, rank = Path(task["outcome"]), int(os.environ["RANK"])
    match task["engine"]:
        case "well":
            with socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
                outcome.write_text(json.dumps({"rank": rank, "store": "served", "host": os.getppid()}))
        case "fails on rank 1" if rank == 1:
            outcome.write_text(json.dumps({"failed": "out of GPU memory", "at": time.time()}))
            return 1
        case "dies on rank 1" if rank == 1:
            sys.exit("no such device")
        case "its host dies on rank 1" if rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        case _:
            time.sleep(600)  # as one that waits for the others in a collective
    return 0


if __name__ == "__main__":
    serve(do, may_fork=lambda: os.environ.get("MAY_FORK") != "no")
