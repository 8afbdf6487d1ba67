"""Stands for `benchmarks.training.worker` in the test of its processes: does what its task is called, without torch."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path


def main() -> None:
    """Do the task, or fail as it says."""
    task = json.loads(sys.stdin.readline())
    outcome, rank = Path(task["outcome"]), int(os.environ["RANK"])
    match task["engine"]:
        case "well":
            with socket.create_connection(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
                outcome.write_text(json.dumps({"rank": rank, "store": "served"}))
        case "fails on rank 1" if rank == 1:
            outcome.write_text(json.dumps({"failed": "out of GPU memory", "at": time.time()}))
            sys.exit(1)
        case "dies on rank 1" if rank == 1:
            sys.exit("no such device")
        case _:
            time.sleep(600)  # as one that waits for the others in a collective


if __name__ == "__main__":
    main()
