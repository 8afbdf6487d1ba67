"""`fp8booster plot`: what it reads, what it finds worst, what it advises, and the page."""

from __future__ import annotations

import errno
import json
import os
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fp8booster import FP8Config, convert_to_fp8, fuse, record
from fp8booster.cli.main import app
from fp8booster.cli.plot import advice
from fp8booster.cli.plot.advice import Tensor
from fp8booster.cli.plot.page import _label
from fp8booster.cli.plot.run import read_run
from fp8booster.cli.train.key_values import fp8_config
from fp8booster.cli.train.run import drawn_page
from tests.cli.plot.synthetic import HEADER, LINEARS, write_metrics, write_scales
from tests.nn.models import tiny_llama

DOWN = "model.layers.2.mlp.down_proj"


def plant(**changed: float) -> Any:
    """A change of one tensor at one step."""

    def change(record: dict[str, Any]) -> None:
        if (record["layer"], record["role"], record["step"]) == (DOWN, "input", 150):
            record.update(changed)

    return change


OTHERS = [
    {"name": "experts.up_proj", "precision": "FP8", "notes": ""},
    {"name": "conv.weight", "precision": "BF16", "notes": "no linear layer"},
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run in both precisions, with a small record in which one tensor at one step is far above its limit."""
    folder = tmp_path / "run <b>&"
    for precision, factor in (("bf16", 1.0), ("fp8", 1.01)):
        write_metrics(folder / precision, 40, factor)
    write_scales(folder / "fp8" / "scales.jsonl", 4, 5, plant(flushed=0.2, snr_db=12.5, outlier=321.0))
    layers = [
        {"name": DOWN, "shape": [1, 1], "precision": "FP8", "notes": ""},
        {"name": "lm_head", "shape": [1, 1], "precision": "BF16", "notes": "FP8Config.layers leaves it out"},
    ]
    (folder / "fp8" / "result.json").write_text(json.dumps({"layers": layers, "others": OTHERS}))
    return folder


def page_of(folder: Path, *options: object) -> str:
    done = CliRunner().invoke(app, ["plot", str(folder), *map(str, options)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return (folder / "page.html").read_text(encoding="utf-8")


def data_of(page: str) -> list[dict[str, Any]]:
    return json.loads(unescape(re.search(r'<script type="application/json" id="data">(.*?)</script>', page)[1]))


def charts_of(page: str) -> list[dict[str, Any]]:
    return [json.loads(unescape(chart)) for chart in re.findall(r'<figure data-chart="(.*?)">', page)]


def test_a_chart_draws_what_the_page_holds(run: Path) -> None:
    page = page_of(run)
    data = data_of(page)
    for chart in charts_of(page):
        values = [data[chart["set"]][chart["quantity"]][row] for row in chart["rows"]]
        found = [value for row in values for value in row if value is not None]
        assert len(values[0]) == len(data[chart["set"]]["steps"])
        if chart["kind"] == "lines":
            left, top, right, bottom = chart["limits"]
            assert (left, right) == (data[chart["set"]]["steps"][0], data[chart["set"]]["steps"][-1])
            assert bottom <= min(found) <= max(found) <= top
        else:
            assert len(data[chart["set"]]["labels"]) == len(values)
            assert max(found) <= chart["range"][1]


def test_the_worst_tensor_comes_first_with_its_numbers(run: Path) -> None:
    page = page_of(run)
    rows = re.findall(r"<tr><td>(.*?)</td></tr>", page)
    cells = [re.sub("<.*?>", "", cell) for cell in rows[0].split("</td>")]
    assert cells == [DOWN, "input", "25", "20 %", "12.5 dB", "0", "0", "321", "150", "e4m3"]
    record = json.loads(CliRunner().invoke(app, ["plot", str(run), "--json"]).stdout)
    assert [record["worst"][0][name] for name in ("layer", "step", "flushed")] == [DOWN, 150, 0.2]
    assert record["not_in_fp8"] == ["lm_head (FP8Config.layers leaves it out)", "conv.weight (no linear layer)"]
    assert record["in_fp8"] == "1 of 2, and 1 of 2 other weights"


def test_the_numbers_of_the_page_are_those_of_the_files(run: Path) -> None:
    loss, *roles = data_of(page_of(run))
    assert loss["names"] == ["BF16", "FP8"]
    losses = [json.loads(line)["loss"] for line in (run / "fp8" / "metrics.jsonl").read_text().splitlines()]
    assert loss["loss"][1] == pytest.approx(losses, rel=1e-4)
    weights, inputs, gradients = roles
    assert inputs["steps"] == [50, 100, 150, 200, 250]
    assert inputs["flushed"][inputs["names"].index(DOWN)][2] == 20
    for line in (run / "fp8" / "scales.jsonl").read_text().splitlines()[1:]:
        record = json.loads(line)
        found = {"weight": weights, "input": inputs, "output gradient": gradients}[record["role"]]
        row, column = found["names"].index(record["layer"]), found["steps"].index(record["step"])
        assert found["flushed"][row][column] == pytest.approx(100 * record["flushed"], rel=0.06)
        assert 2 ** found["scale"][row][column] == pytest.approx(record["scale"], rel=0.004)
        assert found["snr"][row][column] == pytest.approx(record["snr_db"], abs=0.051)


def test_the_page_stands_alone_and_escapes_names(run: Path) -> None:
    def rename(record: dict[str, Any]) -> None:
        if record["layer"] == DOWN:
            record["layer"] = "</script><i>$x_1$ \"'&"

    write_scales(run / "fp8" / "scales.jsonl", 2, 3)
    write_scales(run / "fp8" / "scales.jsonl", 3, 3, rename)
    page = page_of(run)
    assert "http" not in page
    assert not re.search(r"(src|href)=\"(?!#|data:)", page)
    assert "<i>" not in page
    assert "<b>" not in page
    assert "</script><i>$x_1$ \"'&" in data_of(page)[1]["names"]
    charts = charts_of(page)
    assert len(charts) > 10
    assert all(len(chart["text"]) > 20 for chart in charts)


def test_another_run_is_what_the_loss_is_compared_with(run: Path, tmp_path: Path) -> None:
    write_metrics(tmp_path / "other", 40, 0.5)
    page = page_of(run, "--against", tmp_path / "other")
    assert data_of(page)[0]["names"] == ["other", "BF16", "FP8"]
    assert "from other, %" in page


def test_a_run_that_recorded_no_scales_has_a_page_of_its_loss(tmp_path: Path) -> None:
    write_metrics(tmp_path, 5000)
    page = page_of(tmp_path)
    (loss,) = data_of(page)
    assert loss["names"] == [tmp_path.name]
    assert len(loss["steps"]) < 700
    written = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [max(loss["loss"][0]), min(loss["loss"][0])] == pytest.approx([max(written), min(written)], rel=1e-4)
    assert "--record" in page


def test_a_page_of_many_layers_and_samples_is_small(tmp_path: Path) -> None:
    write_scales(tmp_path / "scales.jsonl", 32, 110)
    page = page_of(tmp_path)
    assert len(page) < 1.5e6
    weights = data_of(page)[0]
    assert len(weights["names"]) == 224
    assert len(weights["steps"]) == 100
    assert (weights["steps"][0], weights["steps"][-1]) == (50, 5500)


def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["plot", str(tmp_path)])
    assert done.exit_code == 2
    assert "give the folder of a run" in done.output


def test_a_line_that_a_kill_cut_short_and_nulls_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "scales.jsonl"
    write_scales(path, 3, 2, lambda record: record.update(snr_db=None, scale=None, outlier=None))
    with path.open("a") as stream:
        stream.write('{"step": 3')
    assert len(read_run(tmp_path).worst) == 63
    assert page_of(tmp_path).count("– dB") > 10


def advised(path: Path, change: Any, layers: int = 6, samples: int = 8) -> dict[str | None, str]:
    write_scales(path / "scales.jsonl", layers, samples, change)
    return {each.option: each.reason for each in read_run(path).advice}


def test_nothing_is_advised_within_the_limits(tmp_path: Path) -> None:
    for change in (plant(), outliers_grow_in_all_layers, outliers_cost_nothing):
        assert advised(tmp_path, change) == {}


def test_values_that_are_not_finite_come_first_and_no_recipe_is_for_them(tmp_path: Path) -> None:
    found = advised(tmp_path, plant(non_finite=2, flushed=0.9))
    assert list(found) == [None]
    assert f"the input of {DOWN} at step 150" in found[None]
    assert read_run(tmp_path).worst[0].non_finite == 2


def test_a_reason_reads_well_of_one_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for scaling, changed, reason in (
        ("delayed", {"saturated": 0.1}, "1 tensor with clipped values, "),
        ("tensorwise", {"snr_db": 12.0}, "1 tensor above the limits: "),
    ):
        monkeypatch.setitem(HEADER, "config", {"scaling": scaling})
        assert [each.startswith(reason) for each in advised(tmp_path, plant(**changed)).values()] == [True]


def outliers_of_swiglu_grow(record: dict[str, Any]) -> None:
    if record["layer"] == DOWN and record["role"] == "input":
        record.update(outlier=record["outlier"] * record["step"] / 10, flushed=0.1)


def outliers_grow(record: dict[str, Any]) -> None:
    if record["layer"] == "model.layers.2.mlp.up_proj" and record["role"] == "input":
        record.update(outlier=record["outlier"] * record["step"] / 10, flushed=0.002)


def outliers_grow_in_all_layers(record: dict[str, Any]) -> None:
    record.update(outlier=record["outlier"] * record["step"] / 10, flushed=0.002)


def outliers_cost_nothing(record: dict[str, Any]) -> None:
    if record["layer"] == DOWN and record["role"] == "input":
        record.update(outlier=record["outlier"] * 10, flushed=0.0005)


def weights_are_clipped(record: dict[str, Any]) -> None:
    if record["role"] == "weight":
        record["saturated"] = 0.01


def ends_are_noisy(record: dict[str, Any]) -> None:
    if re.search(r"\.[05]\.", record["layer"]):
        record["snr_db"] -= 8


def inputs_are_flushed(record: dict[str, Any]) -> None:
    if record["role"] == "input":
        record["flushed"] += 0.1


def gradients_are_flushed(record: dict[str, Any]) -> None:
    if record["role"] == "output gradient":
        record.update(flushed=0.1, format="e4m3", snr_db=31)


def several(record: dict[str, Any]) -> None:
    outliers_of_swiglu_grow(record)
    gradients_are_flushed(record)


@pytest.mark.parametrize(
    ("config", "change", "options"),
    [
        ({}, outliers_of_swiglu_grow, ["scaling=smooth-swiglu"]),
        ({}, outliers_grow, ["scaling=blockwise"]),
        ({}, ends_are_noisy, ["high_precision_ends=1"]),
        ({}, inputs_are_flushed, ["scaling=blockwise"]),
        ({}, gradients_are_flushed, ["formats.gradient=e5m2"]),
        ({}, several, ["scaling=smooth-swiglu", "formats.gradient=e5m2"]),
        # what blocks or real-time scales have no use for
        ({"scaling": "blockwise"}, several, []),
        ({}, weights_are_clipped, []),
        ({"scaling": "amax"}, weights_are_clipped, []),
        ({"scaling": "delayed"}, weights_are_clipped, ["scaling=tensorwise"]),
        ({"scaling": "constant"}, weights_are_clipped, ["scaling=tensorwise"]),
        # where powers of channels are refused
        ({"cuda_graphs": True}, outliers_of_swiglu_grow, ["scaling=blockwise"]),
        ({"fused": False}, outliers_of_swiglu_grow, ["scaling=blockwise"]),
    ],
)
def test_a_recipe_is_advised_for_what_it_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], change: Any, options: list[str]
) -> None:
    monkeypatch.setitem(HEADER, "config", {"scaling": "tensorwise", **config})
    assert list(advised(tmp_path, change)) == options
    fp8_config(options)  # it takes such options


def test_experts_in_grouped_products_are_not_advised_a_format_that_they_cannot_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"scaling": "tensorwise", "formats": {"gradient": "float8_e5m2"}}
    monkeypatch.setitem(HEADER, "config", config)
    found = advised(tmp_path, gradients_are_flushed)
    assert list(found) == [None]
    assert "grouped products of experts, which multiply E4M3 alone" in found[None]


@pytest.mark.parametrize(("factor", "planted", "steps"), [(1, 0, 8), (200, 0, 1), (200, 0, 8), (200, 4, 8)])
def test_of_a_model_with_a_large_channel_a_recipe_is_advised_with_its_numbers(
    tmp_path: Path, factor: int, planted: int, steps: int
) -> None:
    model = convert_to_fp8(tiny_llama().bfloat16(), FP8Config(always=True))
    fuse(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with record(model, every=1, sink=tmp_path / "scales.jsonl", on_warning=lambda sentence: None):
        for step in range(steps):
            if step == planted:
                with torch.no_grad():
                    model.model.layers[1].mlp.up_proj.weight[7] *= factor
            torch.manual_seed(step)
            tokens = torch.randint(0, 128, (2, 32))
            model(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    found = read_run(tmp_path)
    assert [each.option for each in found.advice] == ([] if factor == 1 else ["scaling=smooth-swiglu"])
    for each in found.advice:
        worst = next(one for one in found.worst if (one.layer, one.role) == ("model.layers.1.mlp.down_proj", "input"))
        assert f"the input of {worst.layer}, at step {worst.step} with {worst.flushed:.2%} flushed" in each.reason
        assert each.line.startswith("--fp8-option scaling=smooth-swiglu: 1 tensor with outliers more than 4 times")


@pytest.mark.parametrize("scaling", ["delayed", "constant"])
@pytest.mark.parametrize("change", [outliers_of_swiglu_grow, outliers_grow, inputs_are_flushed])
def test_what_needs_real_time_scales_begins_with_these(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, scaling: str
) -> None:
    monkeypatch.setitem(HEADER, "config", {"scaling": scaling})
    (option, reason), *others = advised(tmp_path, change).items()
    assert (option, others) == ("scaling=tensorwise", [])
    assert re.search(r", and (scaling=smooth-swiglu|scaling=blockwise) goes with real-time scales alone: most", reason)


def test_the_limits_lie_a_bit_below_what_a_format_gives() -> None:
    assert advice.least_snr("e4m3") == pytest.approx(32.5 - 6, abs=0.1)
    assert advice.least_snr("float8_e5m2") == pytest.approx(26.5 - 6, abs=0.1)
    assert advice.least_snr("8-bit codes") == -float("inf")


def test_a_run_ends_well_without_a_page_that_cannot_be_drawn(run: Path) -> None:
    *advice, where = drawn_page(run).splitlines()
    assert where == f"What FP8 did to each tensor: {run / 'page.html'}."
    assert advice == [each.line for each in read_run(run).advice]
    assert (run / "page.html").exists()
    (run / "fp8" / "scales.jsonl").write_text("{\n")
    told = drawn_page(run)
    assert "was not drawn" in told
    assert "is not JSON" in told
    assert f"fp8booster plot '{run}'" in told


def suggested(folder: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["doctor", str(folder), *options], catch_exceptions=False)
    return done.output if done.exit_code in (0, 2) else ""


def test_the_doctor_suggests_what_the_page_advises(run: Path, tmp_path: Path) -> None:
    first, *lines = suggested(run).splitlines()
    assert first == "Change one at a time, the first one first:"
    assert lines == [each.line for each in read_run(run).advice]
    assert lines
    record = json.loads(suggested(run, "--json"))
    assert [each["option"] for each in record["advice"]] == [each.option for each in read_run(run).advice]
    write_scales(tmp_path / "scales.jsonl", 4, 5)
    assert suggested(tmp_path) == "Keep the recipe: 84 tensors in 5 samples ask for no other.\n"


def test_the_doctor_needs_a_record(tmp_path: Path) -> None:
    write_metrics(tmp_path, 4)
    assert "train it with --record 50" in " ".join(suggested(tmp_path).split())


def test_a_page_is_written_where_no_folder_was_and_not_in_place_of_one(run: Path, tmp_path: Path) -> None:
    page = tmp_path / "pages" / "one.html"
    assert CliRunner().invoke(app, ["plot", str(run), "--out", str(page)]).exit_code == 0
    assert page.exists()
    done = CliRunner().invoke(app, ["plot", str(run), "--out", str(page.parent)])
    assert done.exit_code == 2
    assert "is a folder; give the page's file" in " ".join(done.stderr.split())
    assert sorted(page.parent.parent.glob("pages*")) == [page.parent]


@pytest.mark.parametrize("layers", [0, 4, 32])
def test_names_beside_a_map_are_whole(layers: int) -> None:
    names = ("reduce_scatter_tensor", "all_gather_into_tensor", "all_reduce sums", "lm_head", "wte.weight")
    names = (*(f"model.layers.{layer}.{linear}" for layer in range(layers) for linear in LINEARS), *names)
    labels = [_label(Tensor(name, "message", "e4m3", np.array([]), {})) for name in names]
    assert labels[-5:] == ["reduce_scatter_\ntensor", "all_gather_\ninto_tensor", "all_reduce sums", "lm_head", "wte"]


def test_a_record_without_tensors_asks_for_one_with_some(run: Path) -> None:
    (run / "fp8" / "scales.jsonl").write_text(json.dumps(HEADER) + "\n")
    page = page_of(run)
    assert "No tensors were recorded" in page
    assert "Worst tensors" not in page
    assert "within their limits" not in page


def test_a_tensor_that_is_not_finite_has_no_times_of_a_limit(run: Path) -> None:
    write_scales(run / "fp8" / "scales.jsonl", 4, 5, plant(non_finite=3, snr_db=None, scale=None))
    row = re.search(r"<tr><td>model.*?</tr>", page_of(run))[0]
    assert '<td>input</td><td class="above">not finite</td>' in row
    assert '<td class="above">3</td>' in row


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["plot", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


def test_a_file_that_is_no_page_is_not_written_over(run, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text("notes")
    os.mkfifo(tmp_path / "pipe")
    for path in (run / "fp8" / "metrics.jsonl", run / "fp8" / "scales.jsonl", other, tmp_path / "pipe"):
        before = path.read_bytes() if path.is_file() else None
        assert f"--out {path} is there and no HTML page, and is left as it is; give another file." in refused(
            run, "--out", path
        )
        assert before is None or path.read_bytes() == before
    for text in ("", "<!DOCTYPE html>\n<p>"):
        (tmp_path / "page.html").write_text(text)
        assert page_of(run, "--out", run / "page.html")


@pytest.mark.parametrize("flag", ["--out", "--against"])
def test_what_is_of_the_page_does_not_go_with_json(run, flag):
    assert f"{flag} is about the page, which --json does not write" in refused(run, "--json", flag, run)


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("metrics.jsonl", b"\xff\xfe\x00", "metrics.jsonl is not text; put it right"),
        ("scales.jsonl", b"\xff\xfe\x00", "scales.jsonl is not text; put it right"),
        ("result.json", b'{"layers": [{}]}', "row 1 of 'layers' in {file} has no 'name'; remove the file"),
        ("result.json", b'{"layers": [3]}', "row 1 of 'layers' in {file} is a whole number where an object belongs"),
    ],
)
def test_a_file_that_is_damaged_is_named(run, file, content, says):
    path = run / "fp8" / file
    path.write_bytes(content)
    assert says.format(file=path) in refused(run)


def test_a_number_of_400_digits_is_told(run):
    path = run / "fp8" / "metrics.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text(json.dumps(json.loads(first) | {"loss": 10**400}) + "\n" + "".join(rest))
    assert f"'loss' in Line 1 of {path} is a number of more than 64 bits where a number belongs" in refused(run)


def test_a_full_disk_is_told_with_the_file(run, monkeypatch):
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    assert f"{run / 'page.html'}: No space left on device." in refused(run)
    assert not list(run.glob("*page*"))
