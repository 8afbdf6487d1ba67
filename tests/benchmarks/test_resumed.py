from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
import typer
from safetensors.torch import save_file

from benchmarks.resumed import main
from fp8booster.cli.metrics import StepMetrics


def write_run(folder: Path, first: int, loss: float = 2.0, weight: float = 1.0) -> Path:
    """A run of the steps `first` to 4 with one weight, as far as the comparison reads it."""
    checkpoint = folder / "checkpoints" / "step-00000004"
    for name in ("masters", "model"):
        (checkpoint / name).mkdir(parents=True)
        save_file({"weight": torch.full([3], weight)}, checkpoint / name / "weights.safetensors")
    (checkpoint / "state.json").write_text("{}")
    with (folder / "metrics.jsonl").open("w") as stream:
        for step in range(first, 5):
            metrics = StepMetrics(
                step=step,
                loss=loss / step,
                lr=0.1,
                grad_norm=1.0,
                tokens_per_second=first,  # how fast a run was is not compared
                seconds=1.0,
                peak_memory=1,
                wire_bytes=1,
            )
            stream.write(json.dumps(dataclasses.asdict(metrics)) + "\n")
    return folder


def test_equal_runs(tmp_path) -> None:
    file = tmp_path / "found.json"
    main(write_run(tmp_path / "whole", 1), write_run(tmp_path / "resumed", 3), file)
    found = json.loads(file.read_text())
    assert (found["first step"], found["last step"], found["steps that differ"]) == (3, 4, [])
    assert (found["tensors compared"], found["values compared"], found["tensors that differ"]) == (2, 6, [])


@pytest.mark.parametrize("change", [{"loss": 2.0 + 2**-51}, {"weight": 1 + 2**-23}])
def test_one_bit_of_difference_is_seen(tmp_path, change) -> None:
    with pytest.raises(typer.Exit) as ended:
        main(write_run(tmp_path / "whole", 1), write_run(tmp_path / "resumed", 3, **change))
    assert ended.value.exit_code == 1
