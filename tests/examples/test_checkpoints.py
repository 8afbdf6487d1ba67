"""The examples lose no run: kills, cut files, mixed parts and SIGTERM, on two gloo ranks."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from fp8booster.checkpoints import checkpoints_in
from tests.distributed import RankError, run_ranks
from tests.examples.checkpoint_ranks import train, train_and_die, train_until_told

PLUGIN = ["--plugin", "low_level_zero"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("text") / "text.txt"
    file.write_text(Path(sysconfig.get_paths()["stdlib"], "ast.py").read_text()[:20000])
    return str(file)


@pytest.fixture(scope="module")
def saved(text: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has saved steps 2 and 4."""
    out = tmp_path_factory.mktemp("saved") / "run"
    run_ranks(train, 2, PLUGIN, text, [["--steps", "4", "--out", str(out)]], initialize=False)
    assert names(out) == ["step-00000002", "step-00000004"]
    return out


def names(out: Path) -> list[str]:
    return [checkpoint.name for checkpoint in checkpoints_in(out)]


def resume(saved: Path, text: str, *folders: Path) -> list[list[float] | str]:
    """What comes of going on to step 5 in each folder; the ranks agree."""
    runs = [["--steps", "5", "--resume", "--out", str(folder)] for folder in folders]
    first, second = run_ranks(train, 2, PLUGIN, text, runs, initialize=False)
    assert first == second
    return first


def test_a_broken_checkpoint_is_passed_over_and_where_none_is_whole_it_is_named(
    saved: Path, text: str, tmp_path: Path
) -> None:
    # all of the runs in one start of ranks
    whole, cut, mixed, earlier, lost = (tmp_path / name for name in ("whole", "cut", "mixed", "earlier", "lost"))
    for folder in (whole, cut, mixed, earlier, lost):
        shutil.copytree(saved, folder)
    shutil.rmtree(earlier / "step-00000004")
    (weights,) = (cut / "step-00000004" / "model").glob("*.safetensors")
    os.truncate(weights, weights.stat().st_size // 2)
    shutil.rmtree(mixed / "step-00000004" / "optimizer")
    shutil.copytree(mixed / "step-00000002" / "optimizer", mixed / "step-00000004" / "optimizer")
    for checkpoint in checkpoints_in(lost):
        next((checkpoint / "optimizer").glob("*.bin")).unlink()

    of_whole, of_cut, of_mixed, of_earlier, of_lost = resume(saved, text, whole, cut, mixed, earlier, lost)
    assert len(of_whole) == 1
    assert len(of_earlier) == 3
    assert of_cut == of_mixed == of_earlier
    assert of_lost.count("is missing") == 2
    assert f"no checkpoint in {lost} is whole, so give another --out" in of_lost
    # what was passed over has been written anew, and the last two stay
    assert names(cut) == names(mixed) == ["step-00000004", "step-00000005"]


def test_a_kill_between_weights_and_optimizer_leaves_the_checkpoint_before(
    saved: Path, text: str, tmp_path: Path
) -> None:
    killed, earlier = tmp_path / "killed", tmp_path / "earlier"
    with pytest.raises(RankError, match="rank 0 died"):
        run_ranks(train_and_die, 2, PLUGIN, text, str(killed), initialize=False)
    assert names(killed) == ["step-00000002"]
    shutil.copytree(saved, earlier)
    shutil.rmtree(earlier / "step-00000004")
    of_killed, of_earlier = resume(saved, text, killed, earlier)
    assert of_killed == of_earlier


def test_sigterm_saves_the_step_at_hand_on_all_ranks(text: str, tmp_path: Path) -> None:
    outcomes = run_ranks(train_until_told, 2, PLUGIN, text, str(tmp_path), initialize=False)
    before, after = outcomes[0]
    assert outcomes[1] == (before, after)
    assert (len(before), len(after)) == (3, 5)
    assert names(tmp_path) == ["step-00000006", "step-00000008"]
