from __future__ import annotations

import pytest

from fp8booster.cli.train.run import run
from fp8booster.kernels import device
from tests.colossal.models import tiny_llama

SMALL = {"steps": 1, "batch": 2, "sequence": 32, "vocabulary": 300, "progress": "none"}


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"tp": 3, "plugin": "hybrid", "nproc": 3}, "cannot divide"),
        ({"nproc": 3, "tp": 2, "plugin": "hybrid"}, "cannot be divided into groups"),
        ({"batch": 10**6}, "tokens and one step takes"),
        ({"data": "absent.txt"}, "absent.txt does not exist"),
    ],
)
def test_a_command_that_is_refused_leaves_no_folder(tmp_path, given, says) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Some words to train on.\n" * 200)
    options = SMALL | {"data": str(text), "cache": str(tmp_path / "cache")} | given
    out = tmp_path / "runs" / "one"
    with pytest.raises((ValueError, OSError), match=says):
        run(options | {"out": str(out)}, None, "fp8booster train")
    assert not out.parent.exists()
    kept = tmp_path / "kept"
    kept.mkdir()
    with pytest.raises((ValueError, OSError), match=says):
        run(options | {"out": str(kept)}, None, "fp8booster train")
    assert list(kept.iterdir()) == []


def test_a_run_in_fp8_is_refused_on_a_gpu_without(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(device, "why_no_fp8", lambda _: "this GPU is too old")
    with pytest.raises(ValueError, match="this GPU is too old"):
        run(SMALL | {"out": str(tmp_path / "run"), "precision": "fp8"}, None, "fp8booster train")
    with pytest.raises(OSError, match=r"absent\.txt"):
        run(SMALL | {"out": str(tmp_path / "run"), "precision": "bf16", "data": "absent.txt"}, None, "fp8booster train")


@pytest.mark.parametrize("below", [".", "run"])
def test_a_file_in_place_of_the_runs_folder_is_named(tmp_path, below) -> None:
    file = tmp_path / "text.txt"
    file.write_text("Some words to train on.\n" * 200)
    given = SMALL | {"data": str(file), "cache": str(tmp_path / "cache"), "out": str(file / below)}
    with pytest.raises(ValueError, match=r"text\.txt is a file; give a folder"):
        run(given, None, "fp8booster train")


@pytest.mark.parametrize("name", ["summary.md", "loss.png", "page.html", "fp8"])
def test_a_run_does_not_write_over_what_is_no_run_s(tmp_path, name) -> None:
    (tmp_path / name).mkdir() if name == "fp8" else (tmp_path / name).write_text("mine")
    options = SMALL | {"data": str(tmp_path), "cache": str(tmp_path / "cache"), "out": str(tmp_path)}
    with pytest.raises(ValueError, match=f"{tmp_path} is no run's folder and has {name}, which a run would write"):
        run(options, None, "fp8booster train")


def test_more_layers_to_checkpoint_than_the_model_has_are_refused_at_once(tmp_path) -> None:
    options = SMALL | {"data": str(tmp_path / "absent"), "checkpointing": True, "checkpointed_layers": 5}
    with pytest.raises(ValueError, match="--checkpointed-layers is 5, and the model has 4"):
        run(options | {"out": str(tmp_path / "run")}, None, "fp8booster train")


def test_an_option_that_changes_nothing_here_is_refused(tmp_path, monkeypatch) -> None:
    tiny_llama().config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"--vocabulary is of a tokenizer that is trained, and the folder .* brings"):
        run({"model": str(tmp_path), "vocabulary": 300}, None, "fp8booster train")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="--nproc is 2, and the launcher has started 4 processes; leave it out"):
        run({"nproc": 2}, None, "fp8booster train")
