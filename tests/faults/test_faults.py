"""A few cases of the campaign (`python -m tests.faults`), and that it would notice a fault."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from fp8booster.checkpoints import newest_checkpoint, write_manifest
from tests.faults import runs
from tests.faults.commands import environment_of_command
from tests.faults.payloads import harmless, plant
from tests.faults.ranks import Harm
from tests.faults.runs import Reference, harmed, refer, went_on
from tests.faults.subjects import SUBJECTS, Place, checkpoints_of, prepare

ZERO = SUBJECTS["zero"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    return prepare(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def reference(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return refer(place, ZERO, tmp_path_factory.mktemp("zero"))


@pytest.mark.parametrize(
    ("rank", "event", "left"),
    [
        (
            0,
            "native half /fp8/checkpoints/.step-00000004.fp8booster-partial/optimizer/pytorch_optim-00001.bin",
            "step 2",
        ),
        (
            1,
            "native half /fp8/checkpoints/.step-00000004.fp8booster-partial/masters/rank-00001-of-00002.safetensors",
            "step 2",
        ),
        (0, "os.remove /fp8/checkpoints/.step-00000002.fp8booster-old/state.json", "step 4"),
    ],
)
def test_a_run_that_was_killed_in_a_save_goes_on_bit_for_bit(place, reference, tmp_path, rank, event, left):
    harm = Harm("file", rank, 1 + reference.events[rank].files.index(event))
    assert harmed(place, ZERO, reference, tmp_path / "run", harm) == left


def test_sigterm_to_one_rank_saves_a_step_from_which_a_run_goes_on_bit_for_bit(place, reference, tmp_path):
    of_first_step = next(
        number for number, name in enumerate(reference.events[1].collectives, 1) if name == "all_to_all_single"
    )
    harm = Harm("term", 1, of_first_step)
    assert harmed(place, ZERO, reference, tmp_path / "run", harm) == "step 3"


def test_code_in_a_checkpoint_does_not_run(place, reference, tmp_path):
    file = "optimizer/pytorch_optim-00001.bin"
    assert harmless(place, ZERO, reference, tmp_path / "run", file, "torch") == "refused"


def test_the_campaign_sees_a_changed_weight(place, reference, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(reference.begun, out)
    checkpoint = newest_checkpoint(checkpoints_of(ZERO, out))
    file = checkpoint / "optimizer" / "pytorch_optim-00001.bin"
    states = torch.load(file)
    states[0]["exp_avg"].view(-1)[0] += 1e-3
    torch.save(states, file)
    write_manifest(checkpoint)
    with pytest.raises(AssertionError, match=r"from step 2: .*rank-.*safetensors"):
        went_on(place, ZERO, reference, out)


def test_the_campaign_sees_harm_that_did_nothing(place, reference, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "run", lambda *arguments, **named: [])
    with pytest.raises(AssertionError, match="the harm did nothing"):
        harmed(place, ZERO, reference, tmp_path / "run", Harm("file", 0, 1))


def test_a_payload_runs_where_it_is_loaded_unsafely(tmp_path):
    for form in ("torch", "pickle"):
        plant(tmp_path / form, form, tmp_path / f"{form}-ran")
        with suppress(RuntimeError):  # what comes of it is no file of torch's
            torch.load(tmp_path / form, weights_only=False)
        assert (tmp_path / f"{form}-ran").is_dir()


_WRITES = """
import os, sys
from pathlib import Path
from tests.faults.file_events import FileEvents
events = FileEvents(sys.argv[1], fatal=int(sys.argv[2]), native=False)
folder = Path(sys.argv[1])
(folder / "made").mkdir()
(folder / "made" / "a").write_text("whole")
(folder / "made" / "a").rename(folder / "made" / "b")
(folder.parent / "elsewhere").write_text("not counted")
import shutil
shutil.rmtree(folder / "made")
print(*events.seen, sep="|")
"""


@pytest.mark.parametrize(
    ("fatal", "left"),
    [(1, []), (2, ["made"]), (3, ["made", "made/a"]), (4, ["made", "made/b"]), (5, ["made"]), (0, [])],
)
def test_a_process_is_killed_before_the_event_that_is_asked_for(tmp_path: Path, fatal: int, left: list[str]) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, "-c", _WRITES, str(folder), str(fatal)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == (-signal.SIGKILL if fatal else 0), done.stderr
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == left
    if not fatal:
        assert done.stdout.strip().split("|") == [
            "os.mkdir /made",
            "write /made/a",
            "os.rename /made/a",
            "os.remove /made/b",
            "os.rmdir /made",
        ]


_PRODUCT = """
import sys, torch
torch.manual_seed(0)
a, b = (torch.randn(64, 256, dtype=torch.float32).bfloat16() for _ in range(2))
sys.stdout.write(str((a @ b.T).view(torch.int16).long().sum().item()))
"""


def test_ranks_of_a_command_multiply_as_those_of_the_campaign(tmp_path):
    torch.manual_seed(0)
    a, b = (torch.randn(64, 256, dtype=torch.float32).bfloat16() for _ in range(2))
    here = (a @ b.T).view(torch.int16).long().sum().item()
    environment = environment_of_command() | {"TORCHELASTIC_ERROR_FILE": ""}
    done = subprocess.run([sys.executable, "-c", _PRODUCT], env=environment, capture_output=True, text=True, check=True)
    assert int(done.stdout) == here
