"""`examples/train.sbatch`, with stand-ins for SLURM's commands."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "train.sbatch"

STAND_INS = {
    "scontrol": 'test "$*" = "show hostnames node[3-4]" && printf "node3\\nnode4\\n"',
    "srun": 'python3 -c "import json, sys; print(json.dumps(sys.argv[1:]))" "threads=$OMP_NUM_THREADS" '
    '"patience=$TORCH_ELASTIC_SHUTDOWN_TIMEOUT" "$@"',
}


@pytest.fixture
def started(tmp_path: Path) -> list[str]:
    """The threads of a process, the seconds it has to save, then what srun is given.

    In a job of two nodes with 8 GPUs and 64 CPUs each.
    """
    for name, line in STAND_INS.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "activate").touch()
    job = {
        "SLURM_JOB_ID": "1234567",
        "SLURM_JOB_NODELIST": "node[3-4]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_CPUS_PER_TASK": "64",
    }
    answer = subprocess.run(
        ["bash", str(SCRIPT), "--resume"],
        env={**job, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(answer.stdout)


def test_each_node_starts_torchrun_with_all_of_its_cpus(started: list[str]) -> None:
    threads, _, *srun = started[: started.index("torchrun")]
    assert threads == "threads=8"
    assert set(srun) == {"--cpus-per-task=64", "--kill-on-bad-exit=1"}


def test_it_is_told_before_the_time_is_up_and_has_most_of_it_to_save(started: list[str]) -> None:
    (line,) = [line for line in SCRIPT.read_text().splitlines() if "--signal" in line]
    name, _, seconds = line.removeprefix("#SBATCH --signal=").partition("@")
    assert name == "TERM"  # which examples/loop.py notes, and torchrun passes on
    patience = int(started[1].removeprefix("patience="))
    assert 0.9 * int(seconds) <= patience < int(seconds)


def test_the_nodes_meet_at_the_first_one(started: list[str]) -> None:
    given = dict(each.split("=", 1) for each in started if each.startswith("--") and "=" in each)
    assert (given["--nnodes"], given["--nproc-per-node"], given["--rdzv-id"]) == ("2", "8", "1234567")
    host, port = given["--rdzv-endpoint"].split(":")
    assert host == "node3"
    assert 1024 < int(port) < 32768  # the range from which Linux takes ports of connections


def test_what_follows_its_name_goes_to_the_example(started: list[str], monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    import pretrain

    for module in ("pretrain", "loop"):
        sys.modules.pop(module)
    args = pretrain.parse(started[started.index("examples/pretrain.py") + 1 :])
    assert args.resume
    assert (args.size, args.save_every) == ("7b", 1000)
