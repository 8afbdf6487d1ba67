from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import convergence
from benchmarks.training.convergence import BF16, Difference, course_table, differences, end_table, plot, tenths
from tests.programs import run_program

VARIANTS = [BF16, "BF16, fused blocks", "FP8"]
STEPS = 20
FLAT = [4.0] * STEPS
LOSSES = {
    0: {BF16: FLAT, "FP8": [4.0] * 18 + [4.04] * 2},
    1: {BF16: [2.0] * STEPS, "FP8": [2.0] * 18 + [1.99, 2.03]},
    2: {"FP8": FLAT},
}


def test_differences_are_means_over_the_seeds_that_have_both() -> None:
    found = differences(LOSSES, "FP8")
    assert len(found) == 10
    assert (found[0].mean, found[0].error) == (0.0, 0.0)
    assert found[-1].mean == pytest.approx((0.01 + 0.005) / 2)
    assert found[-1].error == pytest.approx(0.0025)  # half the distance of two values
    assert str(found[-1]) == "+0.75 ± 0.25 %"
    assert differences(LOSSES, "BF16, fused blocks") == []


def test_one_seed_has_no_error() -> None:
    one = Difference.of([-0.002])
    assert math.isnan(one.error)
    assert str(one) == "-0.20 %"


def test_fewer_steps_than_ten() -> None:
    assert tenths([3.0, 1.0]) == [3.0, 1.0]
    assert tenths([float(step) for step in range(20)])[-1] == 18.5


def test_tables() -> None:
    ends = end_table(LOSSES, VARIANTS)
    assert [[column.show(record) for column in ends.columns] for record in ends.records] == [
        ["0", "4.0000", "-", "4.0400 (+1.00 %)"],
        ["1", "2.0000", "-", "2.0100 (+0.50 %)"],
        ["2", "-", "-", "4.0000"],
        ["all", "", "", "+0.75 ± 0.25 %"],
    ]
    course = course_table(LOSSES, VARIANTS)
    rows = [[column.show(record) for column in course.columns] for record in course.records]
    assert rows[0] == ["1 to 2", "-", "+0.00 ± 0.00 %"]
    assert rows[-1] == ["19 to 20", "-", "+0.75 ± 0.25 %"]
    assert len(rows) == 10


def test_plot(tmp_path) -> None:
    assert plot(tmp_path / "a.png", LOSSES, VARIANTS, "title")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert not plot(tmp_path / "b.png", {0: {BF16: FLAT}}, VARIANTS, "title")
    assert not (tmp_path / "b.png").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--also", "rowwise"], "error: --also 'rowwise' has no '='; write it as key=value"),
        (["--model", "8b"], "error: --model is '8b'; use one of"),
        (["--also", "scales=two"], "error:"),
        (["--fp8-option", "rowwise"], "error:"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(convergence.app, ["--device", "cpu", *arguments])
    assert result.exit_code == 2
    assert result.output.startswith(sentence)


def write(path: Path, seed: int, steps: int = STEPS) -> str:
    head = {
        "GPU": "CPU",
        "ranks": "1",
        "training": f"model micro, steps {steps}",
        "date": "2026-11-22",
        "torch": "2",
        "command": f"`first-seed {seed}`",
    }
    losses = {seed: {BF16: [4.0] * steps, "FP8": [4.0 + 0.04 * seed] * steps}}
    _, written = convergence.deliver("convergence", "", head, losses, [BF16, "FP8"], {}, None, path)
    return str(*written)


def test_results_of_several_seeds_are_joined(tmp_path) -> None:
    files = [write(tmp_path / f"{seed}.json", seed) for seed in (2, 0)]
    joined = tmp_path / "joined.json"
    result = CliRunner().invoke(convergence.app, ["join", *files, "--json", str(joined), "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    zero, two, over_all = json.loads(joined.read_text())["tables"]["ends"]
    assert (zero["seed"], two["seed"]) == ("0", "2")
    assert over_all["differences"]["FP8"]["shown"] == "+1.00 ± 1.00 %"
    assert list(tmp_path.glob("*.png"))
    (written,) = tmp_path.glob("*.md")
    assert written.read_text().startswith("# Losses of 2 seeds, each on 1 rank\n")
    assert "first-seed 2" in written.read_text()


def test_what_cannot_be_joined_is_one_sentence(tmp_path) -> None:
    one, same = write(tmp_path / "a.json", 0), write(tmp_path / "b.json", 0)
    longer = write(tmp_path / "c.json", 1, steps=30)
    (tmp_path / "d.json").write_text("{}")
    for files, sentence in [
        ([one, same], "has seed 0, which another file has too"),
        ([one, longer], "differs in training"),
        ([one, str(tmp_path / "d.json")], "is not a result of `benchmarks.convergence --json`"),
    ]:
        result = CliRunner().invoke(convergence.app, ["join", *files])
        assert result.exit_code == 2
        assert sentence in result.output


def test_the_whole_command(tmp_path) -> None:
    (tmp_path / "text.txt").write_text("\n".join(f"{i} times {i} is {i * i}." for i in range(1500)))
    command = ["benchmarks.convergence", "--device", "cpu", "--processes", "1"]
    command += ["--model", "micro", "--sequence", "32", "--data", str(tmp_path / "text.txt"), "--lr", "1e-2"]
    command += ["--steps", "12", "--seeds", "2", "--first-seed", "3", "--fp8-option", "emulate=true"]
    command += ["--also", "gradient_format=e4m3", "--out", str(tmp_path), "--json", str(tmp_path / "a.json")]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = run_program(*command, environment=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "a.json").read_text())
    assert found["left_out"] == {}
    *by_seed, over_all = found["tables"]["ends"]
    assert [record["seed"] for record in by_seed] == ["3", "4"]
    for record in by_seed:
        assert list(record["losses"]) == [*VARIANTS, "FP8, gradient_format=e4m3"]
        assert {len(losses) for losses in record["losses"].values()} == {12}
        assert record["losses"]["FP8"] != record["losses"]["FP8, gradient_format=e4m3"]
        assert record["last"]["FP8"] == pytest.approx(record["last"][BF16], rel=0.02)
        assert record["last"]["FP8"] < record["losses"]["FP8"][0]
    assert by_seed[0]["losses"][BF16] != by_seed[1]["losses"][BF16]
    assert abs(over_all["differences"]["FP8"]["mean"]) < 0.02
    (markdown,) = tmp_path.glob("convergence-micro-1-seeds-3-4_*.md")
    (image,) = tmp_path.glob("convergence-micro-1-seeds-3-4_*.png")
    assert image.name in markdown.read_text()
